"""`environment.args`: each environment declares its arguments once, as a pydantic model, like the sections of a run file.

The names, types, ranges and defaults of the model are checked before a run starts. The docstrings of its fields are the
documentation. A class with an ordinary constructor needs no model. `examples/countdown.py` is an example.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self, TypeAlias

from pydantic import Field, JsonValue, ValidationError

from pipelinerl.config.schema import Count, Section
from pipelinerl.environments.prompts import check_template_options, with_system
from pipelinerl.environments.single_turn import SingleTurn
from pipelinerl.errors import EnvironmentSetupError
from pipelinerl.interfaces import Tokenizer
from pipelinerl.models.encoding import Message, has_chat_template

Files: TypeAlias = str | Annotated[list[str], Field(min_length=1)]
"""A file (JSON lines, a JSON array, or Parquet, by its suffix), a data set (`dataset:...`), or a list of them."""
Arguments: TypeAlias = dict[str, JsonValue]


def listed(names: str | list[str]) -> list[str]:
    return [names] if isinstance(names, str) else names


class Inner(Section, frozen=True):
    """An environment within another one: `kind` and `args`, as under `environment` in a run file."""

    kind: str
    args: Arguments = Field(default_factory=dict)


class Options(Section, frozen=True):
    """Base of the models. A subclass may check several fields together in `model_post_init` (EnvironmentSetupError)."""

    @classmethod
    def read(cls, args: Mapping[str, Any]) -> Self:
        """Raises EnvironmentSetupError for the first argument that is unknown, missing, or has a wrong type or range."""
        try:
            return cls.model_validate(dict(args))
        except ValidationError as error:
            from pipelinerl.config.keys import explain_argument  # noqa: PLC0415 - only for a mistake

            raise EnvironmentSetupError(f"environment.args{explain_argument(cls, error.errors(), args)}") from error

    def refuse_without_effect(self, why: str, *names: str) -> None:
        """Raises EnvironmentSetupError if one of these arguments is neither its default nor empty, for it has no effect."""
        for name in names:
            if getattr(self, name) not in ("", type(self).model_fields[name].default):
                raise EnvironmentSetupError(f"environment.args.{name} has no effect: {why}; leave it out")


# ---- environments that ask questions


class QuestionOptions(Options, frozen=True):
    """How a question becomes a prompt. Subclasses set the defaults of `system` and `text`."""

    chat: bool | None = None
    """Whether the question is the user's message in the model's chat template. null: if the model has one."""
    system: str = ""
    """The system message of a chat; "" for none."""
    template_options: Arguments | None = None
    """Options of the model's chat template, such as `{enable_thinking: false}`."""
    text: str = "{question}"
    """The prompt if it is not a chat, with the question in place of `{question}`."""
    max_tokens: Count | None = None
    """Longest completion, if `actor.max_tokens` is too long for this task."""

    def model_post_init(self, _: Any) -> None:
        if "{question}" not in self.text:
            raise EnvironmentSetupError("environment.args.text must have {question} in it, where the question goes")


class QuestionTask(SingleTurn):
    """A task whose prompts are questions, asked as `options` say: `prompt` returns `self.ask(question)`."""

    def __init__(self, tokenizer: Tokenizer, seed: int, options: QuestionOptions) -> None:
        """Raises EnvironmentSetupError for options that can't have an effect."""
        super().__init__(tokenizer, seed)
        self.max_tokens = options.max_tokens
        self._system, self._text = options.system, options.text
        self._chat = has_chat_template(tokenizer) if options.chat is None else options.chat
        if self._chat and not has_chat_template(tokenizer):
            raise EnvironmentSetupError("environment.args.chat is true, but the model's tokenizer has no chat template")
        self.template_options = check_template_options(tokenizer, options.template_options, chat=self._chat)
        if self._chat:
            options.refuse_without_effect("the question is a message of a chat", "text")
        else:
            why = "there is no chat (the model's tokenizer has no chat template, or environment.args.chat is false)"
            options.refuse_without_effect(why, "system")

    def ask(self, question: str) -> str | Sequence[Message]:
        if self._chat:
            return with_system(self._system, [{"role": "user", "content": question}])
        return self._text.replace("{question}", question)


def bounds_of(name: str, value: int | tuple[Any, Any]) -> tuple[Any, Any]:
    """The minimum and maximum that the argument `name` gives. Raises EnvironmentSetupError if they are swapped."""
    low, high = (value, value) if isinstance(value, int) else value
    if low > high:
        raise EnvironmentSetupError(f"environment.args.{name} is {[low, high]}: give the minimum first")
    return low, high
