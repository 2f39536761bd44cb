"""The endpoints of the Tinker API: sessions, promises, and what clients ask of the learner and the sampler.

A POST that starts work answers with a promise, whose result `retrieve_future` returns when it is there. Ids follow from
those that the client counts, so that a repeated request is the same one.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pipelinerl.environments.user.code import in_daemon_thread
from pipelinerl.errors import CheckpointError, PipelineRLError, PromptTooLongError, RequestError
from pipelinerl.models.folder import resolve_path
from pipelinerl.serving.server.http import RefusedError, answer_of, body_of, check_stops, decoded, retrieve
from pipelinerl.serving.server.service import Service
from pipelinerl.serving.server.tinker import losses, wire
from pipelinerl.serving.server.tinker.learner import AdapterLearner, TrainedAdapter
from pipelinerl.serving.server.tinker.sampler import SampledFrom, Sampler, SamplerTarget
from pipelinerl.types import GenerationRequest, SamplingParams

T = TypeVar("T")
Json = dict[str, Any]
Result = bytes | Json
"""Of a promise: protobuf, or JSON."""

POLL_S = 20.0
"""`retrieve_future` answers after this time that there is no result yet. The SDK gives up after 45 s."""
SESSION_S = 600.0
"""A session without a heartbeat for so long has ended; the SDK sends one every 10 s."""
KEPT = 256
"""Retrieved results that can be retrieved again, since an answer may be lost; a session's."""
SNAPSHOTS_KEPT = 16
"""Sampling sessions with unnamed weights that a session may have; more end the oldest."""
SEQUENCES_KEPT = 65536
"""Sampled sequences whose weights can be asked for."""
WARNING = (
    "adapters are in the linear layers of attention and MLP; the output head has none, whatever train_unembed says. "
    "ttl_seconds is recorded, and nothing is deleted."
)

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class ClientSession:
    """All that ends with a session."""

    seen_s: float
    models: dict[str, TrainedAdapter] = field(default_factory=dict)
    samplers: dict[str, SamplerTarget] = field(default_factory=dict)
    inflight: dict[str, SamplerTarget] = field(default_factory=dict)
    snapshots: deque[str] = field(default_factory=deque)
    promises: dict[str, asyncio.Future[Result]] = field(default_factory=dict)
    retrieved: deque[str] = field(default_factory=deque)


class TinkerService:
    """The sessions of clients: `SESSION:train:N` is a session's model, `SESSION:sample:N` a sampling session."""

    def __init__(self, service: Service, learner: AdapterLearner) -> None:
        self._service, self._learner = service, learner
        self._sampler = Sampler(service)
        self._learning = asyncio.Lock()
        self._sessions: dict[str, ClientSession] = {}
        self._saved: dict[str, SamplerTarget] = {}
        self._base = SamplerTarget(service.name)
        self._weights: dict[str, Sequence[SampledFrom]] = {}
        self._open = 0

    def routes(self) -> list[Route]:
        gets = {"samplers/{id}": self.sampler, "sequences/{id}": self.sequence, "get_server_capabilities": self.capabilities}
        posts = {"client/config": self.client_config, "sessions/{id}/finish": self.finish_session}
        named = (self.telemetry, self.create_session, self.session_heartbeat, self.retrieve_future)
        training = (self.create_model, self.load_weights, self.get_info, self.forward_backward, self.optim_step)
        sampling = (self.save_weights, self.save_weights_for_sampler, self.create_sampling_session, self.asample)
        posts |= {one.__name__: one for one in (*named, *training, *sampling)}
        return [
            Route("/health", self._service.health),
            *(Route(f"/api/v1/{path}", method) for path, method in gets.items()),
            *(Route(f"/api/v1/{path}", method, methods=["POST"]) for path, method in posts.items()),
        ]

    # ---- about the server, and sessions

    async def capabilities(self, _: Request) -> Response:
        about = {"model_name": self._service.name, "max_context_length": self._service.loaded.engine.max_length}
        return answer_of({"supported_models": [about | {"trainable": True, "sampleable": True}]})

    async def client_config(self, _: Request) -> Response:
        """The parts of a batch come one after the other, so in their order, and uncompressed."""
        return answer_of({"parallel_fwdbwd_chunks": False, "proto_compress_fwdbwd": False})

    async def telemetry(self, request: Request) -> Response:
        await body_of(request)  # which is dropped
        return answer_of({"status": "accepted"})

    async def create_session(self, _: Request) -> Response:
        now_s = time.monotonic()
        for name in [name for name, one in self._sessions.items() if now_s - one.seen_s > SESSION_S]:
            self._end(name)
        self._sessions[name := secrets.token_hex(8)] = ClientSession(now_s)
        return answer_of({"session_id": name, "warning_message": WARNING})

    async def session_heartbeat(self, request: Request) -> Response:
        self._session((await _named(request)).session_id).seen_s = time.monotonic()
        return answer_of({})

    async def finish_session(self, request: Request) -> Response:
        self._session(name := request.path_params["id"])
        self._end(name)
        return answer_of({})

    def _session(self, name: str) -> ClientSession:
        """The session with an id, or of a model, a sampling session or a promise."""
        if session := self._sessions.get(name.partition(":")[0]):
            return session
        raise RefusedError("not_found", f"there is no session of {name!r}: it has ended, or the server was restarted")

    def _end(self, name: str) -> None:
        for promise, task in self._sessions.pop(name).promises.items():
            if ":sample:" in promise:  # what the learner has begun can't be interrupted
                task.cancel()
        used = {target for session in self._sessions.values() for target in session.samplers.values()}
        self._saved = {path: target for path, target in self._saved.items() if target in used}

    # ---- promises

    def _promise(self, name: str, start: Callable[[], Awaitable[Result]], **about: Any) -> Response:
        """Start work, unless a request with this id has, and answer with the promise."""
        promises = self._session(name).promises
        if name not in promises:
            promises[name] = asyncio.ensure_future(start())
            promises[name].add_done_callback(retrieve)
        return answer_of({"request_id": name} | about)

    async def retrieve_future(self, request: Request) -> Response:
        session = self._session(name := (await _named(request)).request_id)
        if (promise := session.promises.get(name)) is None:
            raise RefusedError("not_found", f"there is no request {name}, or it was retrieved long ago")
        await asyncio.wait([promise], timeout=POLL_S)
        if not promise.done():
            waiting = {"type": "try_again", "request_id": name, "queue_state": "active"}
            return Response(msgspec.json.encode(waiting), 408, media_type="application/json")
        if name not in session.retrieved:
            session.retrieved.append(name)
        if len(session.retrieved) > KEPT:
            del session.promises[session.retrieved.popleft()]
        try:
            found = promise.result()
        except asyncio.CancelledError:
            return answer_of({"error": "the request was cancelled", "category": "user"})
        except PipelineRLError as error:
            user = isinstance(error, RequestError | CheckpointError)
            return answer_of({"error": str(error), "category": "user" if user else "server"})
        except Exception as error:  # noqa: BLE001 - the boundary of a request: its client gets the error
            _log.exception("a request failed")
            return answer_of({"error": f"internal error: {type(error).__name__}: {error}", "category": "server"})
        return Response(found, media_type=wire.PROTOBUF) if isinstance(found, bytes) else answer_of(found)

    # ---- training

    def _train(self, model_id: str, seq_id: int, call: Callable[[], Result]) -> Response:
        return self._promise(f"{model_id}:{seq_id}", partial(self._learn, call), model_id=model_id)

    async def _learn(self, call: Callable[[], T]) -> T:
        """What `call` returns, from a thread of its own, one after the other in the order of requests."""
        async with self._learning:
            return await asyncio.wrap_future(in_daemon_thread(call))

    def _model(self, model_id: str) -> TrainedAdapter:
        if trained := self._session(model_id).models.get(model_id):
            return trained
        raise RefusedError("not_found", f"there is no model {model_id}")

    def _create(self, wanted: wire.Create, base: str | None, make: Callable[[], TrainedAdapter]) -> Response:
        self._check_base(base)
        models, model_id = self._session(wanted.session_id).models, f"{wanted.session_id}:train:{wanted.model_seq_id}"

        def call() -> Json:
            models[model_id] = make()
            return {"model_id": model_id}

        return self._train(model_id, 0, call)

    def _check_base(self, name: str | None) -> None:
        if name != self._service.name:
            raise RequestError(f"there is no base model {name!r} here; this server has {self._service.name!r}")

    async def create_model(self, request: Request) -> Response:
        wanted = decoded(await body_of(request), wire.Create)
        lora = wanted.lora_config
        if lora is None or not lora.train_mlp or not lora.train_attn:
            raise RequestError("lora_config: only adapters are trained here, with both train_mlp and train_attn")
        return self._create(wanted, wanted.base_model, partial(self._learner.create, lora.rank, lora.seed))

    async def load_weights(self, request: Request) -> Response:
        """A new model from a path, or other weights for a model. The base model is the one that it was saved with."""
        wanted = decoded(await body_of(request), wire.Create)
        base = wanted.base_model or self._learner.state_of(wanted.path).base_model
        load = partial(self._learner.load, wanted.path, optimizer=wanted.optimizer)
        if not wanted.model_id:
            return self._create(wanted, base, load)
        self._check_base(base)
        trained = self._model(wanted.model_id)

        def call() -> Json:
            vars(trained).update(vars(load()))  # in place: requests that came before the load ends are for this model
            return {"path": wanted.path}

        return self._train(wanted.model_id, wanted.seq_id, call)

    async def get_info(self, request: Request) -> Response:
        trained, name = self._model(model_id := (await _named(request)).model_id), self._service.name
        folder = Path(resolve_path(self._service.model_path))
        data = {"model_name": name, "tokenizer_id": str(folder.resolve() if folder.is_dir() else folder)}
        about = {"model_id": model_id, "is_lora": True, "lora_rank": trained.rank, "model_name": name}
        return answer_of({"model_data": data} | about)

    async def forward_backward(self, request: Request) -> Response:
        wanted = wire.read_forward_backward(await body_of(request))
        trained, loaded = self._model(wanted.model_id), self._service.loaded
        losses.check(wanted, loaded.vocabulary, loaded.engine.max_length)

        def call() -> bytes:
            logprobs, loss = self._learner.forward_backward(trained, wanted)
            return wire.forward_backward_output(logprobs, {"loss:sum": loss})

        return self._train(wanted.model_id, wanted.seq_id, call)

    async def optim_step(self, request: Request) -> Response:
        wanted = decoded(await body_of(request), wire.OptimStep)
        trained, adam = self._model(wanted.model_id), wanted.adam_params
        return self._train(wanted.model_id, wanted.seq_id, lambda: {"metrics": self._learner.optim_step(trained, adam)})

    # ---- saved weights

    async def save_weights(self, request: Request) -> Response:
        return self._save(decoded(await body_of(request), wire.SaveWeights), "weights")

    def _save(self, wanted: wire.SaveWeights, kind: str) -> Response:
        trained, path = self._model(wanted.model_id), f"tinker://{wanted.model_id}/{kind}/{wanted.path}"
        self._learner.folder_of(path)
        about = {"ttl_seconds": wanted.ttl_seconds, "user_metadata": wanted.user_metadata, "base_model": self._service.name}

        def call() -> Json:
            self._learner.save(trained, path, optimizer=kind == "weights", overwrite=wanted.overwrite, **about)
            return {"path": path}

        return self._train(wanted.model_id, wanted.seq_id, call)

    async def save_weights_for_sampler(self, request: Request) -> Response:
        """By name, or for one new sampling session: `snapshot`, or `inflight`, which follows later ones of the model."""
        wanted = decoded(await body_of(request), wire.SaveWeights)
        if wanted.sampling_session_seq_id is None:
            return self._save(wanted, "sampler_weights")
        session, trained = self._session(wanted.model_id), self._model(model := wanted.model_id)
        name = f"{model.partition(':')[0]}:sample:{wanted.sampling_session_seq_id}"

        async def keep() -> Json:
            adapter, version = await self._learn(lambda: (deepcopy(trained.adapter), trained.version))
            target = SamplerTarget(model, adapter, version)
            if wanted.kind == "inflight":
                target = session.inflight.setdefault(model, target)
                await self._sampler.publish(target, adapter, version)
            else:
                session.snapshots.append(name)
            session.samplers[name] = target
            if len(session.snapshots) > SNAPSHOTS_KEPT:
                del session.samplers[session.snapshots.popleft()]
            return {"sampling_session_id": name}

        return self._promise(f"{model}:{wanted.seq_id}", keep, model_id=model)

    # ---- sampling

    async def create_sampling_session(self, request: Request) -> Response:
        wanted = decoded(await body_of(request), wire.Create)
        session, path = self._session(wanted.session_id), wanted.model_path
        name = f"{wanted.session_id}:sample:{wanted.sampling_session_seq_id}"
        self._check_base(self._learner.state_of(path).base_model if path else wanted.base_model)
        if path and path not in self._saved:
            loaded = await self._learn(partial(self._learner.load, path, optimizer=False))
            self._saved.setdefault(path, SamplerTarget(path, loaded.adapter, loaded.version))
        session.samplers[name] = self._saved[path] if path else self._base
        return answer_of({"sampling_session_id": name})

    def _target(self, name: str) -> SamplerTarget:
        if target := self._session(name).samplers.get(name):
            return target
        raise RefusedError(
            "not_found",
            f"there is no sampling session {name}, or there are {SNAPSHOTS_KEPT} newer ones with unnamed weights: "
            "save_weights_for_sampler(NAME) keeps weights",
        )

    async def sampler(self, request: Request) -> Response:
        target = self._target(name := request.path_params["id"])
        path = {"model_path": target.name} if target.name in self._saved else {}
        return answer_of({"sampler_id": name, "base_model": self._service.name} | path)

    async def sequence(self, request: Request) -> Response:
        """Which weights sampled a sequence: the SDK does not ask, and its answers can't say."""
        if (found := self._weights.get(name := request.path_params["id"])) is None:
            raise RefusedError("not_found", f"there is no sequence {name} among the latest {SEQUENCES_KEPT}")
        return answer_of({"weights": [one._asdict() for one in found]})

    async def asample(self, request: Request) -> Response:
        wanted = decoded(await body_of(request), wire.Sample)
        target, count = self._target(wanted.sampling_session_id), wanted.num_samples
        generated, stops = self._request(wanted)
        if count > (most := self._service.engine.most_requests):
            raise RequestError(f"num_samples: 1 to {most} (--engine.slots and --max-queue)")
        ids = [f"{generated.id}:{index}" for index in range(count)]

        def start() -> Awaitable[bytes]:
            if self._open + count > most:
                raise RefusedError("overloaded", f"{self._open} sequences are open: try again later")
            self._open += count
            promise = asyncio.create_task(work())
            promise.add_done_callback(lambda _: setattr(self, "_open", self._open - count))
            return promise

        async def work() -> bytes:
            sequences, logprobs = await self._sampler.sample(target, generated, count, stops, wanted.prompt_logprobs)
            self._weights |= zip(ids, (one.weights for one in sequences), strict=True)
            while len(self._weights) > SEQUENCES_KEPT:
                del self._weights[next(iter(self._weights))]
            return wire.sample_response(sequences, [math.nan, *logprobs] if wanted.prompt_logprobs else [])

        return self._promise(generated.id, start, sample_sequence_ids=ids)

    def _request(self, wanted: wire.Sample) -> tuple[GenerationRequest, tuple[str, ...]]:
        """The engine's request, and stop strings. Raises RequestError."""
        if wanted.record_stability_info:
            raise RequestError("record_stability_info: there is no stable_reinforce here; take importance_sampling")
        prompt_ids = tuple(token for chunk in wanted.prompt["chunks"] for token in chunk.tokens)
        given, loaded = wanted.sampling_params, self._service.loaded
        stops = (given.stop,) if isinstance(given.stop, str) else given.stop
        strings = tuple(one for one in stops or () if isinstance(one, str))
        check_stops(strings)
        ids = (*(one for one in stops or () if isinstance(one, int)), *(() if stops == () else loaded.stop_token_ids))
        room = loaded.engine.max_length - len(prompt_ids)
        if room < 1:
            raise PromptTooLongError(f"a prompt of {len(prompt_ids)} tokens leaves no room within engine.max_length")
        sampling = SamplingParams(
            max_tokens=room if given.max_tokens is None else given.max_tokens,
            temperature=given.temperature,
            top_p=given.top_p,
            top_k=max(given.top_k, 0),
            stop_token_ids=tuple(dict.fromkeys(ids)),
            seed=given.seed,
        )
        name = f"{wanted.sampling_session_id}:{wanted.seq_id}"
        return GenerationRequest(id=name, prompt_ids=prompt_ids, sampling=sampling), strings


async def _named(request: Request) -> wire.Named:
    return decoded(await body_of(request), wire.Named)
