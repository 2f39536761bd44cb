"""The servers of one engine: the health and the weights of each of them, and the queue for their slots.

    look ─▶ poll /info ─▶ healthy? the same process as before?
                                      └ restarted: the newest weights are sent first
    slot ─▶ the queue of requests ─▶ a server for each

The file of the newest weights stays for servers that come back. With a broadcast, the loss of a server ends the session.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import takewhile
from typing import Any, TypeVar

from pipelinerl.errors import WeightUpdateError
from pipelinerl.serving.client.adapter import (
    Bounds,
    EngineServer,
    EngineUnavailableError,
    ServerBusyError,
    ServerError,
    ServerUnreachableError,
    back_off_s,
)
from pipelinerl.serving.wire import ServerInfo, WeightUpdateRequest
from pipelinerl.types import GenerationRequest, UpdateReceipt

T = TypeVar("T")

_BLOCK, _BLOCKS_PER_SLOT = 32, 64
"""The beginnings of prompts that a server holds are remembered in steps of so many tokens, and so many of them."""
_SECOND_LOOK_S = 0.2
"""Time to read an answer that arrived while the event loop was blocked. The HTTP library does so for its own timeouts."""


class Replica:
    """The client's state of one server: its health, its weights and its load. Used in one event loop.

    `instance`: the id of the process that answered last; "" before the first answer. `failing_since_s`: its failure clock,
    which the first missing answer starts and a valid one stops. `gone`: it has failed for as long as `Bounds` allows.
    `load`: the number of requests that have a slot. `wanted`: the newest weights that all servers but the lost ones have
    acknowledged; None before the first.
    """

    def __init__(self, server: EngineServer, bounds: Bounds, clock: Callable[[], float] = time.monotonic) -> None:
        self.server = server
        self.url = server.url
        self.info: ServerInfo | None = None
        self.instance = ""
        self.gone = False
        self.failing_since_s: float | None = None
        self.last_error = "it has not answered yet"
        self.load = 0
        self._held: OrderedDict[int, None] = OrderedDict()  # beginnings of prompts, the least recently used first
        self.wanted: WeightUpdateRequest | None = None
        self._acknowledged = ("", 0)  # the process, and the version of the weights that it applied
        self._updating = asyncio.Lock()
        self._bounds, self._clock = bounds, clock
        self._calls: set[asyncio.Task[Any]] = set()

    @property
    def slots(self) -> int:
        """The slots that are for new requests: none unless it is healthy and holds the wanted weights."""
        return self.info.slots if self.info and self.failing_since_s is None and self._up_to_date else 0

    @property
    def _up_to_date(self) -> bool:
        instance, version = self._acknowledged
        return self.wanted is None or (instance == self.instance and version >= self.wanted.version)

    # ---- what its cache may hold

    def hold(self, ids: Sequence[int]) -> None:
        """It has been sent these tokens, or has sampled them."""
        for beginning in beginnings(ids):
            self._held[beginning] = None
            self._held.move_to_end(beginning)
        while len(self._held) > _BLOCKS_PER_SLOT * max(1, self.slots):
            self._held.popitem(last=False)

    def held(self, of_prompt: Iterable[int]) -> int:
        """How many `beginnings` of a prompt it may hold."""
        return sum(1 for _ in takewhile(self._held.__contains__, of_prompt))

    # ---- health

    async def first_answer(self) -> ServerInfo:
        """Wait for it, for `Bounds.startup_s`. Raises EngineUnavailableError."""
        deadline_s = self._clock() + self._bounds.startup_s
        failures = 0
        while True:
            try:
                info = await self.server.info()
            except (ServerUnreachableError, ServerBusyError) as error:
                failures += 1
                if self._clock() > deadline_s:
                    raise EngineUnavailableError(
                        f"{error}, for {self._bounds.startup_s:g} s; is it started, and is this its address?"
                    ) from error
                await asyncio.sleep(back_off_s(failures))
            else:
                self._record_info(info)
                return info

    async def look(self) -> None:
        """Check its health. Send the wanted weights if it lacks them: it was restarted, or unreachable during the update."""
        try:
            self._record_info(await self.server.info())
            if self.wanted is not None and self.wanted.path and not (self._up_to_date or self._updating.locked()):
                await self._send(self.wanted, self._bounds.update_s)
        except (ServerError, WeightUpdateError) as error:
            self.record_failure(error)
        else:
            self.recovered()

    def _record_info(self, info: ServerInfo) -> None:
        """Record an answer of the server. If the process is a new one, cancel the calls to the old one: they are lost."""
        if info.instance != self.instance:
            self._cancel_calls()
            self._held.clear()
        self.info, self.instance = info, info.instance

    def recovered(self) -> None:
        """Mark it as healthy."""
        self.failing_since_s, self.gone = None, False

    def record_failure(self, error: Exception) -> None:
        """Record a missing or invalid answer. The server is gone once failures have lasted as long as `Bounds` allows."""
        self.last_error = str(error)
        now_s = self._clock()
        self.failing_since_s = now_s if self.failing_since_s is None else self.failing_since_s
        refused = isinstance(error, ServerUnreachableError) and error.refused
        if now_s - self.failing_since_s >= (self._bounds.refused_s if refused else self._bounds.silent_s):
            self.gone = True
            self._cancel_calls()

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. Raises ServerUnreachableError if the server is lost first."""
        task = asyncio.ensure_future(work)
        self._calls.add(task)
        try:
            await asyncio.wait({task})
        finally:
            self._calls.discard(task)
            task.cancel()  # if the caller was cancelled
        if task.cancelled():
            raise ServerUnreachableError(self.url, f"was lost: {self.last_error}")
        try:
            return task.result()
        except ServerUnreachableError as error:  # it gets no requests until it has answered again
            self.record_failure(error)
            raise

    def _cancel_calls(self) -> None:
        for task in self._calls:
            task.cancel()

    # ---- weights

    async def update(self, weights: WeightUpdateRequest) -> UpdateReceipt | None:
        """Have the server apply the weights. Returns None if it is gone; it gets them when it comes back.

        Raises WeightUpdateError if it refuses, or is late.
        """
        deadline_s = self._clock() + self._bounds.update_s
        failures = 0
        while not self.gone:
            try:
                receipt = await self._send(weights, deadline_s - self._clock())
            except (ServerUnreachableError, ServerBusyError) as error:
                failures += 1
                self.record_failure(error)
                await asyncio.sleep(back_off_s(failures))
            else:
                self.recovered()
                return receipt
        return None

    async def _send(self, weights: WeightUpdateRequest, bound_s: float) -> UpdateReceipt:
        """Raises WeightUpdateError if the server refuses, or gives no answer within `bound_s`."""
        what = f"weights of version {weights.version}, checksum {weights.checksum}"
        async with self._updating:
            call = asyncio.ensure_future(self.server.update_weights(weights))
            try:
                done, _ = await asyncio.wait({call}, timeout=max(0.0, bound_s))
                if not done:  # user code may have blocked this loop past the bound: an answer that has arrived counts
                    done, _ = await asyncio.wait({call}, timeout=_SECOND_LOOK_S)
                if not done:
                    raise WeightUpdateError(f"it did not answer within {self._bounds.update_s:g} s; look at its log")
                receipt = call.result()
                if receipt.error or (receipt.version, receipt.checksum) != (weights.version, weights.checksum):
                    held = f"it holds version {receipt.version}, checksum {receipt.checksum}"
                    raise WeightUpdateError(receipt.error or held)
            except (ServerUnreachableError, ServerBusyError):
                raise
            except (WeightUpdateError, ServerError) as error:
                raise WeightUpdateError(f"engine server {self.url} did not apply {what}: {error}") from error
            finally:
                call.cancel()
        self._acknowledged = (self.instance, receipt.version)
        return receipt


class Fleet:
    """All servers of an engine, and the queue of requests for their slots. No server has more requests than slots."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.replicas = replicas
        self._waiting: deque[tuple[GenerationRequest, asyncio.Future[Replica]]] = deque()

    @property
    def slots(self) -> int:
        """Slots of the servers that accept requests now."""
        return sum(replica.slots for replica in self.replicas)

    def unavailable(self) -> EngineUnavailableError | None:
        """The error with the last error of each server, if all are gone."""
        if not all(replica.gone for replica in self.replicas):
            return None
        reasons = "; ".join(f"{replica.url}: {replica.last_error}" for replica in self.replicas)
        return EngineUnavailableError(f"no engine server is left ({reasons}); look at the servers' logs")

    @asynccontextmanager
    async def slot(self, request: GenerationRequest) -> AsyncIterator[Replica]:
        """Have a slot of a server inside: requests for one of the copies first, then later turns, then first come."""
        placed: asyncio.Future[Replica] = asyncio.get_running_loop().create_future()

        def rank(one: GenerationRequest) -> int:
            return 0 if one.copy is not None else 1 if one.turn else 2

        before = sum(1 for _ in takewhile(lambda other: rank(other[0]) <= rank(request), self._waiting))
        self._waiting.insert(before, (request, placed))
        try:
            self.place()
            yield await placed
        finally:
            if placed.done() and not placed.cancelled():
                placed.result().load -= 1  # it no longer needs its slot
            placed.cancel()
            self.place()

    def place(self) -> None:
        """Give free slots to waiting requests. One for a copy that has to wait does not hold up the others."""
        passed: list[tuple[GenerationRequest, asyncio.Future[Replica]]] = []
        while self._waiting and not (passed and passed[-1][0].copy is None):
            request, placed = self._waiting.popleft()
            if placed.done():
                continue
            allowed = self.replicas if request.copy is None else [self.replicas[request.copy]]
            chosen = self.choose(request.prompt_ids, allowed)
            if chosen is None:
                passed.append((request, placed))
            else:
                placed.set_result(chosen)
        self._waiting.extendleft(reversed(passed))

    def choose(self, prompt: tuple[int, ...], allowed: Sequence[Replica]) -> Replica | None:
        """Give a request a slot of one of the `allowed` servers. Returns None if none of them has room.

        A request goes to the server that may hold most of its prompt, until the server has half of its slots in use and its
        share of all requests. Other requests go to the least loaded server.
        """
        slots, total = self.slots, 1 + sum(replica.load for replica in self.replicas if replica.slots)
        ranks: dict[Replica, tuple[int, float]] = {}
        of_prompt = [*beginnings(prompt)]
        for replica in allowed:
            if replica.load < replica.slots:
                crowded = 2 * replica.load >= replica.slots and replica.load * slots >= total * replica.slots
                ranks[replica] = (0 if crowded else -replica.held(of_prompt), replica.load / replica.slots)
        if not ranks:
            return None
        chosen = min(ranks, key=ranks.__getitem__)
        chosen.load += 1
        chosen.hold(prompt)
        return chosen


def beginnings(ids: Sequence[int]) -> Iterator[int]:
    """A hash of each beginning of `ids` that is whole blocks, the shortest first."""
    beginning = 0
    for end in range(_BLOCK, len(ids) + 1, _BLOCK):
        beginning = hash((beginning, tuple(ids[end - _BLOCK : end])))
        yield beginning
