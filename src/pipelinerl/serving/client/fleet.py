"""The servers of one engine: their health, the queue for their slots, and the weights that each of them holds.

    watch ─▶ poll /info of each server ─▶ healthy? the same process as before? ─▶ on_change
                                                      └ restarted: the last update is sent first
    slot ─▶ the queue of requests ─▶ a server for each
    update ─▶ all servers at once ─▶ one combined receipt

The file of the last update is kept for servers that come back. With a broadcast, the loss of a server ends the session.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from pipelinerl.errors import UserError, WeightUpdateError
from pipelinerl.serving.client.adapter import (
    Bounds,
    EngineServer,
    EngineUnavailableError,
    ServerBusyError,
    ServerError,
    ServerUnreachableError,
    back_off_s,
)
from pipelinerl.serving.wire import ProcessGroupRequest, ServerInfo, WeightUpdateRequest
from pipelinerl.types import GenerationRequest, UpdateReceipt

T = TypeVar("T")

_SECOND_LOOK_S = 0.2
"""Time to read an answer that arrived while the event loop was blocked. The HTTP library does so for its own timeouts."""


class Replica:
    """The client's state of one server: its health, its weights and its load. Used in one event loop.

    `decode_steps`: since its first answer, as of its last answer. `failing_since_s`: its failure clock, which the first
    missing answer starts and a valid one stops. `load`: the number of requests that have a slot, by prompt in `prompts`.
    """

    def __init__(self, server: EngineServer, bounds: Bounds, clock: Callable[[], float]) -> None:
        self.server = server
        self.url = server.url
        self.info: ServerInfo | None = None
        self.gone = False
        self.failing_since_s: float | None = None
        self.last_error = "it has not answered yet"
        self.load = 0
        self.prompts: Counter[tuple[int, ...]] = Counter()
        self.decode_steps = 0
        self._bounds = bounds
        self._clock = clock
        self.acknowledged: tuple[str, int] | None = None  # the process, and the version of the weights that it applied
        self._calls: set[asyncio.Task[Any]] = set()

    @property
    def instance(self) -> str:
        """The id of the process that answered last; "" before the first answer."""
        return self.info.instance if self.info else ""

    @property
    def slots(self) -> int:
        return self.info.slots if self.info else 0

    @property
    def healthy(self) -> bool:
        """Whether its last answer was valid."""
        return self.info is not None and self.failing_since_s is None

    def holds(self, version: int) -> bool:
        """Whether the current process has acknowledged these weights."""
        return self.acknowledged == (self.instance, version)

    def record_info(self, info: ServerInfo) -> None:
        """Record an answer of the server. If the process is a new one, cancel the calls to the old one: they are lost."""
        before, new = self.info, info.instance != self.instance
        if before is not None:
            again = new or info.decode_steps < before.decode_steps  # it counts from zero again in another session
            self.decode_steps += info.decode_steps - (0 if again else before.decode_steps)
        if new:
            self._cancel_calls()
        self.info = info

    def recovered(self) -> None:
        """Mark it as healthy; it holds the current weights."""
        self.failing_since_s, self.gone = None, False

    def record_failure(self, error: Exception) -> None:
        """Record a missing or invalid answer. The server is gone once failures have lasted as long as `Bounds` allows."""
        now_s = self._clock()
        self.last_error = str(error)
        self.failing_since_s = now_s if self.failing_since_s is None else self.failing_since_s
        refused = isinstance(error, ServerUnreachableError) and error.refused
        if now_s - self.failing_since_s >= (self._bounds.refused_s if refused else self._bounds.silent_s):
            self.gone = True
            self._cancel_calls()

    def release(self, prompt: tuple[int, ...]) -> None:
        """A request no longer needs its slot."""
        self.load -= 1
        self.prompts[prompt] -= 1
        if not self.prompts[prompt]:
            del self.prompts[prompt]

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


class ReplicaPool:
    """All servers of an engine, in one event loop. `on_change` is called whenever the state of one may have changed.

    `last_update`: the newest weights that all servers have acknowledged, except those that are gone; None before the first.
    """

    def __init__(self, servers: Sequence[EngineServer], bounds: Bounds, clock: Callable[[], float]) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.replicas = [Replica(server, bounds, clock) for server in servers]
        self._bounds = bounds
        self._clock = clock
        self._waiting: deque[tuple[GenerationRequest, asyncio.Future[Replica]]] = deque()
        self._update_lock = asyncio.Lock()
        self.last_update: WeightUpdateRequest | None = None

    # ---- load

    @property
    def slots(self) -> int:
        """Total slots of the servers that accept requests now."""
        return sum(replica.slots for replica in self.replicas if self._accepts(replica))

    @asynccontextmanager
    async def slot(self, request: GenerationRequest) -> AsyncIterator[Replica]:
        """Have a slot of a server inside, first come first served. Requests for one of the copies go first."""
        placed: asyncio.Future[Replica] = asyncio.get_running_loop().create_future()
        before = len(self._waiting)
        if request.copy is not None:
            before = sum(other.copy is not None for other, _ in self._waiting)
        self._waiting.insert(before, (request, placed))
        try:
            self._place()
            yield await placed
        finally:
            if placed.done() and not placed.cancelled():
                placed.result().release(request.prompt_ids)
            placed.cancel()
            self._place()

    def _place(self) -> None:
        """Give free slots to waiting requests. One for a copy that has to wait does not hold up the others."""
        passed: list[tuple[GenerationRequest, asyncio.Future[Replica]]] = []
        while self._waiting and not (passed and passed[-1][0].copy is None):
            request, placed = self._waiting.popleft()
            if placed.done():
                continue
            chosen = self.choose(
                request.prompt_ids, self.replicas if request.copy is None else [self.replicas[request.copy]]
            )
            if chosen is None:
                passed.append((request, placed))
            else:
                placed.set_result(chosen)
        self._waiting.extendleft(reversed(passed))

    def _changed(self) -> None:
        self.on_change()
        self._place()

    def choose(self, prompt: tuple[int, ...], allowed: Sequence[Replica]) -> Replica | None:
        """Give a request a slot of one of the `allowed` servers. Returns None if none of them has room.

        Requests with the same prompt go to the same server, so that the prompt is processed once, until the server has half
        of its slots in use and its share of all requests. Other requests go to the least loaded server.
        """
        candidates = [replica for replica in allowed if self._accepts(replica) and replica.load < replica.slots]
        if not candidates:
            return None
        slots = self.slots
        total = 1 + sum(replica.load for replica in self.replicas if self._accepts(replica))

        def shares(replica: Replica) -> bool:
            crowded = 2 * replica.load >= replica.slots and replica.load * slots >= total * replica.slots
            return replica.prompts[prompt] > 0 and not crowded

        chosen = min(candidates, key=lambda replica: (not shares(replica), replica.load / replica.slots))
        chosen.load += 1
        chosen.prompts[prompt] += 1
        return chosen

    def _accepts(self, replica: Replica) -> bool:
        """Whether it gets new requests: it is healthy and holds the newest weights that all servers have acknowledged."""
        return replica.healthy and (self.last_update is None or replica.holds(self.last_update.version))

    # ---- health

    async def start(self) -> list[ServerInfo]:
        """Wait until every server has answered. Raises EngineUnavailableError or UserError, naming the server."""
        infos = await _gather_or_cancel(self._first_answer(replica) for replica in self.replicas)
        vocabularies = {replica.url: info.vocabulary for replica, info in zip(self.replicas, infos, strict=True)}
        if len(set(vocabularies.values())) > 1:
            raise UserError(f"the engine servers have different models: vocabularies of {vocabularies}")
        return infos

    async def _first_answer(self, replica: Replica) -> ServerInfo:
        deadline_s = self._clock() + self._bounds.startup_s
        failures = 0
        while True:
            try:
                info = await replica.server.info()
            except (ServerUnreachableError, ServerBusyError) as error:
                failures += 1
                if self._clock() > deadline_s:
                    raise EngineUnavailableError(
                        f"{error}, for {self._bounds.startup_s:g} s; is it started, and is this its address?"
                    ) from error
                await asyncio.sleep(back_off_s(failures))
            else:
                replica.record_info(info)
                return info

    async def watch(self) -> None:
        """Check the health of every server periodically, until cancelled."""

        async def one(replica: Replica) -> None:
            while True:
                await asyncio.sleep(self._bounds.health_every_s)
                try:
                    replica.record_info(await replica.server.info())
                    await self._bring_up_to_date(replica)
                except (ServerError, WeightUpdateError) as error:
                    replica.record_failure(error)
                else:
                    replica.recovered()
                self._changed()

        await asyncio.gather(*map(one, self.replicas))

    def unavailable(self) -> EngineUnavailableError | None:
        """The error with the last error of each server, if all are gone and have failed for as long as `Bounds` allows."""
        now_s = self._clock()
        for replica in self.replicas:
            since_s = replica.failing_since_s
            if not replica.gone or since_s is None or now_s - since_s < self._bounds.alone_s:
                return None
        reasons = "; ".join(f"{replica.url}: {replica.last_error}" for replica in self.replicas)
        return EngineUnavailableError(f"no engine server is left ({reasons}); look at the servers' logs")

    # ---- weights

    async def join(self, host: str, port: int, key: str) -> None:
        """Have every server join the trainer's broadcast at `host`:`port`. Their indices follow the order of `servers`.

        Raises WeightUpdateError or ServerError, naming the first server that does not join.
        """
        timeout_s = self._bounds.join_s
        await _gather_or_cancel(
            replica.server.join_broadcast(
                ProcessGroupRequest(host=host, port=port, key=key, index=index, timeout_s=timeout_s, name=replica.url)
            )
            for index, replica in enumerate(self.replicas)
        )

    async def update(self, weights: WeightUpdateRequest) -> UpdateReceipt:
        """Have all servers that are not gone apply the weights. Servers that are gone get them when they come back.

        The receipt has the longest pause and the sum of the sequences in flight. If some servers refuse, or do not answer
        in time, its error names them; those that refused keep their old weights. Raises EngineUnavailableError if no server
        is left.
        """
        receipts: list[UpdateReceipt] = []
        problems: list[str] = []
        async with self._update_lock:
            while not receipts and not problems:
                targets = [replica for replica in self.replicas if not replica.gone]
                work = (self._update_one(replica, weights) for replica in targets)
                for answer in await asyncio.gather(*work, return_exceptions=True):
                    if isinstance(answer, UpdateReceipt):
                        receipts.append(answer)
                    elif isinstance(answer, WeightUpdateError):
                        problems.append(str(answer))
                    elif answer is not None:
                        raise answer
                if not receipts and not problems:
                    if (error := self.unavailable()) is not None:
                        raise error
                    await asyncio.sleep(self._bounds.health_every_s)
            if not problems:
                self.last_update = weights
        self._changed()
        return UpdateReceipt(
            engine=", ".join(receipt.engine for receipt in receipts),
            version=weights.version,
            checksum="" if problems else weights.checksum,
            pause_s=max((receipt.pause_s for receipt in receipts), default=0.0),
            sequences_in_flight=sum(receipt.sequences_in_flight for receipt in receipts),
            error="; ".join(problems) or None,
        )

    async def _update_one(self, replica: Replica, weights: WeightUpdateRequest) -> UpdateReceipt | None:
        """The server's receipt, or None if it is gone. Raises WeightUpdateError if it refuses, or is late."""
        deadline_s = self._clock() + self._bounds.update_s
        failures = 0
        while not replica.gone:
            try:
                receipt = await self._send(replica, weights, deadline_s - self._clock())
            except (ServerUnreachableError, ServerBusyError) as error:
                failures += 1
                replica.record_failure(error)
                await asyncio.sleep(back_off_s(failures))
            else:
                replica.recovered()
                return receipt
        return None

    async def _bring_up_to_date(self, replica: Replica) -> None:
        """Send the last update to a server that does not hold it: it was restarted, or unreachable during the update."""
        last = self.last_update
        if last is None or last.path is None or replica.holds(last.version) or self._update_lock.locked():
            return
        async with self._update_lock:
            await self._send(replica, last, self._bounds.update_s)

    async def _send(self, replica: Replica, weights: WeightUpdateRequest, bound_s: float) -> UpdateReceipt:
        """Update one server. Raises WeightUpdateError if it refuses, or gives no answer within `bound_s`."""
        call = asyncio.ensure_future(replica.server.update_weights(weights))
        try:
            done, _ = await asyncio.wait({call}, timeout=max(0.0, bound_s))
            if not done:  # user code may have blocked this loop past the bound: an answer that has arrived counts
                done, _ = await asyncio.wait({call}, timeout=_SECOND_LOOK_S)
        finally:
            call.cancel()
        what = f"weights of version {weights.version}, checksum {weights.checksum}"
        if not done:
            bound = f"{self._bounds.update_s:g} s"
            raise WeightUpdateError(f"engine server {replica.url} did not answer {what} within {bound}; look at its log")
        try:
            receipt = call.result()
            problem = receipt.error
            if problem is None and (receipt.version, receipt.checksum) != (weights.version, weights.checksum):
                problem = f"it holds version {receipt.version}, checksum {receipt.checksum}"
        except (ServerUnreachableError, ServerBusyError):
            raise
        except (WeightUpdateError, ServerError) as error:
            problem = str(error)
        if problem is not None:
            raise WeightUpdateError(f"{replica.url} did not apply {what}: {problem}")
        replica.acknowledged = (replica.instance, receipt.version)
        return receipt


async def _gather_or_cancel(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all concurrently and return their results. The first failure cancels the others."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
