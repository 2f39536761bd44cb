"""Environments of OpenEnv (https://github.com/meta-pytorch/OpenEnv), which run in servers. An attempt has its own session.

The package `openenv` has the client. It is no extra of this package: its other requirements contradict those of `mcp`.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import weakref
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from pipelinerl.channel import LOOPBACK, free_port
from pipelinerl.config.schema import Count, Positive
from pipelinerl.environments.chat.conversation import ChatAnswer, ChatMessage, Conversation, ToolSchema
from pipelinerl.environments.chat.tool_use import require_chat, shortened, take_turns, texts_of, tool_messages
from pipelinerl.environments.options import Arguments, Options
from pipelinerl.environments.prompts import check_template_options, with_system
from pipelinerl.environments.single_turn import Task
from pipelinerl.errors import EnvironmentSetupError, MissingDependencyError, RolloutError
from pipelinerl.interfaces import GenerationClient, Tokenizer
from pipelinerl.process.child import ChildProcess
from pipelinerl.types import Problem, Rollout, finite
from pipelinerl.user_code import find_function, names_a_function

Act = Callable[..., Awaitable[Any]]
START_TIMEOUT_S = 120.0
LARGEST_SEED = 2**31 - 1
"""Seeds for training have at most 30 bits."""


class OpenEnvOptions(Options, frozen=True):
    url: str = ""
    """The address of the environment's server, such as `http://127.0.0.1:8000`."""
    command: Annotated[list[str], Field(min_length=1)] | None = None
    """Instead of `url`: starts a server for each generation process, at `{port}` of the loopback interface. A first word
    `python` is the run's interpreter: `[python, -m, uvicorn, "my_env.server.app:app", --port, "{port}"]`."""
    observation: str = ""
    """What the model is shown of an observation: a field, or a function (dict) -> text. "": all, as JSON."""
    action: str = ""
    """The field of an action that gets the model's text, or a function (text) -> the action, a dict."""
    tools: bool = False
    """Instead of `action`: the model calls the environment's tools (of an `MCPEnvironment`)."""
    answer: str = ""
    """With `tools`: the tool, hidden from the model, and its argument that get the text of a turn without a call, such as
    `submit.answer`. "": such a turn ends the attempt."""
    reset: Arguments | None = None
    """Arguments of `reset` beside the seed, which is the problem."""
    reward: Literal["sum", "last"] = "sum"
    """Of the rewards of an attempt's steps."""
    sessions: Count = 64
    """How many sessions may be open at once: at most the server's `max_concurrent_envs`, which is 1 by default."""
    timeout_s: Positive = 60.0
    """How long a reset or a step may take."""
    max_turns: Count = 8
    """Turns of the model."""
    system: str = ""
    """The system message; "" for none."""
    template_options: Arguments | None = None
    """Options of the model's chat template, such as `{enable_thinking: false}`."""

    def model_post_init(self, _: Any) -> None:
        if bool(self.url) == (self.command is not None):
            raise EnvironmentSetupError("environment.args of openenv: give either `url` or `command`")
        if bool(self.action) == self.tools:
            raise EnvironmentSetupError("environment.args of openenv: give either `action` or `tools: true`")
        if not self.tools:
            self.refuse_without_effect("there are no `tools`", "answer")


class OpenEnv(Task):
    """A problem is a seed. The attempt ends when the environment says so, or the model's turns are used up."""

    Options = OpenEnvOptions

    def __init__(self, tokenizer: Tokenizer, seed: int, **args: Any) -> None:
        """Raises EnvironmentSetupError for unusable arguments or a server that can't start, and MissingDependencyError."""
        super().__init__(tokenizer, seed)
        require_chat(tokenizer, "environment.kind openenv")
        self._options = options = OpenEnvOptions.read(args)
        self.template_options = check_template_options(tokenizer, options.template_options)
        self._shown = _field_or_function(options.observation, _field)
        self._action = _field_or_function(options.action, lambda name, text: {name: text})
        self._sessions, self._schemas = asyncio.Semaphore(options.sessions), list[ToolSchema]()
        try:
            from openenv.core.generic_client import GenericEnvClient  # noqa: PLC0415 - a package of few users
        except ImportError as error:
            raise MissingDependencyError(f"environment.kind openenv: {error}; pip install openenv") from error
        self._client = GenericEnvClient
        self._url = options.url or self._start(options.command or [])

    def problem(self, index: int) -> Problem:
        return _problem(zlib.crc32(f"openenv/{self.seed}/{index}".encode()) >> 2)

    def held_out(self, count: int) -> Sequence[Problem]:
        return [_problem(LARGEST_SEED - number) for number in range(count)]

    async def rollout(self, problem: Problem, client: GenerationClient) -> Rollout:
        options, rewards = self._options, list[float]()
        conversation = Conversation(client, template_options=self.template_options)
        async with self._session() as act:
            result = await act("reset", **(options.reset or {}), seed=problem.payload["seed"])
            question: ChatMessage = {"role": "user", "content": self._text(result.observation)}
            history, tools = [*with_system(options.system, []), question], await self._tools(act)

            async def respond(reply: ChatAnswer) -> list[ChatMessage]:
                nonlocal result
                messages = list[ChatMessage]()
                for action, place in self._actions(reply):
                    result = await act("step", action)
                    rewards.append(finite(result.reward or 0.0, "the reward of a step"))
                    shown = (_tool_result if options.tools else self._text)(result.observation)
                    messages.append({**place, "content": shortened(shown)})
                    if result.done:
                        return []
                return messages

            ended = await take_turns(conversation, history, respond, tools, max_turns=options.max_turns)
        metrics = conversation.metrics | {"steps": float(len(rewards)), "done": float(result.done)} | ended
        total = sum(rewards) if options.reward == "sum" else [0.0, *rewards][-1]
        return Rollout(turns=conversation.turns, reward=total, metrics=metrics)

    def _actions(self, reply: ChatAnswer) -> list[tuple[dict[str, Any], ChatMessage]]:
        """The actions of an answer, each with the message that its observation becomes, without the content."""
        if not self._options.tools:
            return [(self._action(reply.text), {"role": "user"})]
        if not reply.calls and self._options.answer:
            tool, _, argument = self._options.answer.partition(".")
            return [(_tool_call(tool, {argument: reply.text}), {"role": "user"})]
        return [(_tool_call(*call), place) for call, place in zip(reply.calls, tool_messages(reply), strict=True)]

    def _text(self, observation: dict[str, Any]) -> str:
        text = self._shown(observation)
        return text if isinstance(text, str) else msgspec.json.encode(text).decode()

    async def _tools(self, act: Act) -> list[ToolSchema]:
        """The tools, without the one that gets answers; they are listed once. Raises RolloutError if there are none."""
        if self._schemas or not self._options.tools:
            return self._schemas
        listed = (await act("step", {"type": "list_tools"})).observation.get("tools", ())
        tools = {tool["name"]: {**tool, "parameters": tool.get("input_schema")} for tool in listed}
        hidden = self._options.answer.partition(".")[0]
        if not tools or (hidden and tools.pop(hidden, None) is None):
            raise RolloutError(f"the environment has no tool {hidden or 'at all'}; it has: {', '.join(tools) or 'none'}")
        parts = ("name", "description", "parameters")
        self._schemas = [{"type": "function", "function": {part: tool[part] for part in parts}} for tool in tools.values()]
        return self._schemas

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[Act]:
        """Yields a function that calls a method of a client. It raises TimeoutError and RolloutError, in one line."""
        timeout_s = self._options.timeout_s

        async def act(method: str, *arguments: Any, **named: Any) -> Any:
            try:
                return await getattr(session, method)(*arguments, **named)
            except TimeoutError:
                raise TimeoutError(f"{method} of the environment took longer than {timeout_s:g} s") from None
            except Exception as error:
                raise RolloutError(f"{method} of the environment failed: {' '.join(str(error).split())}") from error

        async with self._sessions:
            session = self._client(
                base_url=self._url,
                connect_timeout_s=timeout_s,
                message_timeout_s=timeout_s,
                websocket_ping_interval_s=None,  # the engine's steps are in the same event loop
            )
            try:
                await act("connect")
                yield act
            finally:
                await session.close()

    def _start(self, command: list[str]) -> str:
        """Start a server on the loopback interface. Returns its address."""
        port = free_port()
        words = [word.replace("{port}", str(port)) for word in command]
        if words == command:
            raise EnvironmentSetupError("environment.args.command has no {port}, which stands for the server's port")
        if words[0] == "python":
            words[0] = sys.executable

        def listens() -> bool:
            with socket.socket() as one:
                return one.connect_ex((LOOPBACK, port)) == 0

        try:
            process = ChildProcess(words)
        except OSError as error:
            raise EnvironmentSetupError(f"environment.args.command can't be run: {error}") from error
        weakref.finalize(self, process.stop)
        if not process.wait_until(listens, START_TIMEOUT_S):
            what = f"does not listen after {START_TIMEOUT_S:g} s" if process.running else process.how_it_ended()
            raise EnvironmentSetupError(f"environment.args.command: the server ({' '.join(words)}) {what}")
        return f"http://{LOOPBACK}:{port}"


def _problem(seed: int) -> Problem:
    return Problem(id=f"seed-{seed}", payload={"seed": seed})


def _field_or_function(name: str, field: Callable[[str, Any], Any]) -> Callable[[Any], Any]:
    if names_a_function(name):
        return find_function(name)
    return partial(field, name)


def _field(name: str, observation: dict[str, Any]) -> Any:
    if name and name not in observation:
        raise RolloutError(f"an observation has no field {name!r}; it has: {', '.join(observation) or 'none'}")
    return observation[name] if name else observation


def _tool_call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "call_tool", "tool_name": name, "arguments": arguments}


def _tool_result(observation: dict[str, Any]) -> str:
    if error := observation.get("error"):
        return f"Error: {error.get('message', error)}"
    result = observation.get("result")
    if isinstance(result, dict) and "content" in result:
        return texts_of(result["content"])
    return result if isinstance(result, str) else msgspec.json.encode(result).decode()
