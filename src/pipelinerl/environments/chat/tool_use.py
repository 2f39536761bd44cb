"""Tasks in which the model may call tools before it answers. `ToolTask` is the shortest way to one of your own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from pipelinerl.environments.chat.conversation import Conversation
from pipelinerl.environments.chat.messages import ChatMessage, ToolCall, ToolSchema
from pipelinerl.environments.prompts import has_chat_template
from pipelinerl.errors import EnvironmentSetupError, PromptTooLongError, RolloutError
from pipelinerl.interfaces import GenerationClient, Tokenizer
from pipelinerl.types import Problem, Rollout

MAX_RESULT = 4000
"""Characters of a tool's result that the model is shown: a context is soon full."""


class ToolError(Exception):
    """A call of a tool that failed: the message is told to the model, which may do better."""


class Tool(NamedTuple):
    """`schema` is what the model is told, `call` takes the arguments by name.

    What `call` raises is told to the model as an error. What it returns is text, or shown to the model as JSON.
    """

    schema: ToolSchema
    call: Callable[[dict[str, Any]], Awaitable[Any]]

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])


def tool_of(function: Callable[..., Any]) -> Tool:
    """A function of this process as a tool; it is called between two engine steps and so must be quick and harmless.

    Raises EnvironmentSetupError as `schema_of` does.
    """

    async def call(arguments: dict[str, Any]) -> Any:
        return function(**arguments)

    return Tool(schema_of(function), call)


def schema_of(function: Callable[..., Any]) -> ToolSchema:
    """What the model is told of a function: from its type hints and its docstring, in Google's style.

    Raises EnvironmentSetupError, saying what is missing.
    """
    from transformers.utils import get_json_schema  # noqa: PLC0415 - takes seconds, and only tools need it

    try:
        schema: ToolSchema = get_json_schema(function)
    except Exception as error:  # of two kinds that aren't exported, and what hints raise that can't be resolved
        name = getattr(function, "__name__", repr(function))
        what = " ".join(str(error).split())
        raise EnvironmentSetupError(
            f"can't describe the tool {name} to the model: {what} (needed: type hints, and a docstring that says what it "
            "does and has each argument under `Args:`)"
        ) from error
    return schema


class ToolUse(NamedTuple):
    """How it went: `answer` is the last text of the model, `messages` are all there were."""

    conversation: Conversation
    answer: str
    messages: list[ChatMessage]
    metrics: dict[str, float]

    def rollout(self, reward: float, metrics: Mapping[str, float] | None = None) -> Rollout:
        return Rollout(turns=self.conversation.turns, reward=reward, metrics={**self.metrics, **(metrics or {})})


async def use_tools(
    client: GenerationClient,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool],
    *,
    max_turns: int,
    max_tokens: int | None = None,
) -> ToolUse:
    """Let the model answer, with calls of tools as it likes, until it calls none or has had `max_turns` turns.

    Metrics: those of the conversation, `tool_calls`, `tool_errors`, `out_of_turns` (it had its last turn and called a tool)
    and `out_of_context` (results left no room for another turn). Raises PromptTooLongError for the first turn alone.
    """
    by_name = {tool.name: tool for tool in tools}
    conversation = Conversation(client)
    said: list[ChatMessage] = list(messages)
    answer, calls, errors = "", 0, 0
    out_of_turns, out_of_context = True, False
    for turn in range(max_turns):
        try:
            reply = await conversation.ask(said, [tool.schema for tool in tools], max_tokens=max_tokens)
        except PromptTooLongError:
            if turn == 0:
                raise
            out_of_turns, out_of_context = False, True
            break
        answer = reply.text
        said.append(reply.message)
        if not reply.calls:
            out_of_turns = False
            break
        for number, call in enumerate(reply.calls):
            result, failed = await _result(call, by_name)
            calls, errors = calls + 1, errors + failed
            call_id = reply.message["tool_calls"][number]["id"]
            said.append({"role": "tool", "name": call.name, "tool_call_id": call_id, "content": result})
    metrics = conversation.metrics | {
        "tool_calls": float(calls),
        "tool_errors": float(errors),
        "out_of_turns": float(out_of_turns),
        "out_of_context": float(out_of_context),
    }
    return ToolUse(conversation, answer, said, metrics)


async def _result(call: ToolCall, tools: Mapping[str, Tool]) -> tuple[str, bool]:
    """What the model is told of a call, and whether it failed."""
    tool = tools.get(call.name)
    if tool is None:
        return f"Error: there is no tool {call.name!r}; there are: {', '.join(tools) or 'none'}", True
    try:
        result = await tool.call(call.arguments)
        text = result if isinstance(result, str) else msgspec.json.encode(result).decode()
    except (EnvironmentSetupError, RolloutError):
        raise
    except ToolError as error:
        return _shortened(f"Error: {error}"), True
    except Exception as error:  # noqa: BLE001 - a tool's failure, also one to return JSON, is the model's to deal with
        return _shortened(f"Error: {type(error).__name__}: {error}"), True
    return _shortened(text), False


def _shortened(text: str) -> str:
    left_out = len(text) - MAX_RESULT
    return text if left_out <= 0 else f"{text[:MAX_RESULT]}... ({left_out} more characters)"


def require_chat(tokenizer: Tokenizer, kind: str) -> None:
    """Raises EnvironmentSetupError for a model without a chat template."""
    if not has_chat_template(tokenizer):
        raise EnvironmentSetupError(f"{kind} needs a model with a chat template: its tokenizer has none")


class ToolTask(ABC):
    """A subclass defines `tools`, `problem`, `prompt` and `reward`, and `held_out` if it is to be evaluated.

    Constructor arguments of a subclass (after `tokenizer` and `seed`) are `environment.args` of the run file.
    """

    max_turns = 6
    """Turns of the model, the answer included."""
    max_tokens: int | None = None
    """Longest turn that makes sense here; None or anything above `actor.max_tokens`: that."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        """Raises EnvironmentSetupError for a model without a chat template."""
        require_chat(tokenizer, type(self).__name__)
        self.tokenizer = tokenizer
        self.seed = seed

    @abstractmethod
    def tools(self, problem: Problem) -> Sequence[Tool]:
        """What may be called in an attempt at this problem; asked for once an attempt, so tools may have a state."""

    @abstractmethod
    def problem(self, index: int) -> Problem:
        """The training problem number `index`; a pure function of it (and of `self.seed`)."""

    @abstractmethod
    def prompt(self, problem: Problem) -> Sequence[ChatMessage]:
        """What the model is asked."""

    @abstractmethod
    def reward(self, problem: Problem, answer: str, messages: Sequence[ChatMessage]) -> float:
        """What the model's last text is worth, after all these messages."""

    def held_out(self, count: int) -> Sequence[Problem]:  # noqa: ARG002 - for subclasses to use
        """The first `count` evaluation problems, which `problem` never gives. None by default."""
        return ()

    async def rollout(self, problem: Problem, client: GenerationClient) -> Rollout:
        used = await use_tools(
            client, self.prompt(problem), self.tools(problem), max_turns=self.max_turns, max_tokens=self.max_tokens
        )
        return used.rollout(self.reward(problem, used.answer, used.messages))
