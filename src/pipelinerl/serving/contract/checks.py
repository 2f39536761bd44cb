"""The contract of an engine server as a list of checks that can be pointed at any address.

A check is a coroutine over a `Subject`. It returns a few words on what was seen, or raises `ViolationError` (what is wrong),
`NotSupportedError`, or any error of `adapter`. `contract_checks` has those for which the server is enough,
`contract_weights` those that need its model too.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pipelinerl.errors import PipelineRLError
from pipelinerl.serving.client.adapter import EngineServer, TokenListener
from pipelinerl.serving.client.checks import find_fault
from pipelinerl.serving.wire import ServerInfo
from pipelinerl.types import Completion, GenerationRequest, SamplingParams

Outcome = Literal["pass", "fail", "not supported"]

CHECK_S = 120.0
"""No check takes longer."""


class ViolationError(PipelineRLError):
    """The server does not keep the contract; the message says how."""


class NotSupportedError(Exception):
    """The server says that it has no such thing, which the contract allows."""


class Result(NamedTuple):
    name: str
    outcome: Outcome
    detail: str


@dataclass
class Subject:
    """The server under examination. `prompt` gives random ones, the same for the same number."""

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
        """Under an id that was never used."""
        self.sent += 1
        return GenerationRequest(
            id=f"check-{self.run}-{self.sent}",
            prompt_ids=tuple(prompt_ids),
            sampling=SamplingParams(max_tokens=max_tokens, **sampling),
            stream=stream,
        )

    async def complete(self, request: GenerationRequest, on_token: TokenListener | None = None) -> Completion:
        """The completion. Raises ViolationError unless it can be that of the request."""
        completion = await self.server.generate(request, on_token)
        fault = find_fault(completion, request, self.info.vocabulary)
        require(fault is None, f"the completion of {len(request.prompt_ids)} + {request.sampling} is wrong: {fault}")
        return completion

    async def idle(self, within_s: float) -> float:
        """Wait until nothing is in progress there; how long it took. Raises ViolationError."""
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        while (info := await self.server.info()).in_progress + info.queued:
            waited_s = loop.time() - start_s
            require(waited_s < within_s, f"{info.in_progress + info.queued} requests still in progress after {within_s:g} s")
            await asyncio.sleep(0.05)
        return loop.time() - start_s


class Check(NamedTuple):
    """`feature` is what a kind of server may be without."""

    name: str
    run: Callable[[Subject], Awaitable[str]]
    feature: str = ""


def require(condition: bool, problem: str) -> None:
    """Raises ViolationError unless it holds."""
    if not condition:
        raise ViolationError(problem)


async def run_checks(
    server: EngineServer,
    checks: Sequence[Check],
    *,
    without: frozenset[str] = frozenset(),
    on_result: Callable[[Result], None] = lambda _: None,
    bound_s: float = CHECK_S,
) -> list[Result]:
    """Run the checks one after the other. `without` are features that this kind of server is known not to have.

    Raises what `server.info` raises, if it can't even be asked.
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
