"""One vLLM server as an engine: generation through its token API, weight updates in flight through its RL API.

    generate, cancel    /inference/v1/generate, /inference/v1/abort_requests                           `requests`
    update_weights      /pause, /start_weight_update, /update_weights, /finish_weight_update, /resume
                        vLLM then loads the file, or the received broadcast, through our backend       `plugin`
    info                /server_info, /weight_info                                                     `server_info`

Differences to our own server: vLLM is sent no seed; a request that is sent twice gets two different completions; and vLLM
does not report which weights computed a prompt's KV entries, so completions have no `prompt_versions`.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, Literal

import msgspec

from pipelinerl.errors import WeightUpdateError
from pipelinerl.serving.client.adapter import ServerError, ServerUnreachableError, TokenListener
from pipelinerl.serving.client.http import HttpClient
from pipelinerl.serving.vllm.messages import REFUSED, UNLABELLED, InvalidAnswerError, Label, worker_error
from pipelinerl.serving.vllm.requests import Requests, generate_body
from pipelinerl.serving.vllm.server_info import (
    ModelFacts,
    PauseState,
    ServerDescription,
    VllmConfig,
    WeightLabel,
    model_facts,
)
from pipelinerl.serving.wire import ProcessGroupRequest, ServerInfo, WeightUpdateRequest
from pipelinerl.types import Completion, GenerationRequest, UpdateReceipt

ENDING_S, LOOK_EVERY_S = 10.0, 0.2
"""How long vLLM may take to end when one of its processes has."""
RESUME_TRIES = 3
TIMEOUT_S = 10.0
"""For each short call."""
UPDATE_TIMEOUT_S = 300.0
"""For reading the file, if there is one, and loading."""


class HalfUpdatedError(WeightUpdateError):
    """The server may hold a mixture of old and new weights, or stay paused. It must not be used."""


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
            info = {"source": "broadcast", **msgspec.structs.asdict(group), "run": run, "epoch": epoch}
            # vLLM's worker generates nothing until all receivers have joined.
            await self._init_transfer(info, "did not join the trainer's broadcast", group.timeout_s)

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

    # ---- an update, between two tokens

    async def _init_transfer(self, info: dict[str, Any], failed: str, longer_s: float = 0.0) -> None:
        try:
            await self._post("/init_weight_transfer_engine", {"init_info": info}, timeout_s=TIMEOUT_S + longer_s)
        except ServerError as error:
            raise self._refusal(failed, error) from error

    async def _replace(self, info: ServerInfo, update: WeightUpdateRequest, anew: bool) -> float:
        """Replace all weights. Returns the seconds from the pause request until generation has resumed.

        `anew`: end all requests first. Raises WeightUpdateError if the old weights are in place and generation has resumed,
        otherwise HalfUpdatedError, and ServerUnreachableError if the server has ended.
        """
        run, epoch = self._session or ("", 0)
        update = msgspec.structs.replace(update, run=run, epoch=epoch)
        if update.path is not None:
            told = info.instance, Path(update.path).resolve().parent
            if self._told != told:
                files = {"source": "files", "directory": str(told[1])}
                await self._init_transfer(files, "did not accept the directory of weights")
                self._told = told
        half = f"engine server {self.url} may hold half of version {update.version} ({{}}); restart it"
        started_s = time.perf_counter()
        try:
            await self._pause("abort" if anew else "keep")
            try:
                await self._load(update)
            except WeightUpdateError:
                await self._resume()
                raise
            self._known = msgspec.structs.replace(info, version=update.version, checksum=update.checksum)
            self._holds_of = run, epoch
            await self._resume()
        except HalfUpdatedError as error:
            await self._give_up(error)
            raise
        except ServerError as error:
            failed = HalfUpdatedError(half.format(worker_error(error.problem)))
            await self._give_up(failed)
            raise failed from error
        except asyncio.CancelledError as error:
            error.add_note(half.format("the update was cancelled"))
            self._break(error)
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
                    f"engine server {self.url} may be paused for good: /pause failed ({worker_error(error.problem)}), "
                    f"and so did /resume ({worker_error(second.problem)}); restart it"
                ) from second
            raise self._refusal("did not pause", error) from error

    async def _load(self, update: WeightUpdateRequest) -> None:
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
        return WeightUpdateError(f"engine server {self.url} {what}: {worker_error(error.problem)}")

    async def _give_up(self, error: HalfUpdatedError) -> None:
        """Fail all requests, and use this process no more. Raises ServerUnreachableError if it has ended."""
        if await self._has_ended():
            self._may_have_restarted = True
            ended = ServerUnreachableError(self.url, "has ended during an update of its weights", refused=True)
            self._requests.fail_all(ended)
            raise ended from error
        self._break(error)

    def _break(self, error: BaseException) -> None:
        self._broken = f"can't be used since an update of its weights was interrupted ({error}); restart it"
        self._requests.fail_all(ServerError(self.url, self._broken))

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

    # ---- which process answers

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
