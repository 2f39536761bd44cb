"""What tasks that are questions with answers have in common: how a question is asked, and which are held out."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from msgspec import Meta

from pipelinerl.environments.options import AtLeastOne, Options
from pipelinerl.environments.prompts import NO_OPTIONS, Message, encode_prompt, has_chat_template
from pipelinerl.errors import EnvironmentSetupError
from pipelinerl.interfaces import Tokenizer

if TYPE_CHECKING:
    from pipelinerl.environments.single_turn import JudgedTurn

HELD_OUT_IN = 10
SHOWN_CHARACTERS = 60  # of a prompt, in an error message
_OWN_OPTIONS = ("messages", "tools", "add_generation_prompt")
ASSISTANTS = ("assistant", "model", "gpt", "ai", "bot", "chatbot")
"""Roles of the model itself, in the chat templates and data sets that there are."""
NO_CHAT = "there is no chat (the model's tokenizer has no chat template, or environment.args.chat is false)"
FormatReward: TypeAlias = Annotated[float, Meta(ge=0, lt=1)]
"""The reward of a wrong answer in the right format: less than that of a right answer, 1."""


def chat_messages(system: str, question: str) -> list[Message]:
    """The messages that ask a question; no system message if `system` is empty."""
    return with_system(system, [{"role": "user", "content": question}])


def with_system(system: str, messages: list[Message]) -> list[Message]:
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


def check_chat(tokenizer: Tokenizer, chat: bool | None) -> bool:
    """Whether to use the chat template: `chat`, or, if that is None, whether there is one.

    Raises EnvironmentSetupError if `chat` is true without a chat template.
    """
    if chat and not has_chat_template(tokenizer):
        raise EnvironmentSetupError(
            "environment.args.chat is true, but the model's tokenizer has no chat template: set it to false, or remove it"
        )
    return has_chat_template(tokenizer) if chat is None else chat


def check_template_options(tokenizer: Tokenizer, options: Mapping[str, Any] | None, *, chat: bool = True) -> dict[str, Any]:
    """The options; none for None. Raises EnvironmentSetupError for one that has no effect. `chat`: the template is used."""
    template = str(getattr(tokenizer, "chat_template", None) or "") if chat else ""
    for name in options or {}:
        if name in _OWN_OPTIONS or not re.search(rf"\b{re.escape(name)}\b", template):
            why = "is set here" if name in _OWN_OPTIONS else "is not in the model's chat template"
            why = why if template else "has no effect: the prompts are not chats"
            raise EnvironmentSetupError(f"environment.args.template_options: {name!r} {why}; leave it out")
    return dict(options or {})


def try_prompt(
    tokenizer: Tokenizer, prompt: str | Sequence[Message], template_options: Mapping[str, Any] = NO_OPTIONS
) -> None:
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
    ids = encode_or_refuse(tokenizer, encoder, prompt, template_options)
    if not ids or ids == encode_or_refuse(tokenizer, encoder, other, template_options):
        how = "ignores the user's message" if ids else "makes an empty prompt"
        raise EnvironmentSetupError(
            f"{encoder} {how} ({_short(last['content'])}): it belongs to another model, or is damaged"
        )


def try_first_prompt(environment: JudgedTurn, tokenizer: Tokenizer) -> None:
    """Raise EnvironmentSetupError, saying what is wrong, if the first problem's prompt can't be encoded."""
    try:
        prompt = environment.prompt(environment.problem(0))
    except Exception:  # noqa: BLE001 - may affect this problem only; failed rollouts are counted and bounded
        return
    if not isinstance(prompt, str) and (wrong := wrong_chat(prompt)):
        raise EnvironmentSetupError(f"the first problem's prompt has {wrong}")
    try_prompt(tokenizer, prompt, environment.template_options)


def encode_or_refuse(
    tokenizer: Tokenizer, encoder: str, prompt: str | Sequence[Message], template_options: Mapping[str, Any] = NO_OPTIONS
) -> tuple[int, ...]:
    """`encode_prompt`, for any text. Raises EnvironmentSetupError; `encoder` is what its message says of the tokenizer."""
    try:
        return encode_prompt(tokenizer, prompt, template_options)
    except Exception as error:  # third-party code, which may raise anything
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        system = not isinstance(prompt, str) and any(message["role"] == "system" for message in prompt)
        advice = '; if it takes no system message, set environment.args.system to ""' if system else ""
        raise EnvironmentSetupError(f"{encoder} can't make a prompt of {_short(text)}: {what}{advice}") from error


def _short(text: str) -> str:
    return repr(text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}...")


class QuestionOptions(Options, kw_only=True):
    """How a question becomes a prompt. Subclasses set the defaults of `system` and `text`."""

    chat: bool | None = None
    """Whether the question is the user's message in the model's chat template. null: if the model has one."""
    system: str = ""
    """The system message of a chat; "" for none."""
    template_options: dict[str, Any] | None = None
    """Options of the model's chat template, such as `{enable_thinking: false}`."""
    text: str = "{question}"
    """The prompt if it is not a chat, with the question in place of `{question}`."""
    max_tokens: AtLeastOne | None = None
    """Longest completion, if `actor.max_tokens` is too long for this task."""

    def __post_init__(self) -> None:
        if "{question}" not in self.text:
            raise EnvironmentSetupError("environment.args.text must have {question} in it, where the question goes")


class QuestionPrompt:
    """Formats a question as `options` say. Raises EnvironmentSetupError for options that can't have an effect."""

    def __init__(self, tokenizer: Tokenizer, options: QuestionOptions) -> None:
        self._chat = check_chat(tokenizer, options.chat)
        self.template_options = check_template_options(tokenizer, options.template_options, chat=self._chat)
        self._options = options
        if self._chat:
            options.refuse_without_effect("the question is a message of a chat", "text")
        else:
            options.refuse_without_effect(NO_CHAT, "system")

    def __call__(self, question: str) -> str | Sequence[Message]:
        if not self._chat:
            return self._options.text.replace("{question}", question)
        return chat_messages(self._options.system, question)


def is_held_out(question: str) -> bool:
    """One question in ten, by a hash: independent of the order of a file, of the seed and of the difficulty."""
    return zlib.crc32(question.encode()) % HELD_OUT_IN == 0
