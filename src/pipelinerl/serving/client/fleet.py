"""All servers of one engine: are they well, and does each hold the weights that it should?

    watch ─▶ info of each, again and again ─▶ well? the same process as before? ─▶ on_change (routing, waiting requests)
                                                      └ another one: the kept update is sent first
    update ─▶ all servers at once ─▶ a receipt for all

The file of the last update is kept for servers that come back. Weights that were broadcast are nowhere but in the servers
that received them: one that comes back is not used again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from pipelinerl.errors import PipelineRLError, UserError, WeightUpdateError
from pipelinerl.serving.client.adapter import BroadcastWeights, EngineServer, WeightOffer
from pipelinerl.serving.client.errors import (
    Bounds,
    EngineUnavailableError,
    ServerBusyError,
    ServerError,
    ServerUnreachableError,
    back_off_s,
)
from pipelinerl.serving.wire import ProcessGroupRequest, ServerInfo
from pipelinerl.types import UpdateReceipt

# ------------------------------------------------------------------------------------------------------------------------
# What the client knows of one server: whether it is well, what it holds, and the calls that it has in progress.


T = TypeVar("T")


class LostError(PipelineRLError):
    """The server that had the request has forgotten it (it was restarted) or is gone. Another one may answer it."""


class Member:
    """One server of several. Everything here happens in one event loop."""

    def __init__(self, server: EngineServer, bounds: Bounds, clock: Callable[[], float]) -> None:
        self.server = server
        self.url = server.url
        self.info: ServerInfo | None = None
        self.gone = False
        self.last_error = "it has not answered yet"
        self.looking: asyncio.Task[None] | None = None
        self._steps_before = 0
        self._bounds = bounds
        self._clock = clock
        self._failing_since_s: float | None = None
        self._refused_since_s: float | None = None
        self._acknowledged: tuple[str, int] | None = None
        self._calls: set[asyncio.Task[Any]] = set()

    @property
    def instance(self) -> str:
        """Of the process that answered last; "" before the first answer."""
        return self.info.instance if self.info else ""

    @property
    def decode_steps(self) -> int:
        """Since it answered first, as of its last answer."""
        return self._steps_before + self.info.decode_steps if self.info else 0

    @property
    def well(self) -> bool:
        """Whether its last answer was good."""
        return self.info is not None and not self.gone and self._failing_since_s is None

    def holds(self, version: int) -> bool:
        """Whether the process that runs there now has acknowledged these weights."""
        return self._acknowledged == (self.instance, version)

    def saw(self, info: ServerInfo) -> None:
        """It answered. If it is another process than before, what the old one had in progress is lost."""
        if self.info is None or info.instance != self.instance:
            self._steps_before += self.info.decode_steps if self.info else -info.decode_steps
            self._lose()
        self.info = info

    def recovered(self) -> None:
        """It is well, and holds the weights that it should."""
        self._failing_since_s = self._refused_since_s = None
        self.gone = False

    def failed(self, error: Exception) -> None:
        """It did not answer, or not as it should."""
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
            self._lose()

    def acknowledged(self, receipt: UpdateReceipt) -> None:
        """It took the weights that the receipt names."""
        self._acknowledged = (self.instance, receipt.version)

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Raises LostError if the server is lost before it is there."""
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

    def _lose(self) -> None:
        for task in self._calls:
            task.cancel()


class Fleet:
    """The servers, in one event loop. `on_change` is called whenever one of them may have changed."""

    def __init__(
        self, servers: Sequence[EngineServer], bounds: Bounds, on_change: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        self.members = [Member(server, bounds, clock) for server in servers]
        self._bounds = bounds
        self._on_change = on_change
        self._clock = clock
        self._updating = asyncio.Lock()
        self._kept: WeightOffer | None = None

    def accepts(self, member: Member) -> bool:
        """Whether it gets new requests: it is well and holds the newest weights that all have acknowledged."""
        return member.well and (self._kept is None or member.holds(self._kept.version))

    @property
    def all_gone(self) -> bool:
        return all(member.gone for member in self.members)

    def unavailable(self) -> EngineUnavailableError:
        """The error that says why nothing can be served."""
        reasons = "; ".join(f"{member.url}: {member.last_error}" for member in self.members)
        return EngineUnavailableError(f"no engine server is left ({reasons}); look at the servers' logs")

    # ----------------------------------------------------------------------------------------------- health

    async def start(self) -> list[ServerInfo]:
        """Wait until every server has answered. Raises EngineUnavailableError or UserError, naming the one that fails."""
        infos = await _all(self._first_answer(member) for member in self.members)
        vocabularies = {member.url: info.vocabulary for member, info in zip(self.members, infos, strict=True)}
        if len(set(vocabularies.values())) > 1:
            raise UserError(f"the engine servers have different models: vocabularies of {vocabularies}")
        self._on_change()
        return infos

    async def _first_answer(self, member: Member) -> ServerInfo:
        deadline_s = self._clock() + self._bounds.startup_s
        failures = 0
        while True:
            try:
                info = await member.server.info()
            except (ServerUnreachableError, ServerBusyError) as error:
                failures += 1
                if self._clock() > deadline_s:
                    raise EngineUnavailableError(
                        f"{error}, for {self._bounds.startup_s:g} s; is it started, and is this its address?"
                    ) from error
                await asyncio.sleep(back_off_s(failures))
            else:
                member.saw(info)
                return info

    async def watch(self) -> None:
        """Look at every server from time to time, for ever."""

        async def one(member: Member) -> None:
            while True:
                await asyncio.sleep(self._bounds.health_every_s)
                await self.look(member)

        await asyncio.gather(*map(one, self.members))

    async def look(self, member: Member) -> None:
        """Ask the server how it is. Those who ask while somebody else does share the answer."""
        if member.looking is None:
            member.looking = asyncio.create_task(self._look(member))
        await asyncio.shield(member.looking)

    async def _look(self, member: Member) -> None:
        try:
            member.saw(await member.server.info())
            await self._bring_up_to_date(member)
        except (ServerError, WeightUpdateError) as error:
            member.failed(error)
        else:
            member.recovered()
        finally:
            member.looking = None
        self._on_change()

    # ---------------------------------------------------------------------------------------------- weights

    async def join(self, host: str, port: int) -> None:
        """Have every server join the trainer's broadcast from `host`:`port`, numbered in the order in which they were given.

        Raises WeightUpdateError or ServerError, naming the first that does not.
        """

        async def one(index: int, member: Member) -> None:
            group = ProcessGroupRequest(
                host=host,
                port=port,
                index=index,
                receivers=len(self.members),
                timeout_s=self._bounds.join_s,
                name=member.url,
            )
            await member.server.join_broadcast(group)

        async with self._updating:
            await _all(one(index, member) for index, member in enumerate(self.members))

    async def update(self, saved: WeightOffer) -> UpdateReceipt:
        """Have all servers that are not gone take the weights; those that are get them when they come back.

        The receipt has an error, naming the servers, if some refused them; they are as they were. Raises
        WeightUpdateError naming a server that did not answer in time, EngineUnavailableError if none is left.
        """
        async with self._updating:
            asked = [member for member in self.members if not member.gone]
            answers = await asyncio.gather(*(self._update_one(member, saved) for member in asked), return_exceptions=True)
            receipts: list[UpdateReceipt] = []
            for answer in answers:
                if isinstance(answer, BaseException):
                    raise answer
                if answer is not None:
                    receipts.append(answer)
            if not receipts:
                raise self.unavailable()
            receipt = _joined(receipts, saved)
            if receipt.error is None:
                self._kept = saved
        self._on_change()
        return receipt

    async def _update_one(self, member: Member, saved: WeightOffer) -> UpdateReceipt | None:
        """Its receipt, or None if it is gone."""
        deadline_s = self._clock() + self._bounds.update_s
        failures = 0
        while not member.gone:
            try:
                receipt = await self._send(member, saved, deadline_s - self._clock())
            except (ServerUnreachableError, ServerBusyError) as error:
                failures += 1
                member.failed(error)
                if self._clock() > deadline_s:
                    raise self._no_answer(member, saved) from error
                await asyncio.sleep(back_off_s(failures))
            else:
                member.recovered()
                return receipt
        return None

    async def _bring_up_to_date(self, member: Member) -> None:
        """Send the kept update to a server that does not have it: it has been started again, or was away."""
        if self._kept is None or member.holds(self._kept.version) or self._updating.locked():
            return
        if isinstance(self._kept, BroadcastWeights):
            raise WeightUpdateError(
                f"engine server {member.url} was started again, and has left the trainer's broadcast; resume the run"
            )
        async with self._updating:
            receipt = await self._send(member, self._kept, self._bounds.update_s)
            if receipt.error is not None:
                raise WeightUpdateError(receipt.error)

    async def _send(self, member: Member, saved: WeightOffer, bound_s: float) -> UpdateReceipt:
        """One update of one server; refusals are in the receipt. Raises WeightUpdateError if no answer comes in time."""
        try:
            async with asyncio.timeout(bound_s):
                receipt = await member.server.update_weights(saved)
        except TimeoutError as error:
            raise self._no_answer(member, saved) from error
        except (ServerUnreachableError, ServerBusyError):
            raise
        except (WeightUpdateError, ServerError) as error:
            return _failed(member, saved, str(error))
        if receipt.error is not None:
            return _failed(member, saved, receipt.error)
        if (receipt.version, receipt.checksum) != (saved.version, saved.checksum):
            return _failed(member, saved, f"it holds version {receipt.version}, checksum {receipt.checksum}")
        member.acknowledged(receipt)
        return receipt

    def _no_answer(self, member: Member, saved: WeightOffer) -> WeightUpdateError:
        return WeightUpdateError(
            f"engine server {member.url} did not answer weights of version {saved.version} within "
            f"{self._bounds.update_s:g} s; look at its log"
        )


async def _all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Their results. The first failure ends the others."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _failed(member: Member, saved: WeightOffer, problem: str) -> UpdateReceipt:
    return UpdateReceipt(
        engine=member.url,
        version=saved.version,
        checksum="",
        pause_s=0.0,
        sequences_in_flight=0,
        error=f"{member.url} did not take weights of version {saved.version}, checksum {saved.checksum}: {problem}",
    )


def _joined(receipts: Sequence[UpdateReceipt], saved: WeightOffer) -> UpdateReceipt:
    """One receipt for all: the longest pause, all sequences, and what went wrong anywhere."""
    problems = [receipt.error for receipt in receipts if receipt.error is not None]
    return UpdateReceipt(
        engine=", ".join(receipt.engine for receipt in receipts),
        version=saved.version,
        checksum="" if problems else saved.checksum,
        pause_s=max(receipt.pause_s for receipt in receipts),
        sequences_in_flight=sum(receipt.sequences_in_flight for receipt in receipts),
        error="; ".join(problems) or None,
    )
