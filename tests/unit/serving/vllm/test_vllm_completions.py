"""vLLM's answers as completions: exactly what they say, or an error."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pipelinerl.errors import PromptTooLongError, RequestError
from pipelinerl.serving.vllm.messages import (
    Choice,
    Choices,
    InvalidAnswerError,
    Label,
    completion_of,
    generate_body,
    worker_error,
)
from pipelinerl.types import Completion, GenerationRequest, SamplingParams, VersionSpan

REQUEST = GenerationRequest(
    id="a", prompt_ids=(3, 4), sampling=SamplingParams(max_tokens=4, temperature=0.7, stop_token_ids=(1, 9), seed=5)
)


def choice(ids: list[int], *, reason: str | None = "length", spans: Any = None, **changes: Any) -> Choice:
    content = [{"token_id": token, "logprob": -0.5 * token, "rank": 1} for token in ids]
    spans = [{"version": "7", "start": 0, "end": len(ids)}] if spans is None else spans
    fields = {"index": 0, "token_ids": ids, "logprobs": {"content": content}, "finish_reason": reason}
    return msgspec.convert({**fields, "weight_versions": spans} | changes, Choice)


def test_everything_that_an_answer_says_is_in_the_completion() -> None:
    spans = [{"version": "7", "start": 0, "end": 3}, {"version": "12", "start": 3, "end": 4}]
    end = choice([5, 6, 2, 8], spans=spans)
    assert completion_of(REQUEST, end.tokens, end) == Completion(
        request_id="a",
        token_ids=(5, 6, 2, 8),
        logprobs=(-2.5, -3.0, -1.0, -4.0),
        weight_versions=(VersionSpan(7, 0, 3), VersionSpan(12, 3, 4)),
        finish_reason="length",
    )


@pytest.mark.parametrize(
    "end",
    [
        choice([5, 6, 2, 8], reason=None),
        choice([5, 6, 2, 8], reason="error"),
        choice([5, 6, 2, 8], spans=[]),
        choice([5, 6, 2, 8], weight_versions=None),
        choice([5, 6, 2, 8], spans=[{"version": "7", "start": 0, "end": 3}]),
        choice([5, 6, 2, 8], spans=[{"version": "v7", "start": 0, "end": 4}]),
        choice([5, 6, 2, 8], logprobs=None),
        choice([5, 6, 2, 8], logprobs={"content": None}),
        choice([5, 6, 2, 8], logprobs={"content": [{"token_id": 5, "logprob": -1.0}]}),
        choice([5], logprobs={"content": [{"token_id": 6, "logprob": -1.0}]}),
        choice([5], logprobs={"content": [{"token_id": 5, "logprob": -9999.0}]}),
    ],
)
def test_an_answer_that_lacks_or_contradicts_something_is_an_error(end: Choice) -> None:
    with pytest.raises(InvalidAnswerError):
        completion_of(REQUEST, end.tokens, end)


@pytest.mark.parametrize(
    "label", ["default", "", "-1", "1.0", "٣", "9" * 19, "7@", "7@cafe", "7@cafe.x", "7@a b.1", "7@.1", "7\n"]
)
def test_only_numbers_and_those_of_sessions_are_versions(label: str) -> None:
    assert Label.of("0") == Label(0)
    end = choice([5, 6, 2, 8], spans=[{"version": "7@cafe.2", "start": 0, "end": 4}])
    for session in (None, ("cafe", 2)):
        assert completion_of(REQUEST, end.tokens, end, session).weight_versions == (VersionSpan(7, 0, 4),)
    for other in (("", 0), ("cafe", 1), ("beef", 2)):
        with pytest.raises(InvalidAnswerError, match="of another session"):
            completion_of(REQUEST, end.tokens, end, other)
    assert [str(Label.of(text)) for text in ("12", "7@cafe.2")] == ["12", "7@cafe.2"]
    with pytest.raises(InvalidAnswerError):
        Label.of(label)
    for choices in ((), (end, end)):
        with pytest.raises(InvalidAnswerError):
            _ = Choices(choices).only


def test_a_request_asks_for_no_more_and_no_less_than_ours() -> None:
    body = generate_body(REQUEST, 6)
    assert (body["request_id"], body["token_ids"], body["stream"]) == ("a", (3, 4), False)
    assert body["sampling_params"] == {
        "max_tokens": 4,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": 0,
        "stop_token_ids": (1, 9),
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }


def test_what_vllm_would_quietly_change_is_refused() -> None:
    with pytest.raises(PromptTooLongError, match=r"2 prompt tokens \+ 4 new tokens > 5"):
        generate_body(REQUEST, 5)
    sampling = SamplingParams(max_tokens=4, temperature=0.001)
    with pytest.raises(RequestError, match="temperature"):
        generate_body(GenerationRequest(id="a", prompt_ids=(3,), sampling=sampling), 64)


def test_the_message_of_a_worker_is_found_in_whatever_is_around_it() -> None:
    inner = "weights refused: it isn't there"
    message = f"Call to collective_rpc method failed: Worker failed with error '{inner}', please check the stack trace"
    assert worker_error(message) == worker_error(f"answered 500: {message}") == inner
    assert worker_error("plain") == "plain"
