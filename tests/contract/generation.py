"""The checks of the contract that need only the server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pipelinerl.errors import PipelineRLError, PromptTooLongError, RequestError
from pipelinerl.serving.client.http import HttpClient, RefusalError
from pipelinerl.serving.wire import token_events
from pipelinerl.types import GenerationRequest, TokenEvent, versions_from_spans
from tests.contract.checks import Check, NotSupportedError, Subject, first_event, require

_TOLERANCE = 1e-4
_CANCEL_S = 10.0
_GRACE_S = 30.0
"""A server may continue for a while after a connection broke, so that the client can retry."""


async def describes_itself(subject: Subject) -> str:
    info = subject.info
    require(bool(info.instance), "`instance` is empty: a restart could not be detected")
    require(info.slots >= 1, f"it has {info.slots} slots")
    require(info.max_length >= 16, f"its longest sequence is {info.max_length} tokens; the checks need 16")
    require(info.vocabulary >= 2, f"its vocabulary is {info.vocabulary}")
    require(all(0 <= token < info.vocabulary for token in info.stop_token_ids), "stop tokens outside the vocabulary")
    require((await subject.server.info()).instance == info.instance, "`instance` changes without a restart")
    return f"{info.model}: {info.slots} slots of {info.max_length} tokens, version {info.version}"


async def completes(subject: Subject) -> str:
    """Completions have the requested length, with a log-prob and a version for each token."""
    lengths = [1, min(8, subject.info.max_length - 5), subject.info.max_length - 5]
    for length in lengths:
        completion = await subject.complete(subject.request(subject.prompt(length), max_tokens=length))
        require(
            completion.finish_reason == "length",
            f"{length} tokens without stop tokens have finish reason {completion.finish_reason}",
        )
        versions = set(versions_from_spans(completion.weight_versions, length))
        require(versions == {subject.info.version}, f"tokens of versions {versions}, it holds {subject.info.version}")
    return f"{', '.join(map(str, lengths))} tokens"


async def streams(subject: Subject) -> str:
    """Streamed tokens match the completion, including log-probs and versions."""
    tokens: list[TokenEvent] = []
    request = subject.request(subject.prompt(1), stream=True, seed=1)
    completion = await subject.complete(request, tokens.append)
    if not tokens:
        raise NotSupportedError("the server does not stream tokens")
    expected = token_events(completion)
    require(tokens == expected, f"streamed tokens {tokens[:3]}... differ from the completion's, {expected[:3]}...")
    return f"{len(tokens)} tokens"


async def is_greedy_at_zero(subject: Subject) -> str:
    first, again = [await subject.complete(subject.request(subject.prompt(2), temperature=0.0)) for _ in range(2)]
    require(first.token_ids == again.token_ids, "temperature 0 gives different tokens for the same prompt")
    return "the same tokens twice"


async def logprobs_are_of_the_sampled_distribution(subject: Subject) -> str:
    """With top_k 1 the only possible token has probability 1."""
    completion = await subject.complete(subject.request(subject.prompt(3), top_k=1))
    worst = max(abs(value) for value in completion.logprobs)
    require(worst < _TOLERANCE, f"with top_k 1 log-probs are up to {worst:.3g} from 0: they are from before truncation")
    return f"with top_k 1 at most {worst:.1g}"


async def repeats_a_seed(subject: Subject) -> str:
    prompt, length = subject.prompt(4), min(24, subject.info.max_length - 5)
    wanted = [subject.request(prompt, max_tokens=length, seed=seed) for seed in (7, 7, 8)]
    alone = await subject.complete(wanted[0])
    again, other = await asyncio.gather(*map(subject.complete, wanted[1:]))
    require(alone.token_ids == again.token_ids, "the same seed gives different tokens when another request is in progress")
    require(again.token_ids != other.token_ids, "different seeds give the same tokens")
    return f"{length} tokens, alone and together with others"


async def ends_on_stop_tokens(subject: Subject) -> str:
    prompt = subject.prompt(5)
    free = await subject.complete(subject.request(prompt, temperature=0.0, max_tokens=12))
    stop = free.token_ids[-1]
    index = free.token_ids.index(stop)
    cut = await subject.complete(subject.request(prompt, temperature=0.0, max_tokens=12, stop_token_ids=(stop,)))
    require(cut.finish_reason == "stop", f"token {stop} is a stop token, but the finish reason is {cut.finish_reason}")
    require(
        cut.token_ids == free.token_ids[: index + 1], f"{cut.token_ids} does not end at the first {stop} of {free.token_ids}"
    )
    return f"after {index + 1} tokens, the stop token included"


async def refuses_invalid_requests(subject: Subject) -> str:
    limit = subject.info.max_length
    await _expect_refusal(subject, subject.request(subject.prompt(6, limit - 3), max_tokens=4), PromptTooLongError)
    await _expect_refusal(subject, subject.request((), max_tokens=4), RequestError)
    await _expect_refusal(subject, subject.request((subject.info.vocabulary,), max_tokens=4), RequestError)
    await _expect_refusal(subject, subject.request((1,), max_tokens=4, top_p=0.0), RequestError)
    await subject.complete(subject.request(subject.prompt(6, limit - 4), max_tokens=4))
    return f"{limit} tokens fit, {limit + 1} do not"


async def _expect_refusal(subject: Subject, request: GenerationRequest, kind: type[RequestError]) -> None:
    try:
        await subject.server.generate(request)
    except kind:
        return
    except PipelineRLError as error:
        require(False, f"answers {request} with {type(error).__name__} ({error}), not {kind.__name__}")
    require(False, f"serves {request}, which it must refuse")


async def serves_many_at_once(subject: Subject) -> str:
    """With more requests than slots, of different lengths, each gets its own completion."""
    count = min(2 * subject.info.slots + 1, 64)
    most = min(24, subject.info.max_length - 8)
    wanted = [
        subject.request(subject.prompt(number // 4, 3 + number % 5), max_tokens=1 + number % most, seed=number)
        for number in range(count)
    ]
    done = await asyncio.gather(*map(subject.complete, wanted))
    return f"{count} requests, {sum(len(completion.token_ids) for completion in done)} tokens"


async def cancels(subject: Subject) -> str:
    """A cancelled request ends early, with its tokens so far, and its slot becomes free."""
    begun = asyncio.Event()
    request = subject.request(subject.prompt(8), max_tokens=subject.info.max_length - 5, stream=True)
    task = asyncio.create_task(subject.complete(request, lambda _: begun.set()))
    try:
        await first_event(begun, [task])
        await subject.server.cancel(request.id)
        await asyncio.wait({task}, timeout=_CANCEL_S)
        require(task.done(), f"a cancelled request continues for more than {_CANCEL_S:g} s")
    finally:
        task.cancel()
    completion = task.result()
    waited_s = await subject.idle(_CANCEL_S)
    await subject.server.cancel("check-unknown")
    if completion.finish_reason == "length":
        return f"the request ended before it could be cancelled ({len(completion.token_ids)} tokens): too fast to tell"
    require(completion.finish_reason == "cancelled", f"its finish reason is {completion.finish_reason}")
    return f"after {len(completion.token_ids)} tokens; idle {waited_s:.1f} s later"


async def frees_the_slots_of_disconnected_clients(subject: Subject) -> str:
    begun = asyncio.Event()
    length = subject.info.max_length - 5
    wanted = [subject.request(subject.prompt(9), max_tokens=length, stream=True) for _ in range(2)]
    tasks = [asyncio.create_task(subject.complete(request, lambda _: begun.set())) for request in wanted]
    await first_event(begun, tasks[:1])
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    return f"idle {await subject.idle(_GRACE_S):.1f} s after the connections broke"


async def answers_garbage_with_errors(subject: Subject) -> str:
    """Invalid bodies get a 400 in the agreed shape, and the server continues."""
    http = HttpClient(subject.server.url)
    garbage: Sequence[object] = ({"nonsense": 1}, [], None, {"id": "x", "prompt_ids": "abc", "sampling": {}})
    try:
        for body in garbage:
            try:
                await http.post("/generate", body, dict, timeout_s=_CANCEL_S)
            except RefusalError as error:
                if error.status == 401:
                    raise NotSupportedError("the server requires a key, which this check does not send") from error
                require(error.status == 400 and error.code == "bad_request", f"the answer to {body!r} is: {error}")
            else:
                require(False, f"it accepts the body {body!r}")
    finally:
        await http.close()
    await subject.complete(subject.request(subject.prompt(12), max_tokens=1))
    return f"{len(garbage)} bodies"


SERVER_CHECKS = (
    Check("describes itself", describes_itself),
    Check("completions are exact", completes),
    Check("streamed tokens match the completion", streams),
    Check("temperature 0 is greedy", is_greedy_at_zero),
    Check("log-probs are of the sampled distribution", logprobs_are_of_the_sampled_distribution),
    Check("a seed repeats in any batch", repeats_a_seed, "seeds"),
    Check("stop tokens end a completion", ends_on_stop_tokens),
    Check("invalid requests are refused", refuses_invalid_requests),
    Check("more requests than slots", serves_many_at_once),
    Check("a cancelled request ends", cancels),
    Check("a disconnect frees the slot", frees_the_slots_of_disconnected_clients),
    Check("errors have the agreed shape", answers_garbage_with_errors, "endpoints of ours"),
)
