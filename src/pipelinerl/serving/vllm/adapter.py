"""One vLLM server as an engine: generation through its token API, weight updates in flight through its RL API.

    generate            /inference/v1/generate
    update_weights      /pause, /start_weight_update, /update_weights, /finish_weight_update, /resume
                        vLLM then loads the file, or the received broadcast, through our backend (`plugin`)
    info                /server_info, /weight_info

Differences to our own server: vLLM is sent no seed, and does not report which weights computed a prompt's KV entries, so
completions have no `prompt_versions`.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import Any, NamedTuple

import msgspec

from pipelinerl.config.schema import ModelConfig
from pipelinerl.errors import INVALID_DATA, RequestError, WeightUpdateError
from pipelinerl.models.contract import read_contract
from pipelinerl.serving.client.adapter import ServerBusyError, ServerError, ServerUnreachableError, TokenListener
from pipelinerl.serving.client.http import HttpClient, RefusalError
from pipelinerl.serving.vllm.messages import (
    REFUSED,
    UNLABELLED,
    Choice,
    Choices,
    InvalidAnswerError,
    Label,
    PauseState,
    ServerDescription,
    TokenLogprob,
    VllmConfig,
    WeightLabel,
    completion_of,
    generate_body,
    worker_error,
)
from pipelinerl.serving.wire import ProcessGroupRequest, ServerInfo, WeightUpdateRequest
from pipelinerl.types import Completion, GenerationRequest, TokenEvent, UpdateReceipt, versions_from_spans

GENERATE = "/inference/v1/generate"
TIMEOUT_S = 10.0
"""For each short call."""
UPDATE_TIMEOUT_S = 300.0
"""For reading the file, if there is one, and loading."""


class ModelFacts(NamedTuple):
    """What vLLM does not report over HTTP. `vocabulary`: its size. The others: see `models.contract.Contract`."""

    vocabulary: int
    stop_token_ids: tuple[int, ...]
    notes: tuple[str, ...] = ()


def model_facts(path: str) -> ModelFacts:
    """Read the facts from the model's folder, without weights. Raises ModelLoadError without a model or tokenizer."""
    from pipelinerl.models.loading import load_config, load_tokenizer  # noqa: PLC0415 - takes seconds

    named = ModelConfig(path=path)
    model = load_config(named)
    return ModelFacts(int(model.config.get_text_config().vocab_size), *read_contract(model, load_tokenizer(named)))


class VllmServer:
    """One vLLM server; implements `EngineServer`. No other client may update its weights.

    `facts`: read from the model's folder if not given. `run` and `epoch`: see `WeightUpdateRequest`.
    """

    def __init__(
        self, url: str, *, facts: ModelFacts | None = None, api_key: str | None = None, run: str = "", epoch: int = 0
    ) -> None:
        self._http = HttpClient(url, api_key=api_key)
        self.url = self._http.url
        self._facts = facts
        self._run, self._epoch = run, epoch
        self._session = (run, epoch) if run else None
        self._holds_of = ("", 0)  # the session of the weights that it holds
        self._attaching = asyncio.Lock()
        self._updating = asyncio.Lock()
        self._known: ServerInfo | None = None  # of the current server process
        self._may_have_restarted = False  # whether another process may answer now
        self._broken = ""  # why the current process can't be used any more
        self._in_flight: set[asyncio.Task[Completion]] = set()

    async def info(self) -> ServerInfo:
        """See `EngineServer`. `in_progress` and `queued` count only this client's requests.

        During an update the known state is returned, without asking the server.
        """
        info = self._known if self._updating.locked() and not self._broken else None
        if info is None:
            info = await self._attach()
        in_progress = min(len(self._in_flight), info.slots)
        return msgspec.structs.replace(info, in_progress=in_progress, queued=len(self._in_flight) - in_progress)

    async def close(self) -> None:
        await self._http.close()

    # ---- requests

    async def generate(self, request: GenerationRequest, on_token: TokenListener | None = None) -> Completion:
        task = asyncio.ensure_future(self._exchange(request, on_token))
        self._in_flight.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            waiting = asyncio.current_task()
            if waiting is not None and waiting.cancelling():
                raise  # the caller was cancelled, which has also closed the connection
            raise ServerUnreachableError(self.url, self._broken) from None
        except ServerUnreachableError:
            self._may_have_restarted = True
            raise
        except InvalidAnswerError as error:
            raise ServerError(self.url, f"gave a completion that can't be used: {error}") from error
        except RefusalError as error:
            if error.status != 400:
                raise
            raise RequestError(f"vLLM refused request {request.id!r}: {worker_error(error.detail)}") from error
        finally:
            self._in_flight.discard(task)

    async def _exchange(self, request: GenerationRequest, on_token: TokenListener | None) -> Completion:
        info = self._known
        if info is None or self._may_have_restarted:
            info = await self._attach(again=False)
        body = generate_body(request, info.max_length)
        streamed: list[TokenEvent] = []
        if request.stream:
            tokens, end = await self._stream(body, streamed, on_token)
        else:
            end = (await self._http.ask("POST", GENERATE, Choices, body)).only
            tokens = end.tokens
        if any(span.version == UNLABELLED for span in end.weight_versions or ()):
            raise ServerUnreachableError(self.url, "was restarted: its weights have no version label")
        if end.finish_reason == "abort":
            raise ServerBusyError(self.url, f"aborted request {request.id!r} (is it shutting down?)")
        completion = completion_of(request, tokens, end, self._session)
        for event, version in zip(streamed, versions_from_spans(completion.weight_versions, len(tokens)), strict=False):
            if event.version != version:
                raise RequestError(
                    f"token {event.index} of request {request.id!r} was streamed as version {event.version}, but is of "
                    f"version {version}: vLLM took longer to report it than to change its weights"
                )
        return completion

    async def _stream(
        self, body: dict[str, Any], streamed: list[TokenEvent], on_token: TokenListener | None
    ) -> tuple[list[TokenLogprob], Choice]:
        """Return all tokens and the last choice. Each token is reported on arrival, with the version that vLLM then holds.

        vLLM itself reports versions only at the end. An update pauses it for much longer than a token takes to arrive, so
        the versions reported here are right; `_exchange` verifies that.
        """
        tokens: list[TokenLogprob] = []
        async with aclosing(self._http.lines(GENERATE, body)) as lines:
            async for line in lines:
                if not line.startswith(b"data:") or (data := line[5:].strip()) == b"[DONE]":
                    continue
                try:
                    choice = msgspec.json.decode(data, type=Choices).only
                except INVALID_DATA as error:
                    if b'"error"' in data:
                        raise self._http.error_of(500, data) from error
                    raise self._http.malformed(str(error), data) from error
                for token in choice.tokens:
                    version = self._known.version if self._known else 0
                    event = TokenEvent(body["request_id"], len(tokens), token.token_id, token.logprob, version)
                    streamed.append(event)
                    tokens.append(token)
                    if on_token is not None:
                        on_token(event)
                if choice.finish_reason is not None:
                    return tokens, choice
        raise ServerUnreachableError(self.url, "broke off a stream before its completion")

    # ---- weights

    async def join_broadcast(self, group: ProcessGroupRequest) -> None:
        async with self._updating:
            await self._attach()
            info = msgspec.structs.replace(group, run=self._run, epoch=self._epoch)
            bound_s = TIMEOUT_S + group.timeout_s  # vLLM's worker generates nothing until all receivers have joined
            try:
                await self._post("/init_weight_transfer_engine", {"init_info": info}, timeout_s=bound_s)
            except ServerError as error:
                raise self._refusal("did not join the trainer's broadcast", error) from error

    async def update_weights(self, update: WeightUpdateRequest) -> UpdateReceipt:
        """See `EngineServer`. After a refused update the old weights are in place and generation continues.

        If the update may be incomplete, vLLM stays paused, requests in progress fail, and new ones are refused: the weights
        may belong to no version. The first update of a session may have any version, and ends all requests.
        """
        async with self._updating:
            info = await self._attach()
            begins = self._session not in (None, self._holds_of)
            if update.version < info.version and not begins:
                raise WeightUpdateError(
                    f"version {update.version} is older than the {info.version} of {self.url}; nothing was changed"
                )
            in_flight = len(self._in_flight)
            pause_s = 0.0
            if begins or (info.version, info.checksum) != (update.version, update.checksum):
                pause_s = await self._replace(info, update, begins)
            return UpdateReceipt(
                engine=self.url,
                version=update.version,
                checksum=update.checksum,
                pause_s=pause_s,
                sequences_in_flight=in_flight,
            )

    async def _replace(self, info: ServerInfo, update: WeightUpdateRequest, begins: bool) -> float:
        """Replace all weights between two tokens. Returns the seconds from the pause until generation has resumed.

        `begins`: a session, so end all requests first. Raises WeightUpdateError if the old weights are in place and
        generation has resumed. Otherwise the server may hold a mixture of old and new weights, or stay paused: raises
        ServerUnreachableError, and uses this process no more.
        """
        update = msgspec.structs.replace(update, run=self._run, epoch=self._epoch)
        label = Label(update.version, self._run, self._epoch)
        started_s = time.perf_counter()
        try:
            step = "did not pause"
            try:  # `keep` keeps requests and their KV entries; versions of another session have other weights
                await self._post(f"/pause?mode={'abort&clear_cache=true' if begins else 'keep&clear_cache=false'}")
                step = "did not start an update"
                await self._post("/start_weight_update")
                step = "refused the weights"
                await self._post("/update_weights", {"update_info": update}, timeout_s=UPDATE_TIMEOUT_S)
            except ServerError as error:
                if step == "refused the weights" and not worker_error(error.problem).startswith(REFUSED):
                    raise
                await self._resume()
                raise self._refusal(step, error) from error
            await self._post("/finish_weight_update", {"weight_version": str(label)})
            self._known = msgspec.structs.replace(info, version=update.version, checksum=update.checksum)
            self._holds_of = label[1:]
            await self._resume()
        except (ServerError, asyncio.CancelledError) as error:
            why = worker_error(error.problem) if isinstance(error, ServerError) else "the update was cancelled"
            self._broken = f"may hold half of version {update.version}, whose update was interrupted ({why}); restart it"
            self._may_have_restarted = True
            for task in self._in_flight:  # they may be sent again: to another server, or a new process
                task.cancel()
            if isinstance(error, ServerError):
                raise ServerUnreachableError(self.url, self._broken) from error
            raise
        return time.perf_counter() - started_s

    async def _resume(self) -> None:
        """Have generation go on. A second try is safe, and needed: vLLM closes the connection of a call that it refused."""
        try:
            await self._post("/resume")
        except ServerError:
            await self._post("/resume")

    async def _post(self, path: str, body: object = None, *, timeout_s: float = TIMEOUT_S) -> None:
        await self._http.ask("POST", path, msgspec.Raw, body, timeout_s=timeout_s)

    def _refusal(self, what: str, error: ServerError) -> WeightUpdateError:
        return WeightUpdateError(f"engine server {self.url} {what}: {worker_error(error.problem)}")

    # ---- which process answers

    async def _attach(self, *, again: bool = True) -> ServerInfo:
        """Query the server and describe it. Unless `again`, a known description is returned if no restart is suspected.

        Raises ServerError if the server can't be used.
        """
        async with self._attaching:
            if self._known is None or again or self._may_have_restarted:
                path = "/server_info?config_format=json"
                config = (await self._http.ask("GET", path, ServerDescription, timeout_s=3 * TIMEOUT_S)).vllm_config
                label = (await self._http.ask("GET", "/weight_info", WeightLabel, timeout_s=TIMEOUT_S)).weight_version
                if self._known is None or self._known.instance != config.instance_id:
                    self._known = await self._attach_new(config, label)
            self._may_have_restarted = bool(self._broken)
            if self._broken:
                raise ServerUnreachableError(self.url, self._broken)
            return self._known

    async def _attach_new(self, config: VllmConfig, label: str) -> ServerInfo:
        """Check whether a new server process can be used. Weights without a label are of version 0.

        They get that label, unless a session is to update them: until it has, their tokens are of no use to it.
        """
        if found := config.problems():
            raise ServerError(self.url, f"can't be used as an engine: {'; '.join(found)}")
        if (await self._http.ask("GET", "/is_paused", PauseState, timeout_s=TIMEOUT_S)).is_paused:
            raise ServerError(self.url, "is paused: an update of its weights may have been interrupted; restart it")
        try:
            held = Label(0) if label == UNLABELLED else Label.of(label)
        except InvalidAnswerError as error:
            raise ServerError(self.url, f"is used by something else: its {error}") from error
        if label == UNLABELLED and self._session is None:
            await self._post("/update_weight_version", {"new_version": str(held)})
        model = config.model_config.model
        facts = await asyncio.to_thread(model_facts, model) if self._facts is None else self._facts
        self._broken, self._holds_of = "", held[1:]
        return ServerInfo(
            instance=config.instance_id,
            name="vllm",
            model=model,
            slots=config.scheduler_config.max_num_seqs,
            max_length=config.model_config.max_model_len,
            vocabulary=facts.vocabulary,
            stop_token_ids=facts.stop_token_ids,
            version=held.version,
            checksum="",
            in_progress=0,
            queued=0,
        )
