"""Tasks in which the model may call tools before it answers. Subclass `ToolTask` to define one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from pipelinerl.environments.chat.conversation import ChatAnswer, ChatMessage, Conversation, ToolCall, ToolSchema
from pipelinerl.environments.single_turn import Score, Task
from pipelinerl.environments.user.code import score_of, turn_rewards_of
from pipelinerl.errors import EnvironmentSetupError, PromptTooLongError, RolloutError
from pipelinerl.interfaces import GenerationClient, Tokenizer
from pipelinerl.models.encoding import has_chat_template
from pipelinerl.types import Problem, Rollout

MAX_RESULT = 4000
"""Characters of a tool's result that the model is shown, to limit the use of its context."""


class ToolError(Exception):
    """A failed tool call. The model is shown the message and may try again."""


class Tool(NamedTuple):
    """`schema` describes the tool to the model; `call` takes a dict of the arguments by name.

    The model is shown an exception from `call` as an error, a returned text as it is, and any other result as JSON.
    """

    schema: ToolSchema
    call: Callable[[dict[str, Any]], Awaitable[Any]]

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])


def tool_of(function: Callable[..., Any]) -> Tool:
    """A function as a tool, called in this process between two engine steps: it must be fast and safe.

    The model is shown its type hints and its docstring in Google style. Raises EnvironmentSetupError that names what is
    missing.
    """
    from transformers.utils import get_json_schema  # noqa: PLC0415 - takes seconds, and only tools need it

    async def call(arguments: dict[str, Any]) -> Any:
        return function(**arguments)

    try:
        return Tool(get_json_schema(function), call)
    except Exception as error:  # two private types of transformers, and whatever unresolvable type hints raise
        name = getattr(function, "__name__", repr(function))
        what = " ".join(str(error).split())
        raise EnvironmentSetupError(
            f"can't describe the tool {name} to the model: {what} (needed: type hints, and a docstring that says what it "
            "does and has each argument under `Args:`)"
        ) from error


async def take_turns(
    conversation: Conversation,
    history: list[ChatMessage],
    respond: Callable[[ChatAnswer], Awaitable[Sequence[ChatMessage]]],
    tools: Sequence[ToolSchema] = (),
    *,
    max_turns: int,
    max_tokens: int | None = None,
) -> dict[str, float]:
    """Let the model take turns. `history` gets each one, and the messages that `respond` returns for it; none end it.

    Metrics: `out_of_turns` (`max_turns` ended it) and `out_of_context` (there was no room for another turn). Raises
    PromptTooLongError only if `history` is too long as it is.
    """
    ended, before = "", len(history)
    for _ in range(max_turns):
        try:
            reply = await conversation.ask(history, tools, max_tokens=max_tokens)
        except PromptTooLongError:
            if len(history) == before:
                raise
            ended = "out_of_context"
            break
        history.append(reply.message)
        if not (messages := await respond(reply)):
            break
        history += messages
    else:
        ended = "out_of_turns"
    return {name: float(name == ended) for name in ("out_of_turns", "out_of_context")}


async def use_tools(
    task: Task,
    client: GenerationClient,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool],
    *,
    max_turns: int,
    judge: Callable[[str, list[ChatMessage]], Awaitable[tuple[Score, Sequence[float] | None]]],
) -> Rollout:
    """Let the model call tools until a turn has no tool calls or `max_turns` is reached.

    `judge` gets the model's last text and the whole history. It returns the score, and what each turn earned of it, if it
    knows this. Metrics: its own, those of the conversation and of `take_turns`, `tool_calls` and `tool_errors`. Raises
    PromptTooLongError only if the first prompt is too long.
    """
    by_name = {tool.name: tool for tool in tools}
    conversation = Conversation(client, template_options=task.template_options)
    history: list[ChatMessage] = list(messages)
    answer, failures = "", list[bool]()

    async def respond(reply: ChatAnswer) -> list[ChatMessage]:
        nonlocal answer
        answer, found = reply.text, list[ChatMessage]()
        for place, call in zip(tool_messages(reply), reply.calls, strict=True):
            result, failed = await _result(call, by_name)
            failures.append(failed)
            found.append({**place, "content": result})
        return found

    schemas, most = [tool.schema for tool in tools], task.max_tokens
    ended = await take_turns(conversation, history, respond, schemas, max_turns=max_turns, max_tokens=most)
    counts = {"tool_calls": float(len(failures)), "tool_errors": float(sum(failures))}
    metrics = conversation.metrics | counts | ended
    (reward, judged), earned = await judge(answer, history)
    turns = conversation.turns
    if earned is not None:
        turns = tuple(msgspec.structs.replace(turn, reward=one) for turn, one in zip(turns, earned, strict=True))
    return Rollout(turns=turns, reward=reward, metrics={**metrics, **judged})


def tool_messages(reply: ChatAnswer) -> list[ChatMessage]:
    """The message for the result of each of its calls, without the content."""
    made = zip(reply.calls, reply.message.get("tool_calls", ()), strict=True)
    return [{"role": "tool", "name": one.name, "tool_call_id": call["id"]} for one, call in made]


async def _result(call: ToolCall, tools: Mapping[str, Tool]) -> tuple[str, bool]:
    """The result of a call as shown to the model, and whether it failed."""
    tool, failed = tools.get(call.name), True
    if tool is None:
        return f"Error: there is no tool {call.name!r}; there are: {', '.join(tools) or 'none'}", True
    try:
        result = await tool.call(call.arguments)
        text = result if isinstance(result, str) else msgspec.json.encode(result).decode()
        failed = False
    except (EnvironmentSetupError, RolloutError):
        raise
    except ToolError as error:
        text = f"Error: {error}"
    except Exception as error:  # noqa: BLE001 - a failing tool, or a result that is not JSON, is shown to the model
        text = f"Error: {type(error).__name__}: {error}"
    return shortened(text), failed


def shortened(text: str) -> str:
    """A result as the model is shown it."""
    left_out = len(text) - MAX_RESULT
    return text if left_out <= 0 else f"{text[:MAX_RESULT]}... ({left_out} more characters)"


def texts_of(content: Sequence[Mapping[str, Any]]) -> str:
    """What the model is shown of a result by the Model Context Protocol: its texts."""
    texts = [block.get("text", (block.get("resource") or {}).get("text")) for block in content]
    kinds = [f"({block['type']} that can't be shown)" for block in content]
    return "\n".join(kind if text is None else text for kind, text in zip(kinds, texts, strict=True))


def require_chat(tokenizer: Tokenizer, kind: str) -> None:
    """Raises EnvironmentSetupError for a model without a chat template."""
    if not has_chat_template(tokenizer):
        raise EnvironmentSetupError(f"{kind} needs a chat model: the tokenizer of model.path has no chat template")


class ToolTask(Task):
    """A subclass defines `tools`, `problem`, `prompt` and `reward`, and `held_out` if evaluations use it."""

    max_turns = 6
    """Turns of the model, including the answer."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        """Raises EnvironmentSetupError for a model without a chat template."""
        super().__init__(tokenizer, seed)
        require_chat(tokenizer, type(self).__name__)

    @abstractmethod
    def tools(self, problem: Problem) -> Sequence[Tool]:
        """The tools for one attempt at this problem. Called once per attempt, so tools may have state."""

    @abstractmethod
    def prompt(self, problem: Problem) -> Sequence[ChatMessage]:
        """The messages that start the conversation."""

    @abstractmethod
    def reward(self, problem: Problem, answer: str, messages: Sequence[ChatMessage]) -> Any:
        """The reward for the model's last text `answer`. `messages` is the whole history.

        In a dict with the `reward`, a list `turns` says what each turn, a message of the assistant, earned of it. The rest
        belongs to the last turn.
        """

    async def rollout(self, problem: Problem, client: GenerationClient) -> Rollout:
        async def judge(answer: str, messages: list[ChatMessage]) -> tuple[Score, Sequence[float] | None]:
            count = sum(message["role"] == "assistant" for message in messages[len(prompt) :])
            value, earned = turn_rewards_of(await self.call_reward(problem, answer, messages), count)
            return score_of(value, "reward"), earned

        prompt, tools = self.prompt(problem), self.tools(problem)
        return await use_tools(self, client, prompt, tools, max_turns=self.max_turns, judge=judge)
