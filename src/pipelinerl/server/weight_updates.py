"""Weight updates, one at a time: read and verified beside the engine, taken by it between two tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from pipelinerl.interfaces import WeightUpdate
from pipelinerl.server.engine_thread import EngineThread, Holding
from pipelinerl.server.refusal import RefusedError, unavailable
from pipelinerl.server.weight_files import read_update
from pipelinerl.types import UpdateReceipt
from pipelinerl.wire import WeightUpdateRequest

T = TypeVar("T")

TIMEOUT_S = 300.0
"""For reading, and again for the engine to take it: a step, the copy, and recomputing the KV cache if asked to."""


class WeightUpdates:
    """`held` are the engine's own tensors; files are read from `directories` alone.

    Whatever brings weights (here: files) ends in `apply`. `paused_s` adds up the pauses.
    """

    def __init__(self, engine: EngineThread, held: Mapping[str, Tensor], directories: Sequence[Path]) -> None:
        self._engine = engine
        self._held = held
        self._directories = directories
        self._one_at_a_time = asyncio.Lock()
        self._last: UpdateReceipt | None = None
        self.paused_s = 0.0

    async def take_file(self, request: WeightUpdateRequest) -> UpdateReceipt:
        """The engine's receipt. What the engine holds already is not read again: an answer that was lost can be asked for.

        Raises RefusedError (path, version, no engine, no answer in time) and WeightUpdateError (what is in the file).
        """
        async with self._one_at_a_time:
            holding = self._engine.holding
            if (request.version, request.checksum) == holding:
                return self._receipt_of(holding)
            self._check_version(request.version, holding.version)
            reading = asyncio.to_thread(read_update, request, self._directories, self._held)
            return await self.apply(await _within_bound(reading, "reading the file"))

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


async def _within_bound(work: Awaitable[T], what: str) -> T:
    try:
        return await asyncio.wait_for(work, TIMEOUT_S)
    except TimeoutError as error:
        raise unavailable(f"the weight update waited {TIMEOUT_S:g} s for {what}, and was given up") from error
