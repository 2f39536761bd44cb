"""New weights for a vLLM server between two tokens, through its RL interface: pause, start, update, finish, resume."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from pipelinerl.errors import WeightUpdateError
from pipelinerl.serving.client.adapter import SavedWeights, WeightOffer
from pipelinerl.serving.client.errors import ServerError
from pipelinerl.serving.client.http import HttpClient
from pipelinerl.serving.vllm.messages import (
    REFUSED,
    BroadcastInfo,
    FilesInfo,
    FinishBody,
    InitBody,
    InitInfo,
    UpdateBody,
    UpdateInfo,
    worker_error,
)
from pipelinerl.serving.wire import ProcessGroupRequest

RESUME_TRIES = 3


class HalfUpdatedError(WeightUpdateError):
    """The server may hold neither the old weights nor the new: it stays paused, and must not be used."""


class WeightSwitch:
    """Bounds: `timeout_s` for each step, `update_timeout_s` for reading the file, if there is one, and loading."""

    def __init__(self, http: HttpClient, *, timeout_s: float, update_timeout_s: float) -> None:
        self._http = http
        self._timeout_s = timeout_s
        self._update_timeout_s = update_timeout_s

    async def name_directory(self, directory: Path) -> None:
        """Tell the server where files of weights come from. Raises WeightUpdateError."""
        await self._init(FilesInfo(str(directory)), "did not take the directory of weights", self._timeout_s)

    async def join_broadcast(self, group: ProcessGroupRequest) -> None:
        """Have its worker join the trainer's broadcast; it generates nothing until all have. Raises WeightUpdateError."""
        info = msgspec.convert(msgspec.to_builtins(group) | {"source": "broadcast"}, BroadcastInfo)
        await self._init(info, "did not join the trainer's broadcast", group.timeout_s + self._timeout_s)

    async def _init(self, info: InitInfo, failed: str, timeout_s: float) -> None:
        try:
            await self._post("/init_weight_transfer_engine", InitBody(info), timeout_s=timeout_s)
        except ServerError as error:
            raise self._refusal(failed, error) from error

    async def run(self, update: WeightOffer, replaced: Callable[[], None]) -> float:
        """Replace all weights; returns the seconds from asking for the pause to having resumed.

        `replaced` is called once the new ones are in place, before anything is computed with them.

        Raises WeightUpdateError, with the old weights in place and generation resumed, or HalfUpdatedError.
        """
        started_s = time.perf_counter()
        try:
            await self._pause()
            try:
                await self._replace(update)
            except WeightUpdateError:
                await self._resume()
                raise
            replaced()
            await self._resume()
        except ServerError as error:
            raise self._half(update, worker_error(error.problem)) from error
        except asyncio.CancelledError as error:
            error.add_note(str(self._half(update, "it was cut off")))
            raise
        return time.perf_counter() - started_s

    async def _pause(self) -> None:
        """Stop between two tokens, keeping requests and their KV entries."""
        try:
            await self._post("/pause", params={"mode": "keep", "clear_cache": "false"})
        except ServerError as error:
            with suppress(ServerError):
                await self._resume()
            raise self._refusal("did not pause", error) from error

    async def _replace(self, update: WeightOffer) -> None:
        """Raises WeightUpdateError if nothing was changed, ServerError if that is not known."""
        try:
            await self._post("/start_weight_update")
        except ServerError as error:
            raise self._refusal("did not begin an update", error) from error
        path = str(update.path) if isinstance(update, SavedWeights) else None
        info = UpdateInfo(version=update.version, checksum=update.checksum, path=path)
        try:
            await self._post("/update_weights", UpdateBody(info), timeout_s=self._update_timeout_s)
        except ServerError as error:
            if worker_error(error.problem).startswith(REFUSED):
                raise self._refusal("keeps its weights", error) from error
            raise
        await self._post("/finish_weight_update", FinishBody(weight_version=str(update.version)))

    async def _resume(self) -> None:
        for left in reversed(range(RESUME_TRIES)):
            try:
                await self._post("/resume")
                break
            except ServerError:
                if not left:
                    raise

    async def _post(
        self, path: str, body: object = None, *, params: dict[str, str] | None = None, timeout_s: float | None = None
    ) -> None:
        await self._http.post(path, body, msgspec.Raw, timeout_s=timeout_s or self._timeout_s, params=params)

    def _refusal(self, what: str, error: ServerError) -> WeightUpdateError:
        return WeightUpdateError(f"engine server {self._http.url} {what}: {worker_error(error.problem)}")

    def _half(self, update: WeightOffer, why: str) -> HalfUpdatedError:
        return HalfUpdatedError(
            f"engine server {self._http.url} may hold half of version {update.version} ({why}); restart it"
        )
