"""Tasks from a file of examples, user functions that compute rewards, and perhaps tools: user functions, and MCP servers'.

A function is called in a process of the pool. An `async def` function, such as a judge behind an API, runs in the event loop
of the generation process instead, where many of its calls can wait at the same time.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec
from pydantic import Field

from pipelinerl.config.schema import Count, Natural, Positive, ShareBelowOne
from pipelinerl.environments.chat.tool_use import ToolError, require_chat, tool_of, use_tools
from pipelinerl.environments.data import ProblemSet, canonical, read_split
from pipelinerl.environments.options import Files, QuestionOptions, QuestionTask, listed
from pipelinerl.environments.prompts import with_system, wrong_chat
from pipelinerl.environments.single_turn import Score
from pipelinerl.environments.user.code import TOTAL, is_unreachable, score_of
from pipelinerl.environments.user.mcp_servers import McpServer, McpTools
from pipelinerl.environments.user.pool import CALL_ENDED, FunctionPool, Limits, retried
from pipelinerl.errors import EnvironmentSetupError, RolloutError
from pipelinerl.extras import require
from pipelinerl.interfaces import GenerationClient, Tokenizer
from pipelinerl.models.encoding import Message
from pipelinerl.types import Problem, Rollout, Turn, finite
from pipelinerl.user_code import describe, find_function, names_a_function

GROUP_REWARD = "group_reward"
"""The name of that function in errors, and of the metric."""

Prompt = str | Sequence[Message]


class FunctionOptions(QuestionOptions, frozen=True):
    data: Files
    """Files of examples, JSON objects, which are passed to the functions as dicts."""
    reward: str | Annotated[dict[str, float], Field(min_length=1)] | Annotated[list[str], Field(min_length=1)]
    """(completion, example) -> a finite number, a dict of `reward` and metrics, or (reward, metrics). The completion has no
    stop token, but other special tokens such as `<think>`, and may be empty. Several functions with their weights:
    `{rewards.py:right: 1.0, rewards.py:brief: 0.2}`; in a list, each has the weight 1."""
    group_reward: str = ""
    """(completions, example) -> a list of numbers, which are added to the rewards of a group's rollouts in training."""
    prompt: str = "prompt"
    """The field with the prompt, or a function, which is called in this process: (example) -> a text, which is the question,
    or chat messages."""
    held_out: ShareBelowOne | Files = 0.1
    """Examples for evaluation, never used in training: a share of `data` (by a hash of the prompt), or files of examples."""
    isolate: bool = True
    """Call the functions in processes with limits. false: in this process, while the engine waits."""
    workers: Count = 2
    """How many processes there may be."""
    concurrency: Count = 64
    """How many calls of `async def` functions, which run in the generation process, may wait at the same time."""
    timeout_s: Positive = 10.0
    """How long a call may take."""
    retries: Natural = 2
    """How often a call is made again, after 1, 4, 16, ... s, if it raised the error of a server that can't be reached."""
    memory_mb: Count = 1024
    """How much memory a call may use beyond what its process uses after the imports."""
    writes: list[str] | None = None
    """The only folders below which a call, and what it starts, can write, make and remove files: [] for none. null: not
    limited. Needs Linux 5.13 or newer. Calls of `async def` functions are not limited."""
    ended_reward: float | None = None
    """Reward of an answer whose reward function exceeded a limit or crashed. null: the rollout is dropped, as it is when the
    function raises an error or does not return a number."""

    @property
    def tools(self) -> tuple[bool, bool]:
        """Whether there are tools that are called in processes, and tools of servers."""
        return False, False

    def pool(self, functions: Mapping[str, str]) -> FunctionPool:
        """A pool for these functions (`file.py:function`), by name."""
        given = {name: getattr(self, name) for name in ("workers", "timeout_s", "retries", "memory_mb", "writes")}
        return FunctionPool(functions, msgspec.convert(given, Limits))


class Functions:
    """Calls user functions by name: in processes with limits, or in this one if they are `async def` or not `isolate`d."""

    def __init__(self, specs: Mapping[str, str], options: FunctionOptions) -> None:
        """Raises EnvironmentSetupError."""
        self._specs, self._options = specs, options
        self._found = {name: find_function(spec, allow_async=True) for name, spec in specs.items()}
        self._async = {name for name, function in self._found.items() if inspect.iscoroutinefunction(function)}
        self.any_async = bool(self._async)
        self._pooled = {name: spec for name, spec in specs.items() if options.isolate and name not in self._async}
        self.any_pooled = bool(self._pooled)
        self._pool = options.pool(self._pooled)  # starts a process at the first call
        self._slots = asyncio.Semaphore(options.concurrency)

    async def call(self, name: str, *arguments: Any) -> Any:
        """What the function returns. Retries and errors are as in `FunctionPool.call`."""
        if name in self._pooled:
            return await self._pool.call(name, *arguments)
        return await retried(functools.partial(self._call_here, name, *arguments), self._options.retries)

    async def _call_here(self, name: str, *arguments: Any) -> Any:
        function, timeout_s = self._found[name], self._options.timeout_s
        limit = asyncio.timeout(timeout_s)
        try:
            if name not in self._async:
                return function(*arguments)
            async with self._slots, limit:
                return await function(*arguments)
        except Exception as error:
            if limit.expired():
                what = f"{name} ({Path(self._specs[name]).name})"
                raise TimeoutError(f"{what}: it took longer than {timeout_s:g} s") from None
            kind = ConnectionError if is_unreachable(error) else RuntimeError
            raise kind(f"{name}: {describe(error, self._specs[name])}") from error


class Function(ProblemSet, QuestionTask):
    """Problems are the lines of a file; a user function computes the reward of an answer."""

    Options: ClassVar[type[FunctionOptions]] = FunctionOptions

    def __init__(self, tokenizer: Tokenizer, seed: int, **args: Any) -> None:
        """Raises EnvironmentSetupError for unusable data or functions."""
        self._options = options = self.Options.read(args)
        QuestionTask.__init__(self, tokenizer, seed, options)
        named = names_a_function(options.prompt)
        self._prompt_function: Callable[..., Any] | None = find_function(options.prompt) if named else None
        self._field = "" if named else options.prompt
        ProblemSet.__init__(self, read_split(options.data, options.held_out, self._check, self._key), f"function/{seed}")
        given = options.reward
        weights = given if isinstance(given, dict) else dict.fromkeys([given] if isinstance(given, str) else given, 1.0)
        # By the names in errors and metrics: of several functions, each one's own.
        specs = {TOTAL if isinstance(given, str) else spec.rpartition(":")[2]: spec for spec in weights}
        if not isinstance(given, str) and len(specs) < len(given):
            raise EnvironmentSetupError("environment.args.reward: two functions have the same name; rename one of them")
        if options.group_reward and GROUP_REWARD in specs:
            raise EnvironmentSetupError(f"environment.args.reward: a function can't be called {GROUP_REWARD}; rename it")
        self._weights = dict(zip(specs, weights.values(), strict=True))
        others = {GROUP_REWARD: options.group_reward} if options.group_reward else {}
        self._functions = Functions(specs | others, options)
        self.costs = self._functions.any_async
        pooled, served = options.tools
        pooled = pooled or self._functions.any_pooled
        if not pooled:
            options.refuse_without_effect("no function is called in a process", "workers", "memory_mb", "writes")
        if not self._functions.any_async and not served:
            options.refuse_without_effect("no function is `async def`", "concurrency")
        if not self._functions.any_async and not pooled:
            limits = ("ended_reward",) if served else ("timeout_s", "ended_reward")
            options.refuse_without_effect("calls in this process have no limits", *limits)

    def prompt(self, problem: Problem) -> Prompt:
        if self._prompt_function is None:
            made = problem.payload[self._field]
        else:
            made = self._prompt_function(problem.payload)
            if wrong := self._wrong_prompt(made):
                raise RolloutError(f"prompt returned {wrong}")
        return self.ask(made) if isinstance(made, str) else with_system(self._options.system, made)

    async def judge(self, problem: Problem, turn: Turn) -> Score:
        return await self._score(problem, turn.text)

    async def score_group(self, problem: Problem, rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
        if not self._options.group_reward:
            return rollouts
        texts = [rollout.turns[-1].text for rollout in rollouts]
        added = await self._functions.call(GROUP_REWARD, texts, problem.payload)
        if not isinstance(added, Sequence) or isinstance(added, str) or len(added) != len(texts):
            raise RolloutError(f"{GROUP_REWARD} returned {added!r:.60}, not a list of {len(texts)} numbers")
        scored = []
        for number, (rollout, entry) in enumerate(zip(rollouts, added, strict=True)):
            value = finite(entry, f"{GROUP_REWARD}[{number}]")
            metrics = {**rollout.metrics, GROUP_REWARD: value}
            scored.append(msgspec.structs.replace(rollout, reward=rollout.reward + value, metrics=metrics))
        return scored

    async def _score(self, problem: Problem, text: str) -> Score:
        """The sum of the rewards times their weights. The functions run at the same time; each of several is a metric.

        With `ended_reward`, another metric is whether a call was ended.
        """
        calls = [asyncio.ensure_future(self._functions.call(name, text, problem.payload)) for name in self._weights]
        ended_reward = self._options.ended_reward
        try:
            values = await asyncio.gather(*calls)
        except CALL_ENDED:
            if ended_reward is None:
                raise
            return ended_reward, {"reward_ended": 1.0}
        finally:
            for call in calls:
                call.cancel()
        scores = {name: score_of(value, name) for name, value in zip(self._weights, values, strict=True)}
        metrics = {name: reward for name, (reward, _) in scores.items()} if len(scores) > 1 else {}
        for name, (_, own) in scores.items():
            if known := metrics.keys() & own.keys():
                raise RolloutError(f"{name} returned the metric {min(known)!r}, which another function has too")
            metrics |= own
        metrics |= {} if ended_reward is None else {"reward_ended": 0.0}
        return sum(self._weights[name] * reward for name, (reward, _) in scores.items()), metrics

    def _check(self, example: dict[str, Any]) -> str | None:
        if self._prompt_function is not None:
            return None
        if self._field not in example:
            fields = ", ".join(example) or "none"
            return f"has no field `{self._field}` for the prompt (it has: {fields}); set environment.args.prompt"
        wrong = self._wrong_prompt(example[self._field])
        return f"has {wrong} as its `{self._field}`" if wrong else None

    def _wrong_prompt(self, value: object) -> str | None:
        """A description of `value` if it is not a valid prompt; else None."""
        if isinstance(value, str):
            return None if value else "an empty text"
        try:
            messages = msgspec.convert(value, list[dict[str, str]])
        except msgspec.ValidationError:
            return f"a {type(value).__name__} that is neither a text nor chat messages"
        if not messages or any(message.keys() != {"role", "content"} for message in messages):
            return "chat messages that are not objects of `role` and `content`"
        if self._options.chat is False:
            return "chat messages, but environment.args.chat is false"
        return wrong_chat(messages, self._options.system)

    def _key(self, problem: Problem) -> str:
        """Identifies a problem: its prompt, or the whole example if a function makes the prompt."""
        return canonical(problem.payload[self._field] if self._field else problem.payload)


# ---- user functions as tools


class ToolsOptions(FunctionOptions, frozen=True):
    functions: str | list[str] = ""
    """User functions as tools, described to the model by their type hints and docstrings. The limits of calls also apply to
    them."""
    mcp_servers: dict[str, McpServer] | None = None
    """Servers with tools, by name: `{calculator: {command: python, args: [server.py]}, search: {url: "https://..."}}`
    (extra `mcp`). `timeout_s`, `retries` and `concurrency` also apply to their calls."""
    max_turns: Count = 6
    """Turns of the model, including the answer."""

    @property
    def tools(self) -> tuple[bool, bool]:
        return self.isolate and bool(self.functions), bool(self.mcp_servers)

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if not self.functions and not self.mcp_servers:
            raise EnvironmentSetupError("environment.args of tools: give `functions`, `mcp_servers` or both")
        for name, server in (self.mcp_servers or {}).items():
            server.check(f"environment.args.mcp_servers.{name}")


class Tools(Function):
    """A `Function` whose model may call tools before it answers; the reward judges the last turn's text.

    If a tool raises an error or exceeds a limit, the model is shown it.
    """

    Options = ToolsOptions

    def __init__(self, tokenizer: Tokenizer, seed: int, **args: Any) -> None:
        """Raises EnvironmentSetupError for unusable arguments, and for a model without a chat template."""
        require_chat(tokenizer, "environment.kind tools")
        super().__init__(tokenizer, seed, **args)
        options = ToolsOptions.read(args)
        self._max_turns = options.max_turns
        specs = listed(options.functions) if options.functions else []
        self._tools = [tool_of(find_function(spec)) for spec in specs]
        if specs and options.isolate:
            pool = options.pool({tool.name: spec for tool, spec in zip(self._tools, specs, strict=True)})
            self._tools = [tool._replace(call=functools.partial(_call_in_pool, pool, tool.name)) for tool in self._tools]
        if options.mcp_servers:
            require("mcp", "environment.args.mcp_servers")
            limits = {name: getattr(options, name) for name in ("timeout_s", "retries", "concurrency")}
            self._tools += McpTools(options.mcp_servers, **limits).tools
        names = [tool.name for tool in self._tools]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise EnvironmentSetupError(
                f"environment.args has two tools called {repeated[0]!r}: rename one, or choose other `tools` of its server"
            )

    async def rollout(self, problem: Problem, client: GenerationClient) -> Rollout:
        prompt = self.prompt(problem)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt

        async def judge(answer: str, _: object) -> tuple[Score, None]:
            return await self._score(problem, answer), None

        return await use_tools(self, client, messages, self._tools, max_turns=self._max_turns, judge=judge)


async def _call_in_pool(pool: FunctionPool, name: str, arguments: dict[str, Any]) -> Any:
    """Raises ToolError for what the model is shown."""
    try:
        return await pool.call(name, **arguments)
    except (*CALL_ENDED, ConnectionError, RuntimeError, RolloutError) as error:
        raise ToolError(re.sub(rf"^{name}( \(\S*\))?:? ", "", str(error))) from None
