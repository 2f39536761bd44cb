"""Encodes prompts and decodes text. Sampled tokens are never encoded again: their ids are kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipelinerl.errors import EnvironmentSetupError
from pipelinerl.interfaces import Tokenizer

Message = Mapping[str, str]
"""One message of a chat: `{"role": "user", "content": "..."}`."""

SHOWN_CHARACTERS = 60  # of a prompt, in an error message


def has_chat_template(tokenizer: Tokenizer) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def encode_prompt(tokenizer: Tokenizer, prompt: str | Sequence[Message]) -> tuple[int, ...]:
    """The ids of a text with the model's special tokens around it, or of chat messages in its chat template.

    Raises ValueError for messages if the tokenizer has no chat template.
    """
    if isinstance(prompt, str):
        backend = _plain_backend(tokenizer, "encode", "_encode_plus")
        if backend is None or backend.truncation is not None or backend.padding is not None:
            return tuple(tokenizer.encode(prompt))
        return tuple(backend.encode(prompt).ids)
    if not has_chat_template(tokenizer):
        raise ValueError("the model's tokenizer has no chat template: give the prompt as plain text")
    messages = [dict(message) for message in prompt]
    encoded = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=True)
    return tuple(map(int, encoded["input_ids"]))


def try_prompt(tokenizer: Tokenizer, prompt: str | Sequence[Message]) -> None:
    """Encode a prompt before the run starts, so that an error appears before the first rollout.

    Raises EnvironmentSetupError if it can't be encoded, has no tokens, or if the chat template ignores the user's message.
    """
    if isinstance(prompt, str):
        if not encode_or_refuse(tokenizer, "the model's tokenizer", prompt):
            raise EnvironmentSetupError(f"the model's tokenizer makes an empty prompt of {_short(prompt)}")
        return
    encoder = "the model's chat template"
    last = prompt[-1]
    other = [*prompt[:-1], {**last, "content": last["content"] * 2}]
    ids = encode_or_refuse(tokenizer, encoder, prompt)
    if not ids or ids == encode_or_refuse(tokenizer, encoder, other):
        how = "ignores the user's message" if ids else "makes an empty prompt"
        raise EnvironmentSetupError(
            f"{encoder} {how} ({_short(last['content'])}): it belongs to another model, or is damaged"
        )


def encode_or_refuse(tokenizer: Tokenizer, encoder: str, prompt: str | Sequence[Message]) -> tuple[int, ...]:
    """`encode_prompt`, for any text. Raises EnvironmentSetupError; `encoder` is what its message says of the tokenizer."""
    try:
        return encode_prompt(tokenizer, prompt)
    except Exception as error:  # third-party code, which may raise anything
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        system = not isinstance(prompt, str) and any(message["role"] == "system" for message in prompt)
        advice = '; if it takes no system message, set environment.args.system to ""' if system else ""
        raise EnvironmentSetupError(f"{encoder} can't make a prompt of {_short(text)}: {what}{advice}") from error


def _short(text: str) -> str:
    return repr(text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}...")


def text_decoder(tokenizer: Tokenizer) -> Callable[[Sequence[int]], str]:
    """A function from ids to text without special tokens: `tokenizer.decode`, or its Rust backend where equivalent.

    `decode` spends two thirds of its time on checking the type of every id, and every rollout calls it.
    """
    backend = _plain_backend(tokenizer, "decode", "_decode")
    if backend is None or getattr(tokenizer, "clean_up_tokenization_spaces", True):
        return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)
    return lambda ids: str(backend.decode(ids, skip_special_tokens=True))


def _plain_backend(tokenizer: Tokenizer, outer: str, inner: str) -> Any:
    """The Rust backend of a fast tokenizer whose methods `outer` and `inner` are not overridden; else None."""
    kind = type(tokenizer)
    modules = [getattr(getattr(kind, method, None), "__module__", None) for method in (outer, inner)]
    if modules != ["transformers.tokenization_utils_base", "transformers.tokenization_utils_tokenizers"]:
        return None
    return getattr(tokenizer, "backend_tokenizer", None)
