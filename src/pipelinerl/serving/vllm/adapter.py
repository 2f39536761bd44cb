"""One vLLM server as an engine: tokens in and out over its generate interface, weights in flight over its RL interface.

    generate, cancel    /inference/v1/generate, /inference/v1/abort_requests                           `requests`
    update_weights      /pause, /start_weight_update, /update_weights, /finish_weight_update, /resume  `switch`
                        vLLM then reads the file, or takes what it has received, through our backend   `plugin`
    info                /server_info, /weight_info                                                     `server_info`

What differs from our own server: vLLM is sent no seed, and a request that is sent twice gives another completion the second
time; it does not say which weights computed a prompt's KV entries, so completions have no `prompt_versions`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pipelinerl.errors import WeightUpdateError
from pipelinerl.serving.client.adapter import SavedWeights, TokenListener, WeightOffer
from pipelinerl.serving.client.errors import ServerError, ServerUnreachableError
from pipelinerl.serving.client.http import HttpClient
from pipelinerl.serving.vllm.messages import BACKEND, UNLABELLED, GenerateBody, LabelBody, UnfaithfulError
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
class _Held:
    """What is known of the server process that answers now. `directory`: where it was told that weights come from."""

    config: ServerConfig
    facts: ModelFacts
    version: int
    checksum: str = ""
    directory: Path | None = None

    def take(self, update: WeightOffer) -> None:
        self.version, self.checksum = update.version, update.checksum


class VllmServer:
    """One vLLM server; implements `EngineServer`. Nobody else may update its weights.

    `facts` are read from the model's folder if they are not given. `version` is that of the weights vLLM starts with.
    Bounds: `timeout_s` for short calls, `update_timeout_s` for an update.
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
        self._held: _Held | None = None
        self._unsure = False  # whether another process may have taken the place of the one we know
        self._broken = ""
        self._requests = Requests(self._http, self._prepare, self._version)
        self._switch = WeightSwitch(self._http, timeout_s=timeout_s, update_timeout_s=update_timeout_s)

    @property
    def url(self) -> str:
        return self._http.url

    async def info(self) -> ServerInfo:
        """As promised. `in_progress` and `queued` count this client's requests; while weights change, nothing is asked."""
        held = self._held if self._updating.locked() else None
        if held is None:
            held = await self._attach()
        self._refuse_if_broken()
        in_progress = min(len(self._requests), held.config.slots)
        return ServerInfo(
            instance=held.config.instance,
            name="vllm",
            model=held.config.model,
            slots=held.config.slots,
            max_length=held.config.max_length,
            vocabulary=held.facts.vocabulary,
            stop_token_ids=held.facts.stop_token_ids,
            version=held.version,
            checksum=held.checksum,
            in_progress=in_progress,
            queued=len(self._requests) - in_progress,
        )

    async def generate(self, request: GenerationRequest, on_token: TokenListener | None = None) -> Completion:
        try:
            return await self._requests.run(request, on_token)
        except ServerUnreachableError:
            self._unsure = True
            raise

    async def _prepare(self, request: GenerationRequest) -> GenerateBody:
        held = self._held
        if held is None or self._unsure:
            held = await self._attach(again=False)
        self._refuse_if_broken()
        return generate_body(request, held.config.max_length)

    def _version(self) -> int:
        return self._held.version if self._held else self._first_version

    async def cancel(self, request_id: str) -> None:
        await self._requests.cancel(request_id)

    async def join_broadcast(self, group: ProcessGroupRequest) -> None:
        async with self._updating:
            await self._attach()
            self._refuse_if_broken()
            await self._switch.join_broadcast(group)

    async def update_weights(self, update: WeightOffer) -> UpdateReceipt:
        """As promised; an update that is refused leaves all as it was, and generation goes on.

        If it is not known to have been taken whole, vLLM stays paused, requests in progress end with an error, and there
        are no new ones: what vLLM would compute is no version's.
        """
        async with self._updating:
            held = await self._attach()
            self._refuse_if_broken()
            if update.version < held.version:
                raise WeightUpdateError(
                    f"version {update.version} is older than the {held.version} of {self.url}; nothing was changed"
                )
            in_flight = len(self._requests)
            pause_s = 0.0
            if (held.version, held.checksum) != (update.version, update.checksum):
                pause_s = await self._replace(held, update)
            return UpdateReceipt(
                engine=self.url,
                version=update.version,
                checksum=update.checksum,
                pause_s=pause_s,
                sequences_in_flight=in_flight,
            )

    async def close(self) -> None:
        await self._http.close()

    async def _replace(self, held: _Held, update: WeightOffer) -> float:
        if isinstance(update, SavedWeights) and held.directory != (directory := update.path.resolve().parent):
            await self._switch.name_directory(directory)
            held.directory = directory
        try:
            return await self._switch.run(update, lambda: held.take(update))
        except (HalfUpdatedError, asyncio.CancelledError) as error:
            self._broken = f"can't be used since an update of its weights was cut off ({error}); restart it"
            self._requests.give_up(self._broken)
            raise

    async def _attach(self, *, again: bool = True) -> _Held:
        """The server as it is now; unless `again`, one look serves all who wait for it.

        Raises ServerError if it can't be used.
        """
        async with self._attaching:
            if self._held is not None and not (again or self._unsure):
                return self._held
            path = "/server_info?config_format=json"
            config = (await self._http.get(path, ServerDescription, timeout_s=3 * self._timeout_s)).vllm_config.settings
            label = (await self._http.get("/weight_info", WeightLabel, timeout_s=self._timeout_s)).weight_version
            if self._held is None or self._held.config.instance != config.instance:
                self._held = await self._meet(config, label)
            self._unsure = False
            return self._held

    async def _meet(self, config: ServerConfig, label: str) -> _Held:
        """A server process that was not known: see whether it can be used, and label its weights if nobody has."""
        if found := problems(config, BACKEND):
            raise ServerError(self.url, f"can't be used as an engine: {'; '.join(found)}")
        if (await self._http.get("/is_paused", PauseState, timeout_s=self._timeout_s)).is_paused:
            raise ServerError(self.url, "is paused: an update of its weights may have been cut off; restart it")
        version = self._first_version
        if label == UNLABELLED:
            body = LabelBody(new_version=str(version))
            await self._http.post("/update_weight_version", body, msgspec.Raw, timeout_s=self._timeout_s)
        else:
            try:
                version = version_of(label)
            except UnfaithfulError as error:
                raise ServerError(self.url, f"is used by something else: its {error}") from error
        facts = self._facts
        if facts is None:
            facts = await asyncio.to_thread(model_facts, config.model)
        self._broken = ""
        return _Held(config, facts, version)

    def _refuse_if_broken(self) -> None:
        if self._broken:
            raise ServerError(self.url, self._broken)
