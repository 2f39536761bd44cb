"""Encodes prompts and decodes text. Sampled tokens are never encoded again: their ids are kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pipelinerl.interfaces import PART, Tokenizer

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
        backend = _plain_backend(tokenizer, "encode", "_encode_plus")
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
    encoded = tokenizer.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=True, **template_options
    )
    return tuple(map(int, encoded["input_ids"]))


def hidden_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that are no text: the tokenizer's own bos, eos and padding. Other special tokens, such as `<think>`, are text."""
    ids = (getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad"))
    return frozenset(token for token in ids if isinstance(token, int))


def text_decoder(tokenizer: Tokenizer, *, special: bool = False) -> Callable[[Sequence[int]], str]:
    """A function from ids to text: the pieces of a `TextStream`, joined.

    Ids of `hidden_ids` are left out, unless `special`. Other special tokens are text, such as `<think>` and `<tool_call>`:
    parsers, rewards and later turns need them. So leave out a completion's stop token before (`Completion.answer_ids`).
    """
    decode = plain_decoder(tokenizer, special)

    def text(ids: Sequence[int]) -> str:
        whole = decode(ids)
        if PART not in whole:
            return whole
        # The decoder of byte tokens makes all of a run unreadable if one byte is. A stream has shown what came before it.
        from pipelinerl.environments.text_stream import TextStream  # noqa: PLC0415 - few completions need it

        stream = TextStream(decode)
        return stream.feed(ids) + stream.rest()

    return text


def plain_decoder(tokenizer: Tokenizer, special: bool = False) -> Callable[[Sequence[int]], str]:
    """`tokenizer.decode`, or its Rust backend where equivalent, without hidden ids unless `special`.

    `decode` spends two thirds of its time on checking the type of every id, and every rollout calls it.
    """
    backend = _plain_backend(tokenizer, "decode", "_decode")
    slow = backend is None or getattr(tokenizer, "clean_up_tokenization_spaces", True)
    hidden = frozenset[int]() if special else None

    def decode(ids: Sequence[int]) -> str:
        nonlocal hidden
        if hidden is None:  # some tokenizers are loaded when they are used
            hidden = hidden_ids(tokenizer)
        shown = [token for token in ids if token not in hidden]
        return str((tokenizer if slow else backend).decode(shown, skip_special_tokens=False)) if shown else ""

    return decode


def _plain_backend(tokenizer: Tokenizer, outer: str, inner: str) -> Any:
    """The Rust backend of a fast tokenizer whose methods `outer` and `inner` are not overridden; else None."""
    kind = type(tokenizer)
    modules = [getattr(getattr(kind, method, None), "__module__", None) for method in (outer, inner)]
    if modules != ["transformers.tokenization_utils_base", "transformers.tokenization_utils_tokenizers"]:
        return None
    return getattr(tokenizer, "backend_tokenizer", None)
