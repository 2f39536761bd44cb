"""The contract of an engine server, as a list of checks that can run against any address.

A check is a coroutine over a `Subject`. It returns a short description of its result, or raises `ViolationError`,
`NotSupportedError`, or any error of `client.adapter`. `generation` has the checks that need only the server, `weights` those
that also need its model.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pipelinerl.errors import PipelineRLError
from pipelinerl.serving.client.adapter import EngineServer, TokenListener, find_fault
from pipelinerl.serving.wire import ServerInfo
from pipelinerl.types import Completion, GenerationRequest, SamplingParams

Outcome = Literal["pass", "fail", "not supported"]

CHECK_S = 120.0
"""Time limit of each check."""


class ViolationError(PipelineRLError):
    """The server violates the contract; the message says how."""


class NotSupportedError(Exception):
    """The server lacks a feature that the contract does not require, or the check can't be decided."""


class Result(NamedTuple):
    name: str
    outcome: Outcome
    detail: str


@dataclass
class Subject:
    """The server under test. `prompt` returns random token ids, the same for the same number."""

    server: EngineServer
    info: ServerInfo
    run: str = field(default_factory=lambda: secrets.token_hex(4))
    sent: int = 0

    def prompt(self, number: int, length: int = 5) -> tuple[int, ...]:
        draw = random.Random(number)
        allowed = [token for token in range(min(self.info.vocabulary, 1000)) if token not in self.info.stop_token_ids]
        return tuple(draw.choices(allowed, k=length))

    def request(
        self, prompt_ids: Sequence[int], *, max_tokens: int = 16, stream: bool = False, **sampling: Any
    ) -> GenerationRequest:
        """A request with an unused id."""
        self.sent += 1
        return GenerationRequest(
            id=f"check-{self.run}-{self.sent}",
            prompt_ids=tuple(prompt_ids),
            sampling=SamplingParams(max_tokens=max_tokens, **sampling),
            stream=stream,
        )

    async def complete(self, request: GenerationRequest, on_token: TokenListener | None = None) -> Completion:
        """Send the request and return its completion. Raises ViolationError if the completion is invalid."""
        completion = await self.server.generate(request, on_token)
        fault = find_fault(completion, request, self.info.vocabulary)
        require(fault is None, f"the completion of {len(request.prompt_ids)} + {request.sampling} is wrong: {fault}")
        return completion

    async def idle(self, within_s: float) -> float:
        """Wait until the server has no requests; returns the seconds waited. Raises ViolationError after `within_s`."""
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        while (info := await self.server.info()).in_progress + info.queued:
            waited_s = loop.time() - start_s
            require(waited_s < within_s, f"{info.in_progress + info.queued} requests still in progress after {within_s:g} s")
            await asyncio.sleep(0.05)
        return loop.time() - start_s


class Check(NamedTuple):
    """`feature`: an optional feature that the check needs; "" if the contract requires it."""

    name: str
    run: Callable[[Subject], Awaitable[str]]
    feature: str = ""


def require(condition: bool, problem: str) -> None:
    """Raise ViolationError unless `condition` holds."""
    if not condition:
        raise ViolationError(problem)


async def first_event(begun: asyncio.Event, tasks: Sequence[asyncio.Task[Completion]], timeout_s: float = 1.0) -> None:
    """Wait until a first token has set `begun` or one of `tasks` has ended; not for long, as servers may not stream."""
    waiting = asyncio.create_task(begun.wait())
    await asyncio.wait({waiting, *tasks}, return_when=asyncio.FIRST_COMPLETED, timeout=timeout_s)
    waiting.cancel()


async def run_checks(
    server: EngineServer,
    checks: Sequence[Check],
    *,
    without: frozenset[str] = frozenset(),
    on_result: Callable[[Result], None] = lambda _: None,
    bound_s: float = CHECK_S,
) -> list[Result]:
    """Run the checks in sequence. `without`: features that this kind of server is known not to have.

    Raises the errors of the first `server.info`.
    """
    subject = Subject(server, await server.info())
    results = []
    for check in checks:
        if check.feature in without:
            result = Result(check.name, "not supported", f"this kind of server has no {check.feature}")
        else:
            result = await _run(check, subject, bound_s)
        results.append(result)
        on_result(result)
    return results


async def _run(check: Check, subject: Subject, bound_s: float) -> Result:
    try:
        async with asyncio.timeout(bound_s):
            return Result(check.name, "pass", await check.run(subject))
    except NotSupportedError as reason:
        return Result(check.name, "not supported", str(reason))
    except TimeoutError:
        return Result(check.name, "fail", f"not done after {bound_s:g} s")
    except PipelineRLError as error:
        return Result(check.name, "fail", " ".join(str(error).split()))
