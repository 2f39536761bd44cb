"""The service: the loaded model, its engine, weight updates, one at a time, and our own endpoints (messages: `wire`).

An update is verified while the engine runs, then applied between two tokens.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from torch import Tensor

from pipelinerl.config.schema import TrainerConfig
from pipelinerl.engine import LocalEngine
from pipelinerl.errors import RequestError, WeightUpdateError
from pipelinerl.interfaces import Tokenizer, WeightUpdate
from pipelinerl.models.attention import choose_attention
from pipelinerl.models.encoding import vocabulary_digest
from pipelinerl.models.loading import load_model, load_tokenizer, slot_length, stop_token_ids
from pipelinerl.models.packed import ATTENTION_NAME
from pipelinerl.models.state import checksum, first_names, named_weights
from pipelinerl.serving.incoming import IncomingWeights
from pipelinerl.serving.server.http import (
    RefusedError,
    StreamedResponse,
    answer_of,
    body_of,
    decoded,
    json_line,
    unless_gone,
)
from pipelinerl.serving.server.served import ServedEngine, ServedRequest
from pipelinerl.serving.wire import (
    CompletionLine,
    ProcessGroupRequest,
    ScoreRequest,
    Scores,
    ServerInfo,
    TokenLine,
    WeightUpdateRequest,
)
from pipelinerl.types import GenerationRequest, Segment, UpdateReceipt

if TYPE_CHECKING:
    from pipelinerl.serving.server.run import ServeOptions
    from pipelinerl.serving.server.tinker.learner import AdapterLearner
    from pipelinerl.trainer.logprobs import FrozenModelScorer


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model in an engine. `weights`: the engine's own tensors by name. `learner`: a Tinker server's; has another copy."""

    engine: LocalEngine
    model: Any
    tokenizer: Tokenizer
    weights: Mapping[str, Tensor]
    vocabulary: int
    stop_token_ids: tuple[int, ...]
    learner: AdapterLearner | None = None


def load(options: ServeOptions, model: Any = None, tokenizer: Any = None, *, flatten: bool = True) -> LoadedModel:
    """Load the model, unless it is given, and create its engine; takes seconds to minutes. `flatten`: see `LocalEngine`.

    Raises ModelLoadError and UnsupportedModelError.
    """
    wanted = options.engine
    if wanted.threads is not None or options.train is not None:  # engine and learner share the cores
        torch.set_num_threads(wanted.threads or max(1, torch.get_num_threads() // 2))
    tokenizer = tokenizer or load_tokenizer(options.model)
    model = model or load_model(options.model, wanted.device)
    engine = LocalEngine(
        model,
        slots=wanted.slots,
        max_length=slot_length(model, wanted.max_length),
        prefill_tokens=wanted.prefill_tokens,
        kv_on_update=wanted.kv_on_update,
        name=options.name,
        flatten=flatten,
    )
    learner = None
    if options.train is not None:
        from pipelinerl.serving.server.tinker.learner import AdapterLearner  # noqa: PLC0415 - few servers train

        trainer = TrainerConfig(device=wanted.device)
        learner = AdapterLearner(load_model(options.model, wanted.device), options.train, trainer)
    return LoadedModel(
        engine=engine,
        model=model,
        tokenizer=tokenizer,
        weights=named_weights(model),
        vocabulary=model.get_input_embeddings().weight.shape[0],
        stop_token_ids=stop_token_ids(model, tokenizer, wanted.max_length),
        learner=learner,
    )


class WeightUpdates:
    """Applies weight updates from files or the trainer's broadcast.

    `held`: the engine's own tensors. Files are read only from `directories`.
    """

    def __init__(self, engine: ServedEngine, held: Mapping[str, Tensor], directories: Sequence[Path]) -> None:
        self._engine, self._held = engine, held
        self._incoming = IncomingWeights(next(iter(held.values())).device, directories)
        self._lock = asyncio.Lock()
        version, digest = engine.holding
        self._last = UpdateReceipt(engine=engine.name, version=version, checksum=digest, pause_s=0.0, sequences_in_flight=0)
        self._begins = False  # no weights of this epoch have been applied yet

    async def join(self, request: ProcessGroupRequest) -> None:
        """Join the trainer's broadcast as a receiver; leaves a group that was joined before.

        Raises WeightUpdateError if the group is not formed in time, or for an epoch that was replaced; both leave the group
        as it was.
        """
        async with self._lock:
            begins = self._incoming.begins(request)
            group = self._incoming.connect(request, self._engine.name)
            try:
                await asyncio.to_thread(group.wait_joined, request.timeout_s)
            except BaseException:  # also if the client has gone
                await asyncio.to_thread(group.close)
                raise
            await asyncio.to_thread(self._incoming.join, request, group)
            self._begins = self._begins or begins

    async def close(self) -> None:
        """Leave the process group, if there is one."""
        async with self._lock:
            await asyncio.to_thread(self._incoming.close)

    async def take(self, request: WeightUpdateRequest) -> UpdateReceipt:
        """Read the update, or take what was received, and apply it; returns the engine's receipt.

        If the engine already holds these weights, returns their receipt again: a client may repeat a request whose answer
        was lost. Versions must increase; only the first update may repeat the loaded model's version. The first weights of
        an epoch may have any version, and end all requests. Raises RefusedError (version, no engine) and WeightUpdateError
        (epoch, invalid weights).
        """
        async with self._lock:
            begins = self._incoming.begins(request) or self._begins
            holding = self._engine.holding
            if (request.version, request.checksum) != holding or (begins and self._engine.open_requests):
                newest, loaded = holding.version, not self._engine.progress.weight_updates
                if not begins and (request.version < newest or (request.version == newest and not loaded)):
                    raise RefusedError(
                        "stale_version",
                        f"version {request.version} is not newer than version {newest}, which this server holds; another "
                        "session has an `epoch` of its own",
                    )
                update = await asyncio.to_thread(self._fetch, request)
                self._last = await self._engine.update(update, begins=begins)
            await asyncio.to_thread(self._incoming.applied, request)
            self._begins = False
            return self._last

    def _fetch(self, request: WeightUpdateRequest) -> WeightUpdate:
        """The verified update. Its names and shapes are checked when it is loaded; the engine would convert its types."""
        update = self._incoming.fetch(request, first_names(self._held))
        for name, tensor in update.tensors.items():
            if name in self._held and tensor.dtype != self._held[name].dtype:
                raise WeightUpdateError(
                    f"{name} is {tensor.dtype}, in the engine it is {self._held[name].dtype}: nothing was changed (types: "
                    "see --model.dtype)"
                )
        return update


class Service:
    """All parts of a running server, and its own endpoints. Starts the engine's thread.

    Used only in the event loop that it was created in.
    """

    def __init__(self, loaded: LoadedModel, options: ServeOptions) -> None:
        self.name = options.name
        self.loaded = loaded
        self.engine = ServedEngine(loaded.engine, options.max_queue, lambda: checksum(loaded.weights))
        self.updates = WeightUpdates(self.engine, loaded.weights, options.weight_directories)
        self._created = int(time.time())
        self.model_path = options.model.path
        self._instance = secrets.token_hex(8)
        self._vocabulary = vocabulary_digest(loaded.tokenizer)
        self._scorer: FrozenModelScorer | None = None
        self._budget = options.engine.prefill_tokens

    def routes(self) -> list[Route]:
        """Our own endpoints, and the list of models."""
        posts = (self.generate, self.score, self.request_weight_update, self.init_process_group)
        return [
            Route("/health", self.health),
            Route("/info", self.info),
            Route("/v1/models", self.models),
            *(Route(f"/{method.__name__}", method, methods=["POST"]) for method in posts),
        ]

    async def info(self, _: Request) -> Response:
        progress, holding = self.engine.progress, self.engine.holding
        return answer_of(
            ServerInfo(
                instance=self._instance,
                name=self.name,
                model=self.model_path,
                slots=self.loaded.engine.slots,
                max_length=self.loaded.engine.max_length,
                vocabulary=self.loaded.vocabulary,
                stop_token_ids=self.loaded.stop_token_ids,
                version=holding.version,
                checksum=holding.checksum,
                in_progress=progress.in_progress,
                queued=max(0, self.engine.open_requests - progress.in_progress),
                decode_steps=progress.decode_steps,
                vocabulary_digest=self._vocabulary,
            )
        )

    async def health(self, _: Request) -> Response:
        """200 while requests are accepted, else 503 with the reason."""
        if self.engine.refusing is not None:
            raise RefusedError("unavailable", self.engine.refusing)
        return answer_of({"status": "ready", "version": self.engine.holding.version})

    async def models(self, _: Request) -> Response:
        about = {"id": self.name, "object": "model", "created": self._created, "owned_by": "pipelinerl"}
        return answer_of({"object": "list", "data": [about | {"max_model_len": self.loaded.engine.max_length}]})

    async def generate(self, request: Request) -> Response:
        wanted = decoded(await body_of(request), GenerationRequest)
        with ExitStack() as stack:
            served = stack.enter_context(self.engine.following(wanted))
            if not wanted.stream:
                return answer_of(await unless_gone(request, served.completion()))
            await unless_gone(request, served.begun())  # refused requests get an error status, not a stream
            return StreamedResponse(_lines(served), stack.pop_all(), json_line, "application/x-ndjson")

    async def score(self, request: Request) -> Response:
        """The log-probabilities of given tokens, for a student of this model."""
        wanted = decoded(await body_of(request), ScoreRequest)
        for segment in wanted.segments:
            check_score(segment, self.loaded.vocabulary, self.loaded.engine.max_length)
        scores = self.engine.between_steps(lambda: self.scores(wanted.segments))
        return answer_of(Scores(await unless_gone(request, scores)))

    def scores(self, segments: Sequence[Segment]) -> list[list[float]]:
        """Computed in the engine's thread with the trainer's attention; the engine's is in place again afterwards."""
        model = self.loaded.model
        own = model.config._attn_implementation
        try:
            packed = self._scorer is not None and not self._scorer.padded
            choose_attention(model, ATTENTION_NAME if packed else "eager")
            if self._scorer is None:
                from pipelinerl.trainer.logprobs import FrozenModelScorer  # noqa: PLC0415 - few servers teach

                self._scorer = FrozenModelScorer(model, temperature=1.0, micro_batch_tokens=self._budget)
            return self._scorer.score(segments)
        finally:
            choose_attention(model, own)

    async def request_weight_update(self, request: Request) -> Response:
        return answer_of(await self.updates.take(decoded(await body_of(request), WeightUpdateRequest)))

    async def init_process_group(self, request: Request) -> Response:
        """Answers once the trainer and all its receivers have formed the group. Gives up if the client leaves before."""
        wanted = decoded(await body_of(request), ProcessGroupRequest)
        await unless_gone(request, self.updates.join(wanted))
        return answer_of({})


def check_score(segment: Segment, vocabulary: int, longest: int) -> None:
    """Raises RequestError for a segment that the model can't score."""
    ids, edges = segment.token_ids, [edge for edges in segment.sampled for edge in edges]
    if not ids or len(ids) > longest or min(ids) < 0 or max(ids) >= vocabulary:
        raise RequestError(f"token_ids: 1 to {longest} ids from 0 to {vocabulary - 1} are scored")
    empty = any(start >= end for start, end in segment.sampled)
    if empty or edges != sorted(edges) or (edges and (edges[0] < 1 or edges[-1] > len(ids))):
        raise RequestError(f"sampled: ranges of positions from 1 to {len(ids)}, in order, are scored")


async def _lines(served: ServedRequest) -> AsyncGenerator[bytes]:
    async for batch in served.batches():
        yield b"".join(json_line(TokenLine(token=event)) for event in batch)
    yield json_line(CompletionLine(completion=await served.completion()))
