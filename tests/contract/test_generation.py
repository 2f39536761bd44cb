"""What the contract asks of any server; see `conftest`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from pipelinerl.errors import PipelineRLError, PromptTooLongError, RequestError
from pipelinerl.serving.client.http import HttpClient, RefusalError
from pipelinerl.serving.wire import token_events
from pipelinerl.types import GenerationRequest, TokenEvent, versions_from_spans
from tests.contract.conftest import Subject, first_event, only_ours, setting

TOLERANCE = 1e-4
ENDS_S = 10.0
"""How long a request whose client has left may take to end."""


async def test_it_describes_itself(subject: Subject) -> None:
    info = subject.info
    assert info.instance, "a restart could not be detected"
    assert info.slots >= 1
    assert info.max_length >= 16, "the tests need 16 tokens"
    assert info.vocabulary >= 2
    assert all(0 <= token < info.vocabulary for token in info.stop_token_ids)
    assert (await subject.server.info()).instance == info.instance


async def test_completions_are_exact(subject: Subject) -> None:
    """They have the requested length, with a log-prob and a version for each token."""
    for length in (1, min(8, subject.info.max_length - 5), subject.info.max_length - 5):
        completion = await subject.complete(subject.request(subject.prompt(length), max_tokens=length))
        assert completion.finish_reason == "length", "there are no stop tokens"
        assert set(versions_from_spans(completion.weight_versions, length)) == {subject.info.version}


async def test_streamed_tokens_match_the_completion(subject: Subject) -> None:
    tokens: list[TokenEvent] = []
    request = subject.request(subject.prompt(1), stream=True, seed=1)
    completion = await subject.complete(request, tokens.append)
    if not tokens:
        pytest.skip("the server does not stream tokens")
    assert tokens == token_events(completion)


async def test_temperature_0_is_greedy(subject: Subject) -> None:
    first, again = [await subject.complete(subject.request(subject.prompt(2), temperature=0.0)) for _ in range(2)]
    assert first.token_ids == again.token_ids


async def test_logprobs_are_of_the_sampled_distribution(subject: Subject) -> None:
    """With top_k 1 the only possible token has probability 1."""
    completion = await subject.complete(subject.request(subject.prompt(3), top_k=1))
    assert max(abs(value) for value in completion.logprobs) < TOLERANCE, "they are from before truncation"


async def test_a_seed_repeats_in_any_batch(subject: Subject) -> None:
    only_ours()
    prompt, length = subject.prompt(4), min(24, subject.info.max_length - 5)
    wanted = [subject.request(prompt, max_tokens=length, seed=seed) for seed in (7, 7, 8)]
    alone = await subject.complete(wanted[0])
    again, other = await asyncio.gather(*map(subject.complete, wanted[1:]))
    assert alone.token_ids == again.token_ids, "other tokens when another request is in progress"
    assert again.token_ids != other.token_ids


async def test_stop_tokens_end_a_completion(subject: Subject) -> None:
    prompt = subject.prompt(5)
    free = await subject.complete(subject.request(prompt, temperature=0.0, max_tokens=12))
    stop = free.token_ids[-1]
    cut = await subject.complete(subject.request(prompt, temperature=0.0, max_tokens=12, stop_token_ids=(stop,)))
    assert cut.finish_reason == "stop"
    assert cut.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]


async def test_invalid_requests_are_refused(subject: Subject) -> None:
    limit = subject.info.max_length
    wrong: list[tuple[GenerationRequest, type[PipelineRLError]]] = [
        (subject.request(subject.prompt(6, limit - 3), max_tokens=4), PromptTooLongError),
        (subject.request((), max_tokens=4), RequestError),
        (subject.request((subject.info.vocabulary,), max_tokens=4), RequestError),
        (subject.request((1,), max_tokens=4, top_p=0.0), RequestError),
    ]
    for request, kind in wrong:
        with pytest.raises(kind):
            await subject.server.generate(request)
    await subject.complete(subject.request(subject.prompt(6, limit - 4), max_tokens=4))


async def test_more_requests_than_slots(subject: Subject) -> None:
    """Of different lengths: each gets its own completion."""
    count = min(2 * subject.info.slots + 1, 64)
    most = min(24, subject.info.max_length - 8)
    wanted = [
        subject.request(subject.prompt(number // 4, 3 + number % 5), max_tokens=1 + number % most, seed=number)
        for number in range(count)
    ]
    await asyncio.gather(*map(subject.complete, wanted))


async def test_a_disconnect_frees_the_slot(subject: Subject) -> None:
    begun = asyncio.Event()
    length = subject.info.max_length - 5
    wanted = [subject.request(subject.prompt(9), max_tokens=length, stream=True) for _ in range(2)]
    tasks = [asyncio.create_task(subject.complete(request, lambda _: begun.set())) for request in wanted]
    await first_event(begun, tasks[:1])
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await subject.idle(ENDS_S)


async def test_errors_have_the_agreed_shape(subject: Subject) -> None:
    """Invalid bodies get a 400, and the server continues."""
    only_ours()
    http = HttpClient(subject.server.url, api_key=setting("KEY"))
    garbage: Sequence[object] = ({"nonsense": 1}, [], None, {"id": "x", "prompt_ids": "abc", "sampling": {}})
    try:
        for body in garbage:
            with pytest.raises(RefusalError) as caught:
                await http.ask("POST", "/generate", dict, body, timeout_s=ENDS_S)
            assert (caught.value.status, caught.value.code) == (400, "bad_request")
    finally:
        await http.close()
    await subject.complete(subject.request(subject.prompt(12), max_tokens=1))
