"""Converts token ids to text that is safe to print: model output never reaches the terminal as control codes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from pipelinerl.config.schema import ModelConfig
from pipelinerl.errors import ModelLoadError
from pipelinerl.serving.server.text import TextStream

_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) != "\n"} | {0x7F: 0x2421}
_INVISIBLE = [*range(0x80, 0xA0), 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x2028, 0x2029, 0xFEFF]
_SHOWN = _PICTURES | {code: f"<U+{code:04X}>" for code in (*_INVISIBLE, *range(0xD800, 0xE000))}

_DECODE_ERRORS = (OverflowError, ValueError, IndexError, KeyError, TypeError)
"""What tokenizers raise for token ids that they do not have."""


def printable(text: str) -> str:
    """Replace control characters by pictures (`␛`), except newlines, and bidirectional or invisible ones by `<U+XXXX>`."""
    return text.translate(_SHOWN)


def one_line(text: str) -> str:
    return printable(" ".join(text.split()))


class TokenText:
    """Converts tokens to text, including special tokens. Without a tokenizer (`missing` says why), gives ids in brackets."""

    def __init__(self, tokenizer: Any | None, missing: str = "") -> None:
        self._tokenizer = tokenizer
        self.missing = missing

    @property
    def known(self) -> bool:
        return self._tokenizer is not None

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """One piece of text per token. A character made of several tokens is in the piece of the last one."""
        if self._tokenizer is None:
            return _bracketed(token_ids)
        stream = TextStream(_WithSpecialTokens(self._tokenizer))
        try:
            pieces = [stream.feed((token_id,)) for token_id in token_ids]
            if pieces:
                pieces[-1] += stream.rest()
        except _DECODE_ERRORS:
            return _bracketed(token_ids)
        return pieces

    def text(self, token_ids: Sequence[int], *, special: bool = True) -> str:
        """The text of all tokens, with or without special tokens."""
        if self._tokenizer is not None:
            with suppress(*_DECODE_ERRORS):
                return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=not special))
        return "".join(_bracketed(token_ids))


def _bracketed(token_ids: Sequence[int]) -> list[str]:
    return [f"[{token_id}]" for token_id in token_ids]


class _WithSpecialTokens:
    """A tokenizer whose `decode` always includes special tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def decode(self, token_ids: Sequence[int], **_options: bool) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def encode(self, text: str, **options: bool) -> list[int]:
        return list(self._tokenizer.encode(text, **options))

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        return self._tokenizer.apply_chat_template(conversation, **options)


def load_token_text(model: ModelConfig) -> TokenText:
    """A `TokenText` with the model's tokenizer, or without one if it can't be loaded. Never runs the model's own code."""
    from pipelinerl.models.loading import load_tokenizer  # noqa: PLC0415 (loads torch and transformers: seconds)

    try:
        return TokenText(load_tokenizer(model.model_copy(update={"trust_remote_code": False})))
    except ModelLoadError as error:
        return TokenText(None, str(error))
