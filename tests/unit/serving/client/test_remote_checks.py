"""What an answer must be, and tokens that come once whatever is sent again."""

from __future__ import annotations

import msgspec
import pytest

from pipelinerl.serving.client.adapter import find_fault
from pipelinerl.types import Completion, GenerationRequest, SamplingParams, VersionSpan

REQUEST = GenerationRequest(id="r", prompt_ids=(1,), sampling=SamplingParams(max_tokens=4, stop_token_ids=(9,)))
FULL = Completion(
    request_id="r",
    token_ids=(3, 4, 5, 6),
    logprobs=(-0.5, -1.0, 0.0, -2.0),
    weight_versions=(VersionSpan(2, 0, 3), VersionSpan(4, 3, 4)),
    finish_reason="length",
)


EMPTY: dict[str, object] = {"token_ids": (), "logprobs": (), "weight_versions": ()}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"token_ids": (3, 4, 5, 9), "finish_reason": "stop"}, None),
        ({"finish_reason": "cancelled"}, None),
        ({**EMPTY, "finish_reason": "cancelled"}, None),
        ({"request_id": "other"}, "request 'other'"),
        ({"logprobs": (-0.5, -1.0, 0.0)}, "4 tokens and 3"),
        ({"logprobs": (-0.5, -1.0, 0.0, float("nan"))}, "log-prob"),
        ({"logprobs": (-0.5, -1.0, 0.0, 0.1)}, "log-prob"),
        ({"token_ids": (3, 4, 5, 10)}, "vocabulary of 10"),
        ({"token_ids": (3, 4, 5, 6, 7)}, "5 tokens, more than the limit of 4"),
        ({"weight_versions": (VersionSpan(2, 0, 3),)}, "cover"),
        ({"token_ids": (3, 9, 5, 6)}, "after a stop token"),
        ({"token_ids": (3, 4, 5, 9)}, "length"),
        ({"finish_reason": "stop"}, "not a stop token"),
        ({**EMPTY, "finish_reason": "stop"}, "not a stop token"),
        ({"token_ids": (3,), "logprobs": (-1.0,), "weight_versions": (VersionSpan(0, 0, 1),)}, "after 1 of 4"),
    ],
)
def test_what_can_be_the_answer_and_what_can_not(changes: dict[str, object], words: str | None) -> None:
    fault = find_fault(msgspec.structs.replace(FULL, **changes), REQUEST, 10)
    assert fault is None if words is None else words in str(fault)
