"""Encodes a text or a chat as the prompt of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import xxhash

from pipelinerl.interfaces import Tokenizer

Message = Mapping[str, str]
"""One message of a chat: `{"role": "user", "content": "..."}`."""

NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


def has_chat_template(tokenizer: Tokenizer) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def encode_prompt(
    tokenizer: Tokenizer, prompt: str | Sequence[Message], template_options: Mapping[str, Any] = NO_OPTIONS
) -> tuple[int, ...]:
    """The ids of a text for the model to continue, or of chat messages in its chat template with these options.

    A text gets the tokens that the model expects before it, unless it brings them itself, and none after it: some tokenizers
    add the end of a text. Raises ValueError for messages if the tokenizer has no chat template.
    """
    if isinstance(prompt, str):
        backend = plain_backend(tokenizer, "encode", "_encode_plus")
        plain = backend is not None and backend.truncation is None and backend.padding is None
        whole, text = (
            tuple(backend.encode(prompt, add_special_tokens=special).ids)
            if plain
            else tuple(tokenizer.encode(prompt, add_special_tokens=special))
            for special in (True, False)
        )
        starts = (start for start in range(len(whole) - len(text) + 1) if whole[start : start + len(text)] == text)
        start = next(starts, None) if text else None
        if start is None:  # nothing to go by
            return whole
        before = whole[:start]
        return text if text[:start] == before else before + text
    if not has_chat_template(tokenizer):
        raise ValueError("the model's tokenizer has no chat template: give the prompt as plain text")
    messages = [dict(message) for message in prompt]
    options = {"add_generation_prompt": True, **template_options}
    encoded = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)
    return tuple(map(int, encoded["input_ids"]))


def plain_backend(tokenizer: Tokenizer, outer: str, inner: str) -> Any:
    """The Rust backend of a fast tokenizer whose methods `outer` and `inner` are not overridden; else None."""
    kind = type(tokenizer)
    modules = [getattr(getattr(kind, method, None), "__module__", None) for method in (outer, inner)]
    if modules != ["transformers.tokenization_utils_base", "transformers.tokenization_utils_tokenizers"]:
        return None
    return getattr(tokenizer, "backend_tokenizer", None)


def vocabulary_digest(tokenizer: Any) -> str:
    """A digest of which token has which id."""
    return xxhash.xxh3_64_hexdigest(repr(sorted(tokenizer.get_vocab().items())).encode())
