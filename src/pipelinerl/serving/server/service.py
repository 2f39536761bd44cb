"""The loaded model and the objects that the endpoints use: prompts, engine and weight updates."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pipelinerl.environments.chat.messages import (
    ChatMessage,
    ToolSchema,
    encode_text,
    plain_message,
    render,
)
from pipelinerl.environments.prompts import has_chat_template
from pipelinerl.errors import MissingDependencyError, PromptTooLongError, RequestError
from pipelinerl.extras import require
from pipelinerl.interfaces import Tokenizer
from pipelinerl.models.loading import load_model, load_tokenizer, slot_length, stop_token_ids
from pipelinerl.models.state import checksum, named_weights
from pipelinerl.serving.server.extras import ServerEngine
from pipelinerl.serving.server.http import unavailable
from pipelinerl.serving.server.options import ServeOptions
from pipelinerl.serving.server.served import ServedEngine
from pipelinerl.serving.server.weights import WeightUpdates
from pipelinerl.serving.wire import ServerInfo

if TYPE_CHECKING:
    from pipelinerl.serving.server.openai.llguidance import Grammars

# ---- encoding prompts


_MAX_CHARACTERS_PER_TOKEN = 128
"""More than any tokenizer's average. A longer text can't fit, so it is refused without being encoded."""
_LONG_TEXT = 20_000
"""Characters. Encoding a longer text takes more than a few milliseconds, so it is done in a thread."""


class Prompts:
    """Encodes texts and chats for a model whose sequences have at most `max_length` tokens."""

    def __init__(self, tokenizer: Tokenizer, max_length: int) -> None:
        self._tokenizer = tokenizer
        self._max_length = max_length

    async def of_chat(
        self,
        messages: Sequence[ChatMessage],
        options: Mapping[str, Any],
        tools: Sequence[ToolSchema],
    ) -> tuple[int, ...]:
        """Encode a chat with the model's chat template, as `render` does. Raises RequestError."""
        if not has_chat_template(self._tokenizer):
            raise RequestError("this model's tokenizer has no chat template: use /v1/completions with a plain prompt")
        if not messages:
            raise RequestError("messages: there are none")
        plain = [plain_message(message) for message in messages]
        self._check_size(sum(len(message["content"]) for message in plain))
        return await self.of_text(render(self._tokenizer, plain, tools, options), special=False)

    async def of_text(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """Encode a text, by default with the special tokens that the model expects before it. Raises RequestError."""
        self._check_size(len(text))
        if len(text) > _LONG_TEXT:
            return await asyncio.to_thread(encode_text, self._tokenizer, text, special=special)
        return encode_text(self._tokenizer, text, special=special)

    def _check_size(self, characters: int) -> None:
        if characters > self._max_length * _MAX_CHARACTERS_PER_TOKEN:
            raise PromptTooLongError(f"a prompt of {characters} characters can't fit into {self._max_length} tokens")


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model in an engine. `weights`: the engine's own tensors by name."""

    engine: ServerEngine
    tokenizer: Tokenizer
    weights: Mapping[str, torch.Tensor]
    slots: int
    max_length: int
    vocabulary: int
    stop_token_ids: tuple[int, ...]


def load(options: ServeOptions) -> Loaded:
    """Load the model and create its engine; takes seconds to minutes. Raises ModelLoadError and UnsupportedModelError."""
    if options.engine.threads is not None:
        torch.set_num_threads(options.engine.threads)
    tokenizer = load_tokenizer(options.model)
    return loaded_from(load_model(options.model, options.engine.device), tokenizer, options)


def loaded_from(model: Any, tokenizer: Any, options: ServeOptions, *, flatten: bool = True) -> Loaded:
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
    return Loaded(
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

    def __init__(self, loaded: Loaded, options: ServeOptions) -> None:
        self.name = options.name
        self.loaded = loaded
        self.engine = ServedEngine(
            loaded.engine,
            name=options.name,
            slots=loaded.slots,
            max_queue=options.max_queue,
            held=lambda: checksum(loaded.weights),
        )
        self.prompts = Prompts(loaded.tokenizer, loaded.max_length)
        self.updates = WeightUpdates(
            self.engine, loaded.weights, options.weight_directories, on_new_epoch=self.engine.forget
        )
        self.created = int(time.time())
        self._model = options.model.path
        self._instance = secrets.token_hex(8)
        self._grammars: Grammars | None = None
        self._grammars_lock = threading.Lock()

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

    def grammars(self, key: str) -> Grammars:
        """For constrained answers; `key` asks for one. Takes a second at the first call. Raises RequestError."""
        try:
            require("structured", f"{key} on this server")
        except MissingDependencyError as error:
            raise RequestError(str(error)) from error
        from pipelinerl.serving.server.openai.llguidance import Grammars  # noqa: PLC0415 - needs an extra

        with self._grammars_lock:
            if self._grammars is None:
                loaded = self.loaded
                self._grammars = Grammars(loaded.tokenizer, loaded.vocabulary, loaded.stop_token_ids)
            return self._grammars


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
