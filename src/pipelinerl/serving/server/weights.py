"""Weight updates, one at a time: verified while the engine runs, then applied between two tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from pipelinerl.errors import WeightUpdateError
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.models.state import first_names
from pipelinerl.serving.incoming import IncomingWeights
from pipelinerl.serving.server.http import RefusedError
from pipelinerl.serving.server.served import Holding, ServedEngine
from pipelinerl.serving.wire import ProcessGroupRequest, WeightUpdateRequest
from pipelinerl.types import UpdateReceipt


class WeightUpdates:
    """Applies weight updates from files or the trainer's broadcast. `paused_s`: the sum of all pauses.

    `held`: the engine's own tensors. Files are read only from `directories`.
    """

    def __init__(self, engine: ServedEngine, held: Mapping[str, Tensor], directories: Sequence[Path]) -> None:
        self._engine, self._held = engine, held
        self._incoming = IncomingWeights(next(iter(held.values())).device, directories)
        self._lock = asyncio.Lock()
        self._last: UpdateReceipt | None = None
        self._anew = False  # no weights of this epoch have been applied yet
        self.paused_s = 0.0

    async def join(self, request: ProcessGroupRequest) -> None:
        """Join the trainer's broadcast as a receiver; leaves a group that was joined before.

        Raises WeightUpdateError if the group is not formed in time, or for an epoch that was replaced; both leave the group
        as it was.
        """
        async with self._lock:
            begins = self._incoming.begins(request)
            group = self._incoming.connect(request, self._engine.name)
            try:
                await asyncio.to_thread(group.wait_joined, request.timeout_s)
            except BaseException:  # also if the client has gone
                await asyncio.to_thread(group.close)
                raise
            await asyncio.to_thread(self._incoming.join, request, group)
            self._anew = self._anew or begins

    async def close(self) -> None:
        """Leave the process group, if there is one."""
        async with self._lock:
            await asyncio.to_thread(self._incoming.close)

    async def take(self, request: WeightUpdateRequest) -> UpdateReceipt:
        """Read the update, or take what was received, and apply it; returns the engine's receipt.

        If the engine already holds these weights, returns their receipt again: a client may repeat a request whose answer
        was lost. The first weights of an epoch may have any version, and end all requests. Raises RefusedError (version, no
        engine) and WeightUpdateError (epoch, invalid weights).
        """
        async with self._lock:
            anew = self._incoming.begins(request) or self._anew
            holding = self._engine.holding
            if (request.version, request.checksum) == holding and not (anew and self._engine.open_requests):
                receipt = self._receipt_of(holding)
            else:
                if not anew:
                    self._check_version(request.version, holding.version)
                update = await asyncio.to_thread(self._fetch, request)
                receipt = self._last = await self._engine.update(update, anew=anew)
                self.paused_s += receipt.pause_s
            await asyncio.to_thread(self._incoming.applied, request)
            self._anew = False
            return receipt

    def _fetch(self, request: WeightUpdateRequest) -> WeightUpdate:
        """The verified update. Its names and shapes are checked when it is loaded; the engine would convert its types."""
        update = self._incoming.fetch(request, first_names(self._held))
        for name, tensor in update.tensors.items():
            if name in self._held and tensor.dtype != self._held[name].dtype:
                raise WeightUpdateError(
                    f"{name} is {tensor.dtype}, in the engine it is {self._held[name].dtype}: nothing was changed (types: "
                    "see --model.dtype)"
                )
        return update

    def _receipt_of(self, holding: Holding) -> UpdateReceipt:
        last = self._last
        if last is not None and (last.version, last.checksum) == holding:
            return last
        return UpdateReceipt(
            engine=self._engine.name,
            version=holding.version,
            checksum=holding.checksum,
            pause_s=0.0,
            sequences_in_flight=self._engine.progress.in_progress,
        )

    def _check_version(self, version: int, newest: int) -> None:
        """Raises RefusedError unless the version increases. Only the first update may repeat the loaded model's version."""
        if version < newest or (version == newest and self._engine.progress.weight_updates):
            raise RefusedError(
                "stale_version",
                f"version {version} is not newer than version {newest}, which this server holds; another session "
                "has an `epoch` of its own",
                param="version",
            )
