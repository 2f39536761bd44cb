"""The replica pool: the servers of one engine, their health, and the weights that each of them holds.

    watch ─▶ poll /info of each server ─▶ healthy? the same process as before? ─▶ on_change (routing, waiting requests)
                                                      └ restarted: the last update is sent first
    update ─▶ all servers at once ─▶ one combined receipt

The file of the last update is kept for servers that come back. With a broadcast, the loss of a server ends the session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from pipelinerl.errors import PipelineRLError, UserError, WeightUpdateError
from pipelinerl.serving.client.adapter import EngineServer
from pipelinerl.serving.client.errors import (
    Bounds,
    EngineUnavailableError,
    ServerBusyError,
    ServerError,
    ServerUnreachableError,
    back_off_s,
)
from pipelinerl.serving.wire import ProcessGroupRequest, ServerInfo, WeightUpdateRequest
from pipelinerl.types import UpdateReceipt

# ---- one replica: its health, its weights and its calls in progress


T = TypeVar("T")

_SECOND_LOOK_S = 0.2
"""Time to read an answer that arrived while the event loop was blocked. The HTTP library does so for its own timeouts."""


class LostError(PipelineRLError):
    """The server that had the request was restarted or is gone. Another server may answer the request."""


class Replica:
    """The client's state of one server. Used in one event loop."""

    def __init__(self, server: EngineServer, bounds: Bounds, clock: Callable[[], float]) -> None:
        self.server = server
        self.url = server.url
        self.info: ServerInfo | None = None
        self.gone = False
        self.last_error = "it has not answered yet"
        self.health_check: asyncio.Task[None] | None = None
        self._steps_before = 0
        self._bounds = bounds
        self._clock = clock
        self._failing_since_s: float | None = None
        self._refused_since_s: float | None = None
        self._acknowledged: tuple[str, int] | None = None
        self._calls: set[asyncio.Task[Any]] = set()

    @property
    def instance(self) -> str:
        """The id of the process that answered last; "" before the first answer."""
        return self.info.instance if self.info else ""

    @property
    def decode_steps(self) -> int:
        """Decode steps since its first answer, as of its last answer; steps before and after a restart are added."""
        return self._steps_before + self.info.decode_steps if self.info else 0

    @property
    def healthy(self) -> bool:
        """Whether its last answer was valid."""
        return self.info is not None and not self.gone and self._failing_since_s is None

    def holds(self, version: int) -> bool:
        """Whether the current process has acknowledged these weights."""
        return self._acknowledged == (self.instance, version)

    def record_info(self, info: ServerInfo) -> None:
        """Record an answer of the server. If the process is a new one, cancel the calls to the old one: they are lost."""
        new = self.info is None or info.instance != self.instance
        if self.info is None:
            self._steps_before = -info.decode_steps
        elif new or info.decode_steps < self.info.decode_steps:  # it counts from zero again in another session
            self._steps_before += self.info.decode_steps
        if new:
            self._cancel_calls()
        self.info = info

    def recovered(self) -> None:
        """Mark it as healthy; it holds the current weights."""
        self._failing_since_s = self._refused_since_s = None
        self.gone = False

    def record_failure(self, error: Exception) -> None:
        """Record a missing or invalid answer. The server is gone once failures have lasted as long as `Bounds` allows."""
        now_s = self._clock()
        self.last_error = str(error)
        self._failing_since_s = now_s if self._failing_since_s is None else self._failing_since_s
        if not (isinstance(error, ServerUnreachableError) and error.refused):
            self._refused_since_s = None
        elif self._refused_since_s is None:
            self._refused_since_s = now_s
        refused_s = 0.0 if self._refused_since_s is None else now_s - self._refused_since_s
        if refused_s >= self._bounds.refused_s or now_s - self._failing_since_s >= self._bounds.silent_s:
            self.gone = True
            self._cancel_calls()

    def record_receipt(self, receipt: UpdateReceipt) -> None:
        """Record that it applied the weights that the receipt names."""
        self._acknowledged = (self.instance, receipt.version)

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. Raises LostError if the server is lost first."""
        task = asyncio.ensure_future(work)
        self._calls.add(task)
        try:
            await asyncio.wait({task})
        finally:
            self._calls.discard(task)
            task.cancel()  # if the caller was cancelled
        if task.cancelled():
            raise LostError(f"engine server {self.url} was lost: {self.last_error}")
        return task.result()

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
        self._update_lock = asyncio.Lock()
        self.last_update: WeightUpdateRequest | None = None
        self._alone_since_s: float | None = None

    def accepts(self, replica: Replica) -> bool:
        """Whether it gets new requests: it is healthy and holds the newest weights that all servers have acknowledged."""
        return replica.healthy and (self.last_update is None or replica.holds(self.last_update.version))

    def none_left(self) -> bool:
        """Whether all servers are gone, and have been for as long as `Bounds` allows."""
        if not all(replica.gone for replica in self.replicas):
            self._alone_since_s = None
            return False
        now_s = self._clock()
        self._alone_since_s = now_s if self._alone_since_s is None else self._alone_since_s
        return now_s - self._alone_since_s >= self._bounds.alone_s

    def unavailable(self) -> EngineUnavailableError:
        """The error to raise when all servers are gone, with the last error of each."""
        reasons = "; ".join(f"{replica.url}: {replica.last_error}" for replica in self.replicas)
        return EngineUnavailableError(f"no engine server is left ({reasons}); look at the servers' logs")

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
                await self.check_health(replica)

        await asyncio.gather(*map(one, self.replicas))

    async def check_health(self, replica: Replica) -> None:
        """Check one server's health. Concurrent calls share one request."""
        if replica.health_check is None:
            replica.health_check = asyncio.create_task(self._check_health(replica))
        await asyncio.shield(replica.health_check)

    async def _check_health(self, replica: Replica) -> None:
        try:
            replica.record_info(await replica.server.info())
            await self._bring_up_to_date(replica)
        except (ServerError, WeightUpdateError) as error:
            replica.record_failure(error)
        else:
            replica.recovered()
        finally:
            replica.health_check = None
        self.on_change()

    # ---- weights

    async def join(self, host: str, port: int, key: str) -> None:
        """Have every server join the trainer's broadcast at `host`:`port`. Their indices follow the order of `servers`.

        Raises WeightUpdateError or ServerError, naming the first server that does not join.
        """
        count, timeout_s = len(self.replicas), self._bounds.join_s
        await _gather_or_cancel(
            replica.server.join_broadcast(
                ProcessGroupRequest(
                    host=host, port=port, key=key, index=index, receivers=count, timeout_s=timeout_s, name=replica.url
                )
            )
            for index, replica in enumerate(self.replicas)
        )

    async def update(self, weights: WeightUpdateRequest) -> UpdateReceipt:
        """Have all servers that are not gone apply the weights. Servers that are gone get them when they come back.

        If some servers refuse, the receipt's error names them; they keep their old weights. Raises WeightUpdateError naming
        a server that did not answer in time, EngineUnavailableError if no server is left.
        """
        async with self._update_lock:
            while not (receipts := await self._update_all(weights)):
                if self.none_left():
                    raise self.unavailable()
                await asyncio.sleep(self._bounds.health_every_s)
            receipt = _combined_receipt(receipts, weights)
            if receipt.error is None:
                self.last_update = weights
        self.on_change()
        return receipt

    async def _update_all(self, weights: WeightUpdateRequest) -> list[UpdateReceipt]:
        """The receipts of all servers that are not gone."""
        targets = [replica for replica in self.replicas if not replica.gone]
        answers = await asyncio.gather(*(self._update_one(replica, weights) for replica in targets), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return [answer for answer in answers if isinstance(answer, UpdateReceipt)]

    async def _update_one(self, replica: Replica, weights: WeightUpdateRequest) -> UpdateReceipt | None:
        """The replica's receipt, or None if it is gone."""
        deadline_s = self._clock() + self._bounds.update_s
        failures = 0
        while not replica.gone:
            try:
                receipt = await self._send(replica, weights, deadline_s - self._clock())
            except (ServerUnreachableError, ServerBusyError) as error:
                failures += 1
                replica.record_failure(error)
                if self._clock() > deadline_s:
                    raise self._no_answer(replica, weights) from error
                await asyncio.sleep(back_off_s(failures))
            else:
                replica.recovered()
                return receipt
        return None

    async def _bring_up_to_date(self, replica: Replica) -> None:
        """Send the last update to a server that does not hold it: it was restarted, or unreachable during the update."""
        if self.last_update is None or replica.holds(self.last_update.version) or self._update_lock.locked():
            return
        if self.last_update.path is None:
            return
        async with self._update_lock:
            receipt = await self._send(replica, self.last_update, self._bounds.update_s)
            if receipt.error is not None:
                raise WeightUpdateError(receipt.error)

    async def _send(self, replica: Replica, weights: WeightUpdateRequest, bound_s: float) -> UpdateReceipt:
        """Update one server. A refusal is in the receipt's error. Raises WeightUpdateError if no answer comes in time."""
        answer = asyncio.ensure_future(replica.server.update_weights(weights))
        try:
            done, _ = await asyncio.wait({answer}, timeout=bound_s)
            if not done:  # user code may have blocked this loop past the bound: an answer that has arrived counts
                done, _ = await asyncio.wait({answer}, timeout=_SECOND_LOOK_S)
        finally:
            answer.cancel()
        if not done:
            raise self._no_answer(replica, weights)
        try:
            receipt = answer.result()
        except (ServerUnreachableError, ServerBusyError):
            raise
        except (WeightUpdateError, ServerError) as error:
            return _error_receipt(replica, weights, str(error))
        if receipt.error is not None:
            return _error_receipt(replica, weights, receipt.error)
        if (receipt.version, receipt.checksum) != (weights.version, weights.checksum):
            return _error_receipt(replica, weights, f"it holds version {receipt.version}, checksum {receipt.checksum}")
        replica.record_receipt(receipt)
        return receipt

    def _no_answer(self, replica: Replica, weights: WeightUpdateRequest) -> WeightUpdateError:
        return WeightUpdateError(
            f"engine server {replica.url} did not answer weights of version {weights.version} within "
            f"{self._bounds.update_s:g} s; look at its log"
        )


async def _gather_or_cancel(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all concurrently and return their results. The first failure cancels the others."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _error_receipt(replica: Replica, weights: WeightUpdateRequest, problem: str) -> UpdateReceipt:
    return UpdateReceipt(
        engine=replica.url,
        version=weights.version,
        checksum="",
        pause_s=0.0,
        sequences_in_flight=0,
        error=f"{replica.url} did not apply weights of version {weights.version}, checksum {weights.checksum}: {problem}",
    )


def _combined_receipt(receipts: Sequence[UpdateReceipt], weights: WeightUpdateRequest) -> UpdateReceipt:
    """One receipt for all servers: the longest pause, the sum of sequences in flight, and all errors."""
    problems = [receipt.error for receipt in receipts if receipt.error is not None]
    return UpdateReceipt(
        engine=", ".join(receipt.engine for receipt in receipts),
        version=weights.version,
        checksum="" if problems else weights.checksum,
        pause_s=max(receipt.pause_s for receipt in receipts),
        sequences_in_flight=sum(receipt.sequences_in_flight for receipt in receipts),
        error="; ".join(problems) or None,
    )
