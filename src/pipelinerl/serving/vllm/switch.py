"""Updates a vLLM server's weights between two tokens, through its RL API: pause, start, update, finish, resume."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from pipelinerl.errors import WeightUpdateError
from pipelinerl.serving.client.adapter import SavedWeights, WeightSource
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
    """The server may hold a mixture of old and new weights, or stay paused. It must not be used."""


class WeightSwitch:
    """`timeout_s` limits each step; `update_timeout_s` limits reading the file, if there is one, and loading."""

    def __init__(self, http: HttpClient, *, timeout_s: float, update_timeout_s: float) -> None:
        self._http = http
        self._timeout_s = timeout_s
        self._update_timeout_s = update_timeout_s

    async def name_directory(self, directory: Path) -> None:
        """Tell the server which directory has the weight files. Raises WeightUpdateError."""
        await self._init(FilesInfo(str(directory)), "did not accept the directory of weights", self._timeout_s)

    async def join_broadcast(self, group: ProcessGroupRequest) -> None:
        """Have vLLM's worker join the trainer's broadcast. It generates nothing until all receivers have joined.

        Raises WeightUpdateError.
        """
        info = msgspec.convert(msgspec.to_builtins(group) | {"source": "broadcast"}, BroadcastInfo)
        await self._init(info, "did not join the trainer's broadcast", group.timeout_s + self._timeout_s)

    async def _init(self, info: InitInfo, failed: str, timeout_s: float) -> None:
        try:
            await self._post("/init_weight_transfer_engine", InitBody(info), timeout_s=timeout_s)
        except ServerError as error:
            raise self._refusal(failed, error) from error

    async def run(self, update: WeightSource, replaced: Callable[[], None]) -> float:
        """Replace all weights. Returns the seconds from the pause request until generation has resumed.

        `replaced` is called when the new weights are in place, before generation resumes.

        Raises WeightUpdateError if the old weights are in place and generation has resumed, otherwise HalfUpdatedError.
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
            raise self._half_updated(update, worker_error(error.problem)) from error
        except asyncio.CancelledError as error:
            error.add_note(str(self._half_updated(update, "the update was cancelled")))
            raise
        return time.perf_counter() - started_s

    async def _pause(self) -> None:
        """Pause between two tokens, keeping requests and their KV entries."""
        try:
            await self._post("/pause", params={"mode": "keep", "clear_cache": "false"})
        except ServerError as error:
            try:
                await self._resume()
            except ServerError as second:
                raise HalfUpdatedError(
                    f"engine server {self._http.url} may be paused for good: /pause failed ({worker_error(error.problem)}), "
                    f"and so did /resume ({worker_error(second.problem)}); restart it"
                ) from second
            raise self._refusal("did not pause", error) from error

    async def _replace(self, update: WeightSource) -> None:
        """Raises WeightUpdateError if nothing was changed, ServerError if the weights may have changed."""
        try:
            await self._post("/start_weight_update")
        except ServerError as error:
            raise self._refusal("did not start an update", error) from error
        path = str(update.path) if isinstance(update, SavedWeights) else None
        info = UpdateInfo(version=update.version, checksum=update.checksum, path=path)
        try:
            await self._post("/update_weights", UpdateBody(info), timeout_s=self._update_timeout_s)
        except ServerError as error:
            if worker_error(error.problem).startswith(REFUSED):
                raise self._refusal("kept its weights", error) from error
            raise
        await self._post("/finish_weight_update", FinishBody(weight_version=str(update.version)))

    async def _resume(self) -> None:
        for retries_left in reversed(range(RESUME_TRIES)):
            try:
                await self._post("/resume")
                break
            except ServerError:
                if not retries_left:
                    raise

    async def _post(
        self, path: str, body: object = None, *, params: dict[str, str] | None = None, timeout_s: float | None = None
    ) -> None:
        await self._http.post(path, body, msgspec.Raw, timeout_s=timeout_s or self._timeout_s, params=params)

    def _refusal(self, what: str, error: ServerError) -> WeightUpdateError:
        return WeightUpdateError(f"engine server {self._http.url} {what}: {worker_error(error.problem)}")

    def _half_updated(self, update: WeightSource, why: str) -> HalfUpdatedError:
        return HalfUpdatedError(
            f"engine server {self._http.url} may hold half of version {update.version} ({why}); restart it"
        )
