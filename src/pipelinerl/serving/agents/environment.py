"""The environment `agent`: each attempt runs an agent, i.e. a program that calls OpenAI's API at a given address."""

from __future__ import annotations

import asyncio
import inspect
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from pipelinerl.config.schema import Count, ShareBelowOne
from pipelinerl.environments.data import ProblemSet, by_payload, read_split
from pipelinerl.environments.options import Arguments, Files, Inner, Options
from pipelinerl.environments.prompts import check_template_options
from pipelinerl.environments.registry import make_inner
from pipelinerl.environments.user.code import in_daemon_thread, loop_in_thread, score_of
from pipelinerl.errors import EnvironmentSetupError, RolloutError
from pipelinerl.extras import require
from pipelinerl.interfaces import Environment, GenerationClient, Tokenizer
from pipelinerl.types import Problem, Rollout
from pipelinerl.user_code import describe, find_function

API_KEY = "rollout"
"""A placeholder, as clients of OpenAI's API require a key. Requests are authorised by the secret in their address."""


class AgentOptions(Options, frozen=True):
    run: str
    """(problem, base_url, api_key) -> a finite number, a dict of `reward` and metrics, or (reward, metrics). Attempts run at
    once: of a plain function in threads, of `async def` in one event loop. All requests to `base_url` are trained on."""
    data: Files | None = None
    """Files of problems, one per line, passed to `run` as dicts."""
    held_out: ShareBelowOne | Files = 0.1
    """Problems for evaluations only, never trained on: a share of `data`, or files."""
    problems: Inner | None = None
    """Instead of `data`: another environment, `{kind: ..., args: {...}}`, whose problems are passed to `run`."""
    threads: Count = 256
    """Largest number of concurrent attempts."""
    sampling: Literal["refuse", "ignore"] = "refuse"
    """What becomes of an agent's own `temperature`, `top_p`, `top_k`, `min_p`, `seed` and penalties: the run's sampling
    applies in any case. With `ignore`, the metric `sampling_ignored` counts the requests that asked for another one."""
    template_options: Arguments | None = None
    """Options of the model's chat template, such as `{enable_thinking: false}`."""

    def model_post_init(self, _: Any) -> None:
        if (self.data is None) == (self.problems is None):
            raise EnvironmentSetupError("environment.args of agent: give either `data` or `problems`")
        if self.data is None:
            self.refuse_without_effect("the environment of `problems` holds out its own", "held_out")


class AgentEnvironment:
    """An attempt is a call of a user function, which gets the address of an API served by the model in training.

    All attempts run in one event loop.
    """

    Options = AgentOptions

    def __init__(self, tokenizer: Tokenizer, seed: int, **args: Any) -> None:
        """Raises EnvironmentSetupError for a bad function, data or arguments, MissingDependencyError without the extra."""
        options = AgentOptions.read(args)
        self._function, self._spec = find_function(options.run, allow_async=True), options.run
        self._places = asyncio.Semaphore(options.threads)
        self._agents_loop = loop_in_thread("async agents") if inspect.iscoroutinefunction(self._function) else None
        if self._agents_loop is not None:
            weakref.finalize(self, self._agents_loop.call_soon_threadsafe, self._agents_loop.stop)
        self._template_options = check_template_options(tokenizer, options.template_options)
        self._ignore_sampling = options.sampling == "ignore"
        self._source: Environment | ProblemSet
        if options.problems is not None:
            inner = options.problems
            self._source = make_inner("environment.args.problems", inner.kind, inner.args, tokenizer, seed)
        else:
            parts = read_split(options.data or [], options.held_out, lambda _: None, by_payload)
            self._source = ProblemSet(parts, f"agent/{seed}")
        require("serve", "environment.kind agent")
        from pipelinerl.serving.agents.gateway import Gateway  # noqa: PLC0415 - needs an extra

        self._gateway = Gateway()
        weakref.finalize(self, self._gateway.close)

    @property
    def training_count(self) -> int | None:
        return getattr(self._source, "training_count", None)

    def problem(self, index: int) -> Problem:
        return self._source.problem(index)

    def held_out(self, count: int) -> Sequence[Problem]:
        return self._source.held_out(count)

    async def rollout(self, problem: Problem, client: GenerationClient) -> Rollout:
        from pipelinerl.serving.agents.gateway import AgentSession  # noqa: PLC0415 - as in `__init__`

        session = AgentSession(client, self._template_options, ignore_sampling=self._ignore_sampling)
        with self._gateway.serving(session) as base_url:
            returned = await self._call(dict(problem.payload), base_url, API_KEY)
        reward, metrics = score_of(returned, "the agent")
        conversation = session.conversation
        if not conversation.answers:
            raise RolloutError("the agent sent no request to the model at `base_url`")
        ignored = {"sampling_ignored": float(session.ignored)} if self._ignore_sampling else {}
        ignored["cancelled_turns"] = float(session.made - len(conversation.turns))
        return Rollout(turns=conversation.turns, reward=reward, metrics={**conversation.metrics, **ignored, **metrics})

    async def _call(self, *arguments: Any) -> Any:
        """The function's result. Raises RuntimeError, with a one-line message, if the function raised.

        A plain function is called in a thread of its own. Threads can't be killed: a call that never returns remains until
        the process ends (threads are daemons, so it can end), but its calls of the model are refused. All calls of an
        `async def` function run in one event loop, because the clients that they share belong to it. They can be cancelled.
        """
        async with self._places:
            try:
                if self._agents_loop is not None:
                    result = asyncio.run_coroutine_threadsafe(self._function(*arguments), self._agents_loop)
                else:
                    result = in_daemon_thread(partial(self._function, *arguments))
                return await asyncio.wrap_future(result)
            except BaseException as error:  # it ends only this call
                task = asyncio.current_task()
                if isinstance(error, GeneratorExit) or (task is not None and task.cancelling()):
                    raise
                known = isinstance(error, Exception)
                why = describe(error, self._spec) if known else f"it raised {type(error).__name__}"
                raise RuntimeError(f"{self._spec}: {why}") from error
