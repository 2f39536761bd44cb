"""What tasks that are questions with answers have in common: how a question is asked, and which are held out."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

from msgspec import Meta

from pipelinerl.environments.options import AtLeastOne, Options
from pipelinerl.environments.prompts import Message, check_template_options, has_chat_template
from pipelinerl.errors import EnvironmentSetupError
from pipelinerl.interfaces import Tokenizer

HELD_OUT_IN = 10
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
