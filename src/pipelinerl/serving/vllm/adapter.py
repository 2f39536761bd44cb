"""One vLLM server as an engine: generation through its token API, weight updates in flight through its RL API.

    generate, cancel    /inference/v1/generate, /inference/v1/abort_requests                           `requests`
    update_weights      /pause, /start_weight_update, /update_weights, /finish_weight_update, /resume  `switch`
                        vLLM then loads the file, or the received broadcast, through our backend       `plugin`
    info                /server_info, /weight_info                                                     `server_info`

Differences to our own server: vLLM is sent no seed; a request that is sent twice gets two different completions; and vLLM
does not report which weights computed a prompt's KV entries, so completions have no `prompt_versions`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pipelinerl.errors import WeightUpdateError
from pipelinerl.serving.client.adapter import SavedWeights, TokenListener, WeightSource
from pipelinerl.serving.client.errors import ServerError, ServerUnreachableError
from pipelinerl.serving.client.http import HttpClient
from pipelinerl.serving.vllm.messages import BACKEND, UNLABELLED, GenerateBody, InvalidAnswerError, LabelBody
from pipelinerl.serving.vllm.requests import Requests, generate_body, version_of
from pipelinerl.serving.vllm.server_info import (
    ModelFacts,
    PauseState,
    ServerConfig,
    ServerDescription,
    WeightLabel,
    model_facts,
    problems,
)
from pipelinerl.serving.vllm.switch import HalfUpdatedError, WeightSwitch
from pipelinerl.serving.wire import ProcessGroupRequest, ServerInfo
from pipelinerl.types import Completion, GenerationRequest, UpdateReceipt


@dataclass(slots=True)
class _ServerState:
    """The state of the current server process. `directory`: the directory for weight files that it was told."""

    config: ServerConfig
    facts: ModelFacts
    version: int
    checksum: str = ""
    directory: Path | None = None

    def record(self, update: WeightSource) -> None:
        self.version, self.checksum = update.version, update.checksum


class VllmServer:
    """One vLLM server; implements `EngineServer`. No other client may update its weights.

    `facts`: read from the model's folder if not given. `version`: version of the weights that vLLM starts with. `timeout_s`
    limits short calls, `update_timeout_s` an update.
    """

    def __init__(
        self,
        url: str,
        *,
        facts: ModelFacts | None = None,
        version: int = 0,
        api_key: str | None = None,
        timeout_s: float = 10.0,
        update_timeout_s: float = 300.0,
    ) -> None:
        self._http = HttpClient(url, api_key=api_key)
        self._facts = facts
        self._first_version = version
        self._timeout_s = timeout_s
        self._attaching = asyncio.Lock()
        self._updating = asyncio.Lock()
        self._state: _ServerState | None = None
        self._may_have_restarted = False  # whether another process may answer now
        self._broken = ""
        self._requests = Requests(self._http, self._prepare, self._version)
        self._switch = WeightSwitch(self._http, timeout_s=timeout_s, update_timeout_s=update_timeout_s)

    @property
    def url(self) -> str:
        return self._http.url

    async def info(self) -> ServerInfo:
        """See `EngineServer`. `in_progress` and `queued` count only this client's requests.

        During an update the known state is returned, without asking the server.
        """
        state = self._state if self._updating.locked() else None
        if state is None:
            state = await self._attach()
        self._refuse_if_broken()
        in_progress = min(len(self._requests), state.config.slots)
        return ServerInfo(
            instance=state.config.instance,
            name="vllm",
            model=state.config.model,
            slots=state.config.slots,
            max_length=state.config.max_length,
            vocabulary=state.facts.vocabulary,
            stop_token_ids=state.facts.stop_token_ids,
            version=state.version,
            checksum=state.checksum,
            in_progress=in_progress,
            queued=len(self._requests) - in_progress,
        )

    async def generate(self, request: GenerationRequest, on_token: TokenListener | None = None) -> Completion:
        try:
            return await self._requests.run(request, on_token)
        except ServerUnreachableError:
            self._may_have_restarted = True
            raise

    async def _prepare(self, request: GenerationRequest) -> GenerateBody:
        state = self._state
        if state is None or self._may_have_restarted:
            state = await self._attach(again=False)
        self._refuse_if_broken()
        return generate_body(request, state.config.max_length)

    def _version(self) -> int:
        return self._state.version if self._state else self._first_version

    async def cancel(self, request_id: str) -> None:
        await self._requests.cancel(request_id)

    async def join_broadcast(self, group: ProcessGroupRequest) -> None:
        async with self._updating:
            await self._attach()
            self._refuse_if_broken()
            await self._switch.join_broadcast(group)

    async def update_weights(self, update: WeightSource) -> UpdateReceipt:
        """See `EngineServer`. After a refused update the old weights are in place and generation continues.

        If the update may be incomplete, vLLM stays paused, requests in progress fail, and new ones are refused: the weights
        may belong to no version.
        """
        async with self._updating:
            state = await self._attach()
            self._refuse_if_broken()
            if update.version < state.version:
                raise WeightUpdateError(
                    f"version {update.version} is older than the {state.version} of {self.url}; nothing was changed"
                )
            in_flight = len(self._requests)
            pause_s = 0.0
            if (state.version, state.checksum) != (update.version, update.checksum):
                pause_s = await self._replace(state, update)
            return UpdateReceipt(
                engine=self.url,
                version=update.version,
                checksum=update.checksum,
                pause_s=pause_s,
                sequences_in_flight=in_flight,
            )

    async def close(self) -> None:
        await self._http.close()

    async def _replace(self, state: _ServerState, update: WeightSource) -> float:
        if isinstance(update, SavedWeights) and state.directory != (directory := update.path.resolve().parent):
            await self._switch.name_directory(directory)
            state.directory = directory
        try:
            return await self._switch.run(update, lambda: state.record(update))
        except (HalfUpdatedError, asyncio.CancelledError) as error:
            self._broken = f"can't be used since an update of its weights was interrupted ({error}); restart it"
            self._requests.fail_all(self._broken)
            raise

    async def _attach(self, *, again: bool = True) -> _ServerState:
        """Query the server and return its state. Unless `again`, a known state is returned if no restart is suspected.

        Raises ServerError if the server can't be used.
        """
        async with self._attaching:
            if self._state is not None and not (again or self._may_have_restarted):
                return self._state
            path = "/server_info?config_format=json"
            config = (await self._http.get(path, ServerDescription, timeout_s=3 * self._timeout_s)).vllm_config.settings
            label = (await self._http.get("/weight_info", WeightLabel, timeout_s=self._timeout_s)).weight_version
            if self._state is None or self._state.config.instance != config.instance:
                self._state = await self._attach_new(config, label)
            self._may_have_restarted = False
            return self._state

    async def _attach_new(self, config: ServerConfig, label: str) -> _ServerState:
        """Check whether a new server process can be used, and label its weights if they have no version label."""
        if found := problems(config, BACKEND):
            raise ServerError(self.url, f"can't be used as an engine: {'; '.join(found)}")
        if (await self._http.get("/is_paused", PauseState, timeout_s=self._timeout_s)).is_paused:
            raise ServerError(self.url, "is paused: an update of its weights may have been interrupted; restart it")
        version = self._first_version
        if label == UNLABELLED:
            body = LabelBody(new_version=str(version))
            await self._http.post("/update_weight_version", body, msgspec.Raw, timeout_s=self._timeout_s)
        else:
            try:
                version = version_of(label)
            except InvalidAnswerError as error:
                raise ServerError(self.url, f"is used by something else: its {error}") from error
        facts = self._facts
        if facts is None:
            facts = await asyncio.to_thread(model_facts, config.model)
        self._broken = ""
        return _ServerState(config, facts, version)

    def _refuse_if_broken(self) -> None:
        if self._broken:
            raise ServerError(self.url, self._broken)
