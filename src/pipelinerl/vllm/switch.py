"""New weights for a vLLM server between two tokens, through its RL interface: pause, start, update, finish, resume."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from pipelinerl.errors import WeightUpdateError
from pipelinerl.remote.adapter import SavedWeights
from pipelinerl.remote.errors import ServerError
from pipelinerl.remote.http import HttpClient
from pipelinerl.vllm.messages import (
    REFUSED,
    FinishBody,
    InitBody,
    InitInfo,
    UpdateBody,
    UpdateInfo,
    worker_error,
)

RESUME_TRIES = 3


class HalfUpdatedError(WeightUpdateError):
    """The server may hold neither the old weights nor the new: it stays paused, and must not be used."""


class WeightSwitch:
    """Bounds: `timeout_s` for each step, `update_timeout_s` for reading and loading the file."""

    def __init__(self, http: HttpClient, *, timeout_s: float, update_timeout_s: float) -> None:
        self._http = http
        self._timeout_s = timeout_s
        self._update_timeout_s = update_timeout_s

    async def name_directory(self, directory: Path) -> None:
        """Tell the server where files of weights come from. Raises WeightUpdateError."""
        try:
            await self._post("/init_weight_transfer_engine", InitBody(InitInfo(str(directory))))
        except ServerError as error:
            raise self._refusal("did not take the directory of weights", error) from error

    async def run(self, update: SavedWeights, replaced: Callable[[], None]) -> float:
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

    async def _replace(self, update: SavedWeights) -> None:
        """Raises WeightUpdateError if nothing was changed, ServerError if that is not known."""
        try:
            await self._post("/start_weight_update")
        except ServerError as error:
            raise self._refusal("did not begin an update", error) from error
        info = UpdateInfo(path=str(update.path), version=update.version, checksum=update.checksum)
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

    def _half(self, update: SavedWeights, why: str) -> HalfUpdatedError:
        return HalfUpdatedError(
            f"engine server {self._http.url} may hold half of version {update.version} ({why}); restart it"
        )
