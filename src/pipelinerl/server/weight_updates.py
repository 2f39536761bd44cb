"""Weight updates, one at a time: read or received and verified beside the engine, taken by it between two tokens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from torch import Tensor

from pipelinerl.errors import WeightUpdateError
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.server.engine_thread import EngineThread, Holding
from pipelinerl.server.refusal import RefusedError, unavailable
from pipelinerl.server.weight_files import check_fit, read_update
from pipelinerl.types import UpdateReceipt
from pipelinerl.weights.collective import CollectiveWeightReceiver
from pipelinerl.wire import ProcessGroupRequest, WeightUpdateRequest

T = TypeVar("T")

TIMEOUT_S = 300.0
"""For reading, and again for the engine to take it: a step, the copy, and recomputing the KV cache if asked to."""
LOOK_S = 0.002


class WeightUpdates:
    """`held` are the engine's own tensors; files are read from `directories` alone.

    Whatever brings weights (a file, a broadcast) ends in `apply`. `paused_s` adds up the pauses.
    """

    def __init__(self, engine: EngineThread, held: Mapping[str, Tensor], directories: Sequence[Path]) -> None:
        self._engine = engine
        self._held = held
        self._directories = directories
        self._one_at_a_time = asyncio.Lock()
        self._last: UpdateReceipt | None = None
        self._group: CollectiveWeightReceiver | None = None
        self.paused_s = 0.0

    async def join(self, request: ProcessGroupRequest) -> None:
        """Become one of the receivers of the trainer's broadcasts; a group that was joined before is left.

        Raises WeightUpdateError if the group is not formed in time.
        """
        async with self._one_at_a_time:
            await self._leave()
            group = CollectiveWeightReceiver(
                request.host,
                request.port,
                request.index,
                engine=request.name or self._engine.name,
                receivers=request.receivers,
                join_timeout_s=request.timeout_s,
                device=next(iter(self._held.values())).device,
            )
            try:
                await asyncio.to_thread(group.wait_joined, request.timeout_s)
            except WeightUpdateError:
                await asyncio.to_thread(group.close)
                raise
            self._group = group

    async def close(self) -> None:
        """Leave the process group, if there is one."""
        async with self._one_at_a_time:
            await self._leave()

    async def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            await asyncio.to_thread(group.close)

    async def take(self, request: WeightUpdateRequest) -> UpdateReceipt:
        """The engine's receipt. What the engine holds already is not read again: an answer that was lost can be asked for.

        Raises RefusedError (path, version, no group, no engine, no answer in time) and WeightUpdateError (what came).
        """
        async with self._one_at_a_time:
            holding = self._engine.holding
            if (request.version, request.checksum) == holding:
                receipt = self._receipt_of(holding)
                if request.path is None:
                    self._answer_for(receipt)
                return receipt
            self._check_version(request.version, holding.version)
            if request.path is None:
                return await self._take_broadcast(request)
            reading = asyncio.to_thread(read_update, request, self._directories, self._held)
            return await self.apply(await _within_bound(reading, "reading the file"))

    async def _take_broadcast(self, request: WeightUpdateRequest) -> UpdateReceipt:
        """Wait until the update has come whole, take it, and answer the sender as well."""
        group = self._group
        if group is None:
            raise RefusedError(
                "bad_request", "no `path`, and no process group to receive from: POST /init_process_group", param="path"
            )
        update = await _within_bound(_arrival(group), "the broadcast")
        try:
            if (update.version, update.checksum) != (request.version, request.checksum):
                raise WeightUpdateError(
                    f"version {update.version} (checksum {update.checksum}) was broadcast, not {request.version} "
                    f"({request.checksum}): nothing was changed"
                )
            check_fit(update.tensors, self._held)
            receipt = await self.apply(update)
        except (WeightUpdateError, RefusedError) as error:
            receipt = self._receipt_of(self._engine.holding)
            group.acknowledge(msgspec.structs.replace(receipt, version=update.version, error=str(error)))
            raise
        group.acknowledge(receipt)
        return receipt

    def _answer_for(self, receipt: UpdateReceipt) -> None:
        """Answer a broadcast of what the engine holds already: the weights that its model was loaded with."""
        group = self._group
        with contextlib.suppress(WeightUpdateError):  # whatever became of the group, these are the weights
            if group is not None and group.offered() == receipt.version and group.poll() is not None:
                group.acknowledge(receipt)

    async def apply(self, update: WeightUpdate) -> UpdateReceipt:
        """Give the engine an update that was verified."""
        receipt = await _within_bound(asyncio.wrap_future(self._engine.update(update)), "the engine's next token")
        self._last = receipt
        self.paused_s += receipt.pause_s
        return receipt

    def _receipt_of(self, holding: Holding) -> UpdateReceipt:
        last = self._last
        if last is not None and (last.version, last.checksum) == holding:
            return last
        progress = self._engine.progress()
        return UpdateReceipt(
            engine=self._engine.name,
            version=holding.version,
            checksum=holding.checksum,
            pause_s=0.0,
            sequences_in_flight=progress.in_progress,
        )

    def _check_version(self, version: int, newest: int) -> None:
        """Versions rise; only the first update may have the version that the model was loaded as."""
        if version < newest or (version == newest and self._engine.progress().weight_updates):
            raise RefusedError(
                "stale_version",
                f"version {version} does not follow version {newest}, which this server holds (start servers anew for "
                "another run)",
                param="version",
            )


async def _arrival(group: CollectiveWeightReceiver) -> WeightUpdate:
    """The next update that comes. Raises WeightUpdateError if the sender is gone, or it came damaged."""
    while (update := group.poll()) is None:
        await asyncio.sleep(LOOK_S)
    return update


async def _within_bound(work: Awaitable[T], what: str) -> T:
    try:
        return await asyncio.wait_for(work, TIMEOUT_S)
    except TimeoutError as error:
        raise unavailable(f"the weight update waited {TIMEOUT_S:g} s for {what}, and was given up") from error
