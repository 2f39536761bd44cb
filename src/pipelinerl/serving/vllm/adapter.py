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
import time
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.errors import WeightUpdateError
from pipelinerl.serving.client.adapter import ServerError, ServerUnreachableError, TokenListener
from pipelinerl.serving.client.http import HttpClient
from pipelinerl.serving.vllm.messages import UNLABELLED, InvalidAnswerError, Label
from pipelinerl.serving.vllm.requests import Requests, generate_body
from pipelinerl.serving.vllm.server_info import (
    ModelFacts,
    PauseState,
    ServerDescription,
    VllmConfig,
    WeightLabel,
    model_facts,
)
from pipelinerl.serving.vllm.switch import TIMEOUT_S, HalfUpdatedError, WeightSwitch
from pipelinerl.serving.wire import ProcessGroupRequest, ServerInfo, WeightUpdateRequest
from pipelinerl.types import Completion, GenerationRequest, UpdateReceipt

ENDING_S, LOOK_EVERY_S = 10.0, 0.2
"""How long vLLM may take to end when one of its processes has."""


class VllmServer:
    """One vLLM server; implements `EngineServer`. No other client may update its weights.

    `facts`: read from the model's folder if not given. `run` and `epoch`: see `WeightUpdateRequest`.
    """

    def __init__(
        self, url: str, *, facts: ModelFacts | None = None, api_key: str | None = None, run: str = "", epoch: int = 0
    ) -> None:
        self._http = HttpClient(url, api_key=api_key)
        self._facts = facts
        self._session = (run, epoch) if run else None
        self._holds_of = ("", 0)  # the session of the weights that it holds
        self._attaching = asyncio.Lock()
        self._updating = asyncio.Lock()
        self._known: ServerInfo | None = None  # of the current server process
        self._told = ("", Path())  # the instance that was told the directory of weight files, and the directory
        self._may_have_restarted = False  # whether another process may answer now
        self._broken = ""
        self._requests = Requests(
            self._http, self._prepare, lambda: self._known.version if self._known else 0, self._session
        )
        self._switch = WeightSwitch(self._http)

    @property
    def url(self) -> str:
        return self._http.url

    async def info(self) -> ServerInfo:
        """See `EngineServer`. `in_progress` and `queued` count only this client's requests.

        During an update the known state is returned, without asking the server.
        """
        info = self._known if self._updating.locked() else None
        if info is None:
            info = await self._attach()
        self._refuse_if_broken()
        in_progress = min(len(self._requests), info.slots)
        return msgspec.structs.replace(info, in_progress=in_progress, queued=len(self._requests) - in_progress)

    async def generate(self, request: GenerationRequest, on_token: TokenListener | None = None) -> Completion:
        try:
            return await self._requests.run(request, on_token)
        except ServerUnreachableError:
            self._may_have_restarted = True
            raise

    async def _prepare(self, request: GenerationRequest) -> dict[str, Any]:
        info = self._known
        if info is None or self._may_have_restarted:
            info = await self._attach(again=False)
        self._refuse_if_broken()
        return generate_body(request, info.max_length)

    async def cancel(self, request_id: str) -> None:
        await self._requests.cancel(request_id)

    async def join_broadcast(self, group: ProcessGroupRequest) -> None:
        async with self._updating:
            await self._attach()
            self._refuse_if_broken()
            run, epoch = self._session or ("", 0)
            await self._switch.join_broadcast(msgspec.structs.replace(group, run=run, epoch=epoch))

    async def update_weights(self, update: WeightUpdateRequest) -> UpdateReceipt:
        """See `EngineServer`. After a refused update the old weights are in place and generation continues.

        If the update may be incomplete, vLLM stays paused, requests in progress fail, and new ones are refused: the weights
        may belong to no version. The first update of a session may have any version, and ends all requests.
        """
        async with self._updating:
            info = await self._attach()
            self._refuse_if_broken()
            anew = self._session not in (None, self._holds_of)
            if update.version < info.version and not anew:
                raise WeightUpdateError(
                    f"version {update.version} is older than the {info.version} of {self.url}; nothing was changed"
                )
            in_flight = len(self._requests)
            pause_s = 0.0
            if anew or (info.version, info.checksum) != (update.version, update.checksum):
                pause_s = await self._replace(info, update, anew)
            return UpdateReceipt(
                engine=self.url,
                version=update.version,
                checksum=update.checksum,
                pause_s=pause_s,
                sequences_in_flight=in_flight,
            )

    async def close(self) -> None:
        await self._http.close()

    async def _replace(self, info: ServerInfo, update: WeightUpdateRequest, anew: bool) -> float:
        run, epoch = self._session or ("", 0)
        update = msgspec.structs.replace(update, run=run, epoch=epoch)
        if update.path is not None:
            told = info.instance, Path(update.path).resolve().parent
            if self._told != told:
                await self._switch.name_directory(told[1])
                self._told = told

        def replaced() -> None:
            self._known = msgspec.structs.replace(info, version=update.version, checksum=update.checksum)
            self._holds_of = run, epoch

        try:
            return await self._switch.run(update, replaced, anew=anew)
        except (HalfUpdatedError, asyncio.CancelledError) as error:
            if isinstance(error, HalfUpdatedError) and await self._has_ended():
                self._may_have_restarted = True
                ended = ServerUnreachableError(self.url, "has ended during an update of its weights", refused=True)
                self._requests.fail_all(ended)
                raise ended from error
            self._broken = f"can't be used since an update of its weights was interrupted ({error}); restart it"
            self._requests.fail_all(ServerError(self.url, self._broken))
            raise

    async def _has_ended(self) -> bool:
        """Whether the process has ended, or ends within `ENDING_S`: then it does not matter what its weights are."""
        deadline_s = time.monotonic() + ENDING_S
        while time.monotonic() < deadline_s:
            try:
                await self._http.get("/is_paused", PauseState, timeout_s=TIMEOUT_S)
            except ServerUnreachableError as error:
                if error.refused:
                    return True
            except ServerError:  # its engine may have ended, and the server is about to
                pass
            else:
                return False
            await asyncio.sleep(LOOK_EVERY_S)
        return False

    async def _attach(self, *, again: bool = True) -> ServerInfo:
        """Query the server and describe it. Unless `again`, a known description is returned if no restart is suspected.

        Raises ServerError if the server can't be used.
        """
        async with self._attaching:
            if self._known is not None and not (again or self._may_have_restarted):
                return self._known
            path = "/server_info?config_format=json"
            config = (await self._http.get(path, ServerDescription, timeout_s=3 * TIMEOUT_S)).vllm_config
            label = (await self._http.get("/weight_info", WeightLabel, timeout_s=TIMEOUT_S)).weight_version
            if self._known is None or self._known.instance != config.instance_id:
                self._known = await self._attach_new(config, label)
            self._may_have_restarted = False
            return self._known

    async def _attach_new(self, config: VllmConfig, label: str) -> ServerInfo:
        """Check whether a new server process can be used. Weights without a label are of version 0.

        They get that label, unless a session is to update them: until it has, their tokens are of no use to it.
        """
        if found := config.problems():
            raise ServerError(self.url, f"can't be used as an engine: {'; '.join(found)}")
        if (await self._http.get("/is_paused", PauseState, timeout_s=TIMEOUT_S)).is_paused:
            raise ServerError(self.url, "is paused: an update of its weights may have been interrupted; restart it")
        try:
            held = Label(0) if label == UNLABELLED else Label.of(label)
        except InvalidAnswerError as error:
            raise ServerError(self.url, f"is used by something else: its {error}") from error
        if label == UNLABELLED and self._session is None:
            body = {"new_version": str(held)}
            await self._http.post("/update_weight_version", body, msgspec.Raw, timeout_s=TIMEOUT_S)
        model = config.model_config
        facts = await asyncio.to_thread(model_facts, model.model) if self._facts is None else self._facts
        self._broken, self._holds_of = "", held.session
        return ServerInfo(
            instance=config.instance_id,
            name="vllm",
            model=model.model,
            slots=config.scheduler_config.max_num_seqs,
            max_length=model.max_model_len,
            vocabulary=facts.vocabulary,
            stop_token_ids=facts.stop_token_ids,
            version=held.version,
            checksum="",
            in_progress=0,
            queued=0,
        )

    def _refuse_if_broken(self) -> None:
        if self._broken:
            raise ServerError(self.url, self._broken)
