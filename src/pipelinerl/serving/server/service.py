"""What the endpoints reach for, once the model is loaded."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pipelinerl.engine import LocalEngine
from pipelinerl.errors import PromptTooLongError, RequestError
from pipelinerl.interfaces import Tokenizer
from pipelinerl.models.loading import load_model, load_tokenizer, slot_length, stop_token_ids
from pipelinerl.models.state import checksum, named_weights
from pipelinerl.serving.server.engine_thread import EngineThread
from pipelinerl.serving.server.exchange import Exchange, OncePerId
from pipelinerl.serving.server.http import unavailable
from pipelinerl.serving.server.options import ServeOptions
from pipelinerl.serving.server.weights import WeightUpdates
from pipelinerl.serving.wire import ServerInfo

# ------------------------------------------------------------------------------------------------------------------------
# From what a client sends to the ids of a prompt.


_CHARACTERS_A_TOKEN = 128
"""More than any tokenizer puts into one on average: a longer text can't fit, and is not worth the time to encode it."""
_LONG = 20_000
"""Characters that take more than some milliseconds."""

DEFAULT_OPTIONS: Mapping[str, Any] = {"add_generation_prompt": True}
"""A prompt goes up to where the model's turn begins."""


class Prompts:
    """Encodes texts and chats for a model whose sequences have at most `max_length` tokens."""

    def __init__(self, tokenizer: Tokenizer, max_length: int) -> None:
        self._tokenizer = tokenizer
        self._max_length = max_length

    async def of_text(self, text: str) -> tuple[int, ...]:
        """With the special tokens that the model expects around it. Raises RequestError."""
        return await self._encode(text, add_special_tokens=True)

    async def of_chat(
        self, messages: Sequence[dict[str, str]], options: Mapping[str, Any] = DEFAULT_OPTIONS
    ) -> tuple[int, ...]:
        """In the model's chat template, with these arguments of `apply_chat_template`. Raises RequestError."""
        if not getattr(self._tokenizer, "chat_template", None):
            raise RequestError("this model's tokenizer has no chat template: use /v1/completions with a plain prompt")
        self._check_size(sum(len(message["content"]) for message in messages))
        try:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
        except Exception as error:  # the template is a program of the model's, which raises what it likes
            raise RequestError(f"messages: the model's chat template refuses them: {error}") from error
        return await self._encode(str(text), add_special_tokens=False)

    async def _encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        self._check_size(len(text))
        if len(text) > _LONG:
            return await asyncio.to_thread(self._encode_now, text, add_special_tokens)
        return self._encode_now(text, add_special_tokens)

    def _encode_now(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        try:
            return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
        except Exception as error:  # tokenizers raise plain exceptions for characters they don't have
            raise RequestError(f"the model's tokenizer can't encode the prompt: {error}") from error

    def _check_size(self, characters: int) -> None:
        if characters > self._max_length * _CHARACTERS_A_TOKEN:
            raise PromptTooLongError(f"a prompt of {characters} characters can't fit into {self._max_length} tokens")


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model in an engine, whose thread is not started yet. `weights` are the engine's own tensors by name."""

    engine: EngineThread
    tokenizer: Tokenizer
    weights: Mapping[str, torch.Tensor]
    slots: int
    max_length: int
    vocabulary: int
    stop_token_ids: tuple[int, ...]


def load(options: ServeOptions) -> Loaded:
    """Load the model and make its engine: seconds to minutes. Raises ModelLoadError and UnsupportedModelError."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    tokenizer = load_tokenizer(options.model)
    return loaded_from(load_model(options.model, options.device), tokenizer, options)


def loaded_from(model: Any, tokenizer: Any, options: ServeOptions, *, flatten: bool = True) -> Loaded:
    """As `load` does it, from a model and its tokenizer; `flatten` as in `LocalEngine`."""
    max_length = slot_length(model, options.max_length)
    engine = LocalEngine(
        model,
        slots=options.slots,
        max_length=max_length,
        prefill_tokens=options.prefill_tokens,
        kv_on_update=options.kv_on_update,
        name=options.name,
        flatten=flatten,
    )
    weights = named_weights(model)
    thread = EngineThread(
        engine,
        name=options.name,
        slots=options.slots,
        max_queue=options.max_queue,
        held=lambda: checksum(weights),
    )
    return Loaded(
        engine=thread,
        tokenizer=tokenizer,
        weights=weights,
        slots=options.slots,
        max_length=max_length,
        vocabulary=model.get_input_embeddings().weight.shape[0],
        stop_token_ids=stop_token_ids(model, tokenizer),
    )


@dataclass(frozen=True, kw_only=True)
class Service:
    """Belongs to the event loop that it was made in."""

    name: str
    model: str
    loaded: Loaded
    exchange: Exchange
    once: OncePerId
    prompts: Prompts
    updates: WeightUpdates
    instance: str = field(default_factory=lambda: secrets.token_hex(8))
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def engine(self) -> EngineThread:
        return self.loaded.engine

    def info(self) -> ServerInfo:
        progress, holding = self.engine.progress(), self.engine.holding
        return ServerInfo(
            instance=self.instance,
            name=self.name,
            model=self.model,
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


def make_service(loaded: Loaded, options: ServeOptions) -> Service:
    """Start the engine's thread; to be called in the event loop that answers requests."""
    exchange = Exchange(loaded.engine)
    return Service(
        name=options.name,
        model=options.model.path,
        loaded=loaded,
        exchange=exchange,
        once=OncePerId(exchange),
        prompts=Prompts(loaded.tokenizer, loaded.max_length),
        updates=WeightUpdates(loaded.engine, loaded.weights, options.weight_directories),
    )


class Front:
    """The service, or why there is none yet."""

    def __init__(self) -> None:
        self._service: Service | None = None

    def open(self, service: Service) -> None:
        self._service = service

    @property
    def service(self) -> Service:
        """Raises RefusedError while the model is being loaded."""
        if self._service is None:
            raise unavailable("the server starts: it loads the model")
        return self._service
