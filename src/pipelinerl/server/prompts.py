"""From what a client sends to the ids of a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from pipelinerl.errors import PromptTooLongError, RequestError
from pipelinerl.interfaces import Tokenizer

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
