"""Makes prompts, encodes them, and decodes text. Sampled tokens are never encoded again."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipelinerl.errors import EnvironmentSetupError
from pipelinerl.interfaces import PART, Tokenizer
from pipelinerl.models.encoding import NO_OPTIONS, Message, encode_prompt, plain_backend

SHOWN_CHARACTERS = 60  # of a prompt, in an error message
_OWN_OPTIONS = ("messages", "tools", "add_generation_prompt")
ASSISTANTS = ("assistant", "model", "gpt", "ai", "bot", "chatbot")
"""Roles of the model itself, in the chat templates and data sets that there are."""
MOST_HELD = 16
"""Tokens that a stream holds back for the rest of a character. A character has at most four bytes."""

# ---- prompts


def with_system(system: str, messages: list[Message]) -> list[Message]:
    """The messages after a system message; without one if `system` is empty."""
    return [{"role": "system", "content": system}, *messages] if system else messages


def wrong_chat(messages: Sequence[Message], system: str = "") -> str | None:
    """A description of `messages` if a model can't be asked to answer them, after the message `system`; else None."""
    if messages and messages[-1].get("role") in ASSISTANTS:
        return (
            f"chat messages that end with the {messages[-1]['role']}'s (the answer is in the prompt: end them with the "
            "user's message, and keep the answer in another field)"
        )
    if system and any(message.get("role") == "system" for message in messages):
        return "chat messages with a system message of their own (leave out environment.args.system)"
    return None


def check_template_options(tokenizer: Tokenizer, options: Mapping[str, Any] | None, *, chat: bool = True) -> dict[str, Any]:
    """The options; none for None. Raises EnvironmentSetupError for any without effect. `chat`: the template is used."""
    template = str(getattr(tokenizer, "chat_template", None) or "") if chat else ""
    for name in options or {}:
        if name in _OWN_OPTIONS or not re.search(rf"\b{re.escape(name)}\b", template):
            why = "is set here" if name in _OWN_OPTIONS else "is not in the model's chat template"
            why = why if template else "has no effect: the prompts are not chats"
            raise EnvironmentSetupError(f"environment.args.template_options: {name!r} {why}; leave it out")
    return dict(options or {})


def encode_or_refuse(
    tokenizer: Tokenizer, prompt: str | Sequence[Message], template_options: Mapping[str, Any] = NO_OPTIONS
) -> tuple[int, ...]:
    """`encode_prompt`, for any text. Raises EnvironmentSetupError."""
    try:
        return encode_prompt(tokenizer, prompt, template_options)
    except Exception as error:  # third-party code, which may raise anything
        encoder, text = ("tokenizer", prompt) if isinstance(prompt, str) else ("chat template", prompt[-1]["content"])
        system = not isinstance(prompt, str) and any(message["role"] == "system" for message in prompt)
        advice = '; if it takes no system message, set environment.args.system to ""' if system else ""
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise EnvironmentSetupError(
            f"the model's {encoder} can't make a prompt of {text[:SHOWN_CHARACTERS]!r}: {what}{advice}"
        ) from error


# ---- text


def text_decoder(tokenizer: Tokenizer, *, special: bool = False) -> Callable[[Sequence[int]], str]:
    """A function from ids to text: the pieces of a `TextStream`, joined.

    The tokenizer's own bos, eos and padding are left out, unless `special`. Other special tokens are text, such as `<think>`
    and `<tool_call>`: parsers, rewards and later turns need them. So leave out a completion's stop token before
    (`Completion.answer_ids`).
    """
    decode = plain_decoder(tokenizer, special)

    def text(ids: Sequence[int]) -> str:
        whole = decode(ids)
        if PART not in whole:
            return whole
        # The decoder of byte tokens makes all of a run unreadable if one byte is. A stream has shown what came before it.
        stream = TextStream(decode)
        return stream.feed(ids) + stream.rest()

    return text


def plain_decoder(tokenizer: Tokenizer, special: bool = False) -> Callable[[Sequence[int]], str]:
    """`tokenizer.decode`, or its Rust backend where equivalent; unless `special`, without the ids of bos, eos and padding.

    `decode` spends two thirds of its time on checking the type of every id, and every rollout calls it.
    """
    backend = plain_backend(tokenizer, "decode", "_decode")
    slow = backend is None or getattr(tokenizer, "clean_up_tokenization_spaces", True)
    hidden = set[object]() if special else None

    def decode(ids: Sequence[int]) -> str:
        nonlocal hidden
        if hidden is None:  # some tokenizers are loaded when they are used
            hidden = {getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad")}
        shown = [token for token in ids if token not in hidden]
        return str((tokenizer if slow else backend).decode(shown, skip_special_tokens=False)) if shown else ""

    return decode


class TextStream:
    """Decodes a growing sequence of tokens in pieces, which do not depend on how many tokens are fed at once.

    Some tokens are parts of a character, and some decode differently after another token. So the tokens of the last piece
    are decoded again with the new ones, and a piece is held back until its last character is complete, or for `MOST_HELD`
    tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        """`decode`: see `plain_decoder`."""
        self._decode = decode
        self._ids: list[int] = []
        self._start = self._read = 0  # first token to decode again as context; number of tokens whose text was returned

    def feed(self, token_ids: Sequence[int]) -> str:
        """Add tokens; return the text that became final."""
        before = len(self._ids)
        self._ids += token_ids
        text = self._new_text(len(self._ids))
        if PART not in text:
            self._start, self._read = self._read, len(self._ids)
            return text
        return "".join(self._piece(end + 1) for end in range(before, len(self._ids)))

    def rest(self) -> str:
        """The remaining text at the end, including incomplete characters."""
        text = self._new_text(len(self._ids))
        self._start = self._read = len(self._ids)
        return text

    def _piece(self, end: int) -> str:
        """The text that becomes final with token `end` - 1."""
        text = self._new_text(end)
        if not text.endswith(PART):
            self._start, self._read = self._read, end
            return text
        if end - self._read < MOST_HELD:
            return ""
        # All but the last tokens is final, cut where this changes nothing: not within a character.
        cuts = range(end - 3, self._read, -1)
        cut = next((at for at in cuts if self._new_text(at) + self._decode(self._ids[at:end]) == text), cuts[0])
        text = self._new_text(cut)
        self._start = self._read = cut
        return text

    def _new_text(self, end: int) -> str:
        known, text = (self._decode(self._ids[self._start : stop]) for stop in (self._read, end))
        return text[len(known) :] if text.startswith(known) else self._decode(self._ids[self._read : end])
