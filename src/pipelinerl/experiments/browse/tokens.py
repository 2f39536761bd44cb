"""From token ids to what a terminal may show of them. Nothing that a model wrote reaches the terminal as a control code."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from pipelinerl.config.schema import ModelConfig
from pipelinerl.errors import ModelLoadError
from pipelinerl.serving.server.text import TextStream

_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) != "\n"} | {0x7F: 0x2421}
_INVISIBLE = [*range(0x80, 0xA0), 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x2028, 0x2029, 0xFEFF]
_SHOWN = _PICTURES | {code: f"<U+{code:04X}>" for code in (*_INVISIBLE, *range(0xD800, 0xE000))}

_NOT_ITS_TOKENS = (OverflowError, ValueError, IndexError, KeyError, TypeError)


def printable(text: str) -> str:
    """The text with a picture for each control character; newlines stay. What turns writing around is spelled out."""
    return text.translate(_SHOWN)


def one_line(text: str) -> str:
    return printable(" ".join(text.split()))


class TokenText:
    """Text of tokens, special ones included. Without a tokenizer (`missing` says why) it is their ids in brackets."""

    def __init__(self, tokenizer: Any | None, missing: str = "") -> None:
        self._tokenizer = tokenizer
        self.missing = missing

    @property
    def known(self) -> bool:
        return self._tokenizer is not None

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """A piece for each token; together they are the whole text. Of a character of several tokens the last has it all."""
        if self._tokenizer is None:
            return _bare(token_ids)
        stream = TextStream(_WithSpecialTokens(self._tokenizer))
        try:
            pieces = [stream.feed((token_id,)) for token_id in token_ids]
            if pieces:
                pieces[-1] += stream.rest()
        except _NOT_ITS_TOKENS:
            return _bare(token_ids)
        return pieces

    def text(self, token_ids: Sequence[int], *, special: bool = True) -> str:
        """The text of all of them, with or without special tokens."""
        if self._tokenizer is not None:
            with suppress(*_NOT_ITS_TOKENS):
                return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=not special))
        return "".join(_bare(token_ids))


def _bare(token_ids: Sequence[int]) -> list[str]:
    return [f"[{token_id}]" for token_id in token_ids]


class _WithSpecialTokens:
    """A tokenizer that leaves no token out, whatever it is asked."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def decode(self, token_ids: Sequence[int], **_options: bool) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def encode(self, text: str, **options: bool) -> list[int]:
        return list(self._tokenizer.encode(text, **options))

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        return self._tokenizer.apply_chat_template(conversation, **options)


def load_token_text(model: ModelConfig) -> TokenText:
    """With the tokenizer of a run's model, or without any if it can't be loaded. No code that comes with a model is run."""
    from pipelinerl.models.loading import load_tokenizer  # noqa: PLC0415 (loads torch and transformers: seconds)

    try:
        return TokenText(load_tokenizer(msgspec.structs.replace(model, trust_remote_code=False)))
    except ModelLoadError as error:
        return TokenText(None, str(error))
