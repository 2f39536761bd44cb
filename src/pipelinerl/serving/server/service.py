"""The loaded model and the objects that the endpoints use: engine, grammars and weight updates."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from pipelinerl.interfaces import Tokenizer
from pipelinerl.models.loading import load_model, load_tokenizer, slot_length, stop_token_ids
from pipelinerl.models.state import checksum, named_weights
from pipelinerl.serving.server.constrained import Grammars, ServerEngine
from pipelinerl.serving.server.http import unavailable
from pipelinerl.serving.server.options import ServeOptions
from pipelinerl.serving.server.served import ServedEngine
from pipelinerl.serving.server.weights import WeightUpdates
from pipelinerl.serving.wire import ServerInfo


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model in an engine. `weights`: the engine's own tensors by name."""

    engine: ServerEngine
    tokenizer: Tokenizer
    weights: Mapping[str, torch.Tensor]
    slots: int
    max_length: int
    vocabulary: int
    stop_token_ids: tuple[int, ...]


def load(options: ServeOptions) -> LoadedModel:
    """Load the model and create its engine; takes seconds to minutes. Raises ModelLoadError and UnsupportedModelError."""
    if options.engine.threads is not None:
        torch.set_num_threads(options.engine.threads)
    tokenizer = load_tokenizer(options.model)
    return loaded_from(load_model(options.model, options.engine.device), tokenizer, options)


def loaded_from(model: Any, tokenizer: Any, options: ServeOptions, *, flatten: bool = True) -> LoadedModel:
    """The second half of `load`, for a model and tokenizer in memory. `flatten`: see `LocalEngine`."""
    max_length = slot_length(model, options.engine.max_length)
    engine = ServerEngine(
        model,
        slots=options.engine.slots,
        max_length=max_length,
        prefill_tokens=options.engine.prefill_tokens,
        kv_on_update=options.engine.kv_on_update,
        name=options.name,
        flatten=flatten,
    )
    return LoadedModel(
        engine=engine,
        tokenizer=tokenizer,
        weights=named_weights(model),
        slots=options.engine.slots,
        max_length=max_length,
        vocabulary=model.get_input_embeddings().weight.shape[0],
        stop_token_ids=stop_token_ids(model, tokenizer, options.engine.max_length),
    )


class Service:
    """All parts of a running server. Starts the engine's thread. Used only in the event loop that it was created in."""

    def __init__(self, loaded: LoadedModel, options: ServeOptions) -> None:
        self.name = options.name
        self.loaded = loaded
        self.engine = ServedEngine(
            loaded.engine,
            name=options.name,
            slots=loaded.slots,
            max_queue=options.max_queue,
            held=lambda: checksum(loaded.weights),
        )
        self.updates = WeightUpdates(self.engine, loaded.weights, options.weight_directories)
        self.created = int(time.time())
        self._model = options.model.path
        self._instance = secrets.token_hex(8)

    def info(self) -> ServerInfo:
        progress, holding = self.engine.progress, self.engine.holding
        return ServerInfo(
            instance=self._instance,
            name=self.name,
            model=self._model,
            slots=self.loaded.slots,
            max_length=self.loaded.max_length,
            vocabulary=self.loaded.vocabulary,
            stop_token_ids=self.loaded.stop_token_ids,
            version=holding.version,
            checksum=holding.checksum,
            in_progress=progress.in_progress,
            queued=max(0, self.engine.open_requests - progress.in_progress),
            decode_steps=progress.decode_steps,
        )

    @cached_property
    def grammars(self) -> Grammars:
        """For constrained answers. Raises RequestError."""
        return Grammars(self.loaded.tokenizer, self.loaded.vocabulary, self.loaded.stop_token_ids)


class ServiceHolder:
    """Holds the service once the model is loaded."""

    def __init__(self) -> None:
        self._service: Service | None = None

    def open(self, service: Service) -> None:
        self._service = service

    @property
    def service(self) -> Service:
        """Raises RefusedError while the model is being loaded."""
        if self._service is None:
            raise unavailable("the server is starting: the model is being loaded")
        return self._service
