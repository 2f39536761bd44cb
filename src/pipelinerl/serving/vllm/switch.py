"""Updates a vLLM server's weights between two tokens, through its RL API: pause, start, update, finish, resume."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from pipelinerl.errors import WeightUpdateError
from pipelinerl.serving.client.adapter import ServerError
from pipelinerl.serving.client.http import HttpClient
from pipelinerl.serving.vllm.messages import REFUSED, Label, worker_error
from pipelinerl.serving.wire import ProcessGroupRequest, WeightUpdateRequest

RESUME_TRIES = 3
TIMEOUT_S = 10.0
"""For each short call."""
UPDATE_TIMEOUT_S = 300.0
"""For reading the file, if there is one, and loading."""


class HalfUpdatedError(WeightUpdateError):
    """The server may hold a mixture of old and new weights, or stay paused. It must not be used."""


class WeightSwitch:
    """Updates the weights of the server that `http` reaches."""

    def __init__(self, http: HttpClient) -> None:
        self._http = http

    async def name_directory(self, directory: Path) -> None:
        """Tell the server which directory has the weight files. Raises WeightUpdateError."""
        await self._init({"source": "files", "directory": str(directory)}, "did not accept the directory of weights")

    async def join_broadcast(self, group: ProcessGroupRequest) -> None:
        """Have vLLM's worker join the trainer's broadcast. It generates nothing until all receivers have joined.

        Raises WeightUpdateError.
        """
        info = {"source": "broadcast", **msgspec.structs.asdict(group)}
        await self._init(info, "did not join the trainer's broadcast", group.timeout_s)

    async def _init(self, info: dict[str, Any], failed: str, longer_s: float = 0.0) -> None:
        try:
            await self._post("/init_weight_transfer_engine", {"init_info": info}, timeout_s=TIMEOUT_S + longer_s)
        except ServerError as error:
            raise self._refusal(failed, error) from error

    async def run(self, update: WeightUpdateRequest, replaced: Callable[[], None], *, anew: bool = False) -> float:
        """Replace all weights. Returns the seconds from the pause request until generation has resumed.

        `anew`: end all requests first. `replaced` is called when the new weights are in place, before generation resumes.

        Raises WeightUpdateError if the old weights are in place and generation has resumed, otherwise HalfUpdatedError.
        """
        started_s = time.perf_counter()
        try:
            await self._pause("abort" if anew else "keep")
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

    async def _pause(self, mode: Literal["keep", "abort"]) -> None:
        """Pause between two tokens. `keep` keeps requests and their KV entries."""
        try:
            await self._post("/pause", params={"mode": mode, "clear_cache": "false"})
        except ServerError as error:
            try:
                await self._resume()
            except ServerError as second:
                raise HalfUpdatedError(
                    f"engine server {self._http.url} may be paused for good: /pause failed ({worker_error(error.problem)}), "
                    f"and so did /resume ({worker_error(second.problem)}); restart it"
                ) from second
            raise self._refusal("did not pause", error) from error

    async def _replace(self, update: WeightUpdateRequest) -> None:
        """Raises WeightUpdateError if nothing was changed, ServerError if the weights may have changed."""
        try:
            await self._post("/start_weight_update")
        except ServerError as error:
            raise self._refusal("did not start an update", error) from error
        try:
            await self._post("/update_weights", {"update_info": update}, timeout_s=UPDATE_TIMEOUT_S)
        except ServerError as error:
            if worker_error(error.problem).startswith(REFUSED):
                raise self._refusal("kept its weights", error) from error
            raise
        await self._post("/finish_weight_update", {"weight_version": str(Label(update.version, update.run, update.epoch))})

    async def _resume(self) -> None:
        for retries_left in reversed(range(RESUME_TRIES)):
            try:
                await self._post("/resume")
                break
            except ServerError:
                if not retries_left:
                    raise

    async def _post(
        self, path: str, body: object = None, *, params: dict[str, str] | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        await self._http.post(path, body, msgspec.Raw, timeout_s=timeout_s, params=params)

    def _refusal(self, what: str, error: ServerError) -> WeightUpdateError:
        return WeightUpdateError(f"engine server {self._http.url} {what}: {worker_error(error.problem)}")

    def _half_updated(self, update: WeightUpdateRequest, why: str) -> HalfUpdatedError:
        return HalfUpdatedError(
            f"engine server {self._http.url} may hold half of version {update.version} ({why}); restart it"
        )
