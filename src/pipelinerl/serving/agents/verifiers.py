"""Environments of the package `verifiers` (https://github.com/PrimeIntellect-ai/verifiers): its API v1, unmodified.

    Env.run_slot ──▶ harness, a process or a coroutine ──HTTP──▶ verifiers' server ──HTTP──▶ gateway ──▶ the rollout's client
    (one event loop in a thread, for all episodes)

An attempt is an episode of verifiers. All episodes call the model at one address, because verifiers never closes the client
of an address. A call names its trace, that is, the run of an agent; each has a session of its own. Trained on is what the
gateway delivered. Of a trace, only the rewards and the metrics are used. verifiers takes seconds to import.
"""

from __future__ import annotations

import asyncio
import os
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from functools import cached_property
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from pydantic import ValidationError

from pipelinerl.config.schema import Count, ShareBelowOne
from pipelinerl.environments.chat.tool_use import require_chat
from pipelinerl.environments.data import ProblemSet, canonical, split
from pipelinerl.environments.options import Arguments, Options
from pipelinerl.environments.prompts import check_template_options
from pipelinerl.environments.user.code import end_loop, loop_in_thread
from pipelinerl.errors import EnvironmentSetupError, RolloutError
from pipelinerl.extras import require
from pipelinerl.interfaces import GenerationClient, Tokenizer
from pipelinerl.types import Problem, Rollout, Turn
from pipelinerl.user_code import describe, import_code

if TYPE_CHECKING:
    from pipelinerl.serving.agents.gateway import AgentSession

ABORT_S = 0.8
"""How long a rollout that was cancelled waits for its processes to end: less than the actor waits for the rollout."""
CLOSE_S = 10.0
NO_KEY = "PIPELINERL_NO_KEY"
"""A variable that is not set. By default, verifiers sends the key of a service of its makers."""


class VerifiersOptions(Options, frozen=True):
    env: Arguments
    """The settings of verifiers' own `[env]` table: `{taskset: {id: owner/name}, id: best-of-n, agent: {harness: {id: bash},
    max_turns: 6}, timeout: {episode: 60}}`. An `id` names an installed package, or is `path/to/file.py`. Agents run as
    processes of this machine (`runtime: {type: subprocess}`), unless their settings say otherwise."""
    tasks: Count | None = None
    """Use only the first so many tasks. A taskset without an end needs it."""
    held_out: ShareBelowOne | Arguments = 0.1
    """Tasks for evaluations only, never trained on: a share (by a hash of the task), or the settings of the taskset in which
    they differ from the others, such as `{split: test}`."""
    episodes: Count = 64
    """Largest number of concurrent episodes. Each may be several processes."""
    sampling: Literal["refuse", "ignore"] = "refuse"
    """What becomes of a harness's own `temperature`, `top_p`, ...: as in `agent`."""
    renderer: Arguments | None = None
    """Have verifiers turn chats into token ids and read tool calls, with this renderer of the package `renderers`: `{name:
    qwen3.5}`, for tool calls of another form than Hermes'. null: the model's chat template does, as for all other kinds."""
    template_options: Arguments | None = None
    """Options of the model's chat template, such as `{enable_thinking: false}`."""


class Verifiers(ProblemSet):
    """Problems are the tasks of a taskset; an attempt is an episode of its environment."""

    Options = VerifiersOptions

    def __init__(self, tokenizer: Tokenizer, seed: int, **args: Any) -> None:
        """Raises MissingDependencyError, and EnvironmentSetupError if the environment can't be built or trained on."""
        options = VerifiersOptions.read(args)
        require("verifiers", "environment.kind verifiers")
        if options.renderer is None:
            require_chat(tokenizer, "environment.kind verifiers")
        else:
            options.refuse_without_effect("a renderer does not use the chat template", "template_options")
        self._template_options = check_template_options(tokenizer, options.template_options)
        self._ignore_sampling = options.sampling == "ignore"
        given = "renderer"
        try:
            self._client = _client_config(options.renderer, tokenizer)
            given = "env"
            self._env, training, held_out = _load(options)
        except EnvironmentSetupError:
            raise
        except Exception as error:
            raise EnvironmentSetupError(f"environment.args.{given}: {_one_line(error, options.env)}") from error
        super().__init__(split(training, held_out, _key, f"taskset {self._env.config.taskset.id}"), f"verifiers/{seed}")
        from pipelinerl.serving.agents.gateway import Gateway  # noqa: PLC0415 - needs an extra

        self._sessions: weakref.WeakValueDictionary[str, AgentSession] = weakref.WeakValueDictionary()  # by trace
        self._gateway, self._address = Gateway(), ExitStack()
        self._episodes = _Episodes(self._env, options.episodes)
        weakref.finalize(self, _close, self._episodes, self._address, self._gateway)

    async def rollout(self, problem: Problem, client: GenerationClient) -> Rollout:
        """Raises RolloutError if the episode failed, or no agent in training called the model."""
        from pipelinerl.serving.agents.gateway import AgentSession  # noqa: PLC0415 - as in `__init__`

        loop, own = asyncio.get_running_loop(), dict[str, AgentSession]()

        def begun(trace: Any) -> None:
            options, ignore = self._template_options, self._ignore_sampling
            own[trace.id] = self._sessions[trace.id] = AgentSession(client, options, ignore_sampling=ignore, loop=loop)

        try:
            episode = await self._episodes.run(_task(self._env, problem.payload), self._context, begun)
        finally:
            for session in list(own.values()):
                session.close()
        if not self._env.complete(episode):
            errors = [error for trace in episode.traces if not trace.ok for error in trace.errors] + episode.errors
            why = (
                f"{errors[-1].type}: {' '.join(errors[-1].message.split())[:500]}" if errors else "verifiers gives no reason"
            )
            raise RolloutError(f"the episode failed: {why}")
        trained = [one for one in episode.traces if one.ok and one.agent.trainable and own[one.id].conversation.answers]
        if not trained:
            raise RolloutError("no agent that is trained called the model")
        return _rollout(trained, [own[trace.id] for trace in trained], _metrics(episode.traces))

    @cached_property
    def _context(self) -> Any:
        """What verifiers needs to call the model."""
        import verifiers.v1 as vf  # noqa: PLC0415 - takes seconds

        from pipelinerl.serving.agents.gateway import MODEL  # noqa: PLC0415 - as in `__init__`

        url = self._address.enter_context(self._gateway.serving(self._sessions))
        return vf.ModelContext(MODEL, self._client.model_copy(update={"base_url": url}), vf.SamplingConfig())


# ---- building an environment


def _load(options: VerifiersOptions) -> tuple[Any, list[Problem], float | list[Problem]]:
    """The environment, its tasks, and what `split` takes for the held-out ones. Raises any exception."""
    import verifiers.v1 as vf  # noqa: PLC0415 - takes seconds
    from verifiers.v1.utils.compile import validate_pairing  # noqa: PLC0415 - the same

    given = _with_modules(options.env)
    config = vf.resolve_env_config(given)
    agents = {name: agent for name, agent in config if isinstance(agent, vf.AgentConfig)}
    for name, agent in agents.items():
        asked = agent.sampling.model_dump(exclude_none=True).keys() - {"max_tokens"} if agent.sampling else ()
        if asked and agent.client is None and options.sampling == "refuse":
            why = "the run file says how the model in training is sampled: leave it out, or set environment.args.sampling"
            raise EnvironmentSetupError(f"environment.args.env.{name}.sampling.{min(asked)}: {why}")
        if "runtime" not in agent.model_fields_set:
            agents[name] = agent.model_copy(update={"runtime": vf.SubprocessConfig()})
    config = config.model_copy(update=agents)
    for name, harness in config.agent_harnesses().items():
        validate_pairing(vf.load_harness(harness), vf.Task, agents[name].runtime)
    env = vf.load_environment(config)
    training = _problems(env.taskset, options.tasks, config.taskset.id)
    if not training:
        raise EnvironmentSetupError(f"taskset {config.taskset.id} has no tasks")
    first = _task(env, training[0].payload)
    if not first.hooks("reward") and not first.plugged_judges() and type(env).finalize is vf.Env.finalize:
        raise EnvironmentSetupError(f"neither a task of {config.taskset.id} nor its environment gives a reward")
    if isinstance(options.held_out, float):
        return env, training, options.held_out
    other = type(config.taskset).model_validate(given["taskset"] | options.held_out)
    return env, training, _problems(vf.load_taskset(other), options.tasks, f"{config.taskset.id}/held-out")


def _problems(taskset: Any, most: int | None, name: str) -> list[Problem]:
    if most is None and not taskset.bounded:
        raise EnvironmentSetupError(f"taskset {name} has no end: set environment.args.tasks")
    problems = []
    for number, task in enumerate(islice(taskset, most)):
        payload = task.data.model_dump(mode="json", exclude_defaults=True)
        if not number and type(task.data).model_validate(payload) != task.data:
            raise EnvironmentSetupError(f"a task of {name} has fields that are not JSON, or that are left out of it")
        problems.append(Problem(id=f"{name}/{number}", payload=payload))
    return problems


def _key(problem: Problem) -> str:
    """Identifies a problem: its task without the place in the taskset."""
    return canonical({name: value for name, value in problem.payload.items() if name != "idx"})


def _task(env: Any, payload: Mapping[str, Any]) -> Any:
    """The task of a payload, made as verifiers' own server makes it from a request."""
    kind = type(env.taskset).task_type()
    return kind(kind.data_type().model_validate(payload), env.config.taskset.task)


def _client_config(renderer: Arguments | None, tokenizer: Any) -> Any:
    """The client that verifiers makes, still without an address."""
    import verifiers.v1 as vf  # noqa: PLC0415 - takes seconds

    if renderer is None:
        return vf.EvalClientConfig(base_url="", api_key_var=NO_KEY)
    from renderers import create_renderer  # noqa: PLC0415 - the same

    name = str(tokenizer.name_or_path)
    config = vf.TrainClientConfig(base_url="", api_key_var=NO_KEY, renderer=renderer, renderer_model_name=name)
    create_renderer(tokenizer, config.renderer)  # raises an error if it does not fit the tokenizer
    return config


def _with_modules(value: Any) -> Any:
    """The settings, with files in the place of ids imported and named as verifiers finds them."""
    if isinstance(value, list):
        return [_with_modules(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if value.get("id", "") is None:
        raise EnvironmentSetupError('environment.args.env: an `id` is null; the harness of that name is written "null"')
    return {
        key: _module(entry) if key == "id" and str(entry).endswith(".py") else _with_modules(entry)
        for key, entry in value.items()
    }


def _module(file: str) -> str:
    """Import a file as a module of its name, as verifiers requires. Servers of tools are processes that import it, too."""
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise EnvironmentSetupError(f"there is no file {path} (a path is relative to the working directory, {Path.cwd()})")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(path.parent)]))
    if path.stem != path.stem.lower() or Path(str(import_code(path.stem).__file__)).resolve() != path:
        raise EnvironmentSetupError(
            f"{file}: verifiers finds another module, or none, by this name; rename it: my_taskset.py"
        )
    return path.stem


def _one_line(error: Exception, env: Mapping[str, Any]) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {' '.join(first['msg'].split())}"
    taskset = env.get("taskset")
    return describe(error, f"{taskset.get('id') if isinstance(taskset, dict) else ''}:")


# ---- episodes


class _Episodes:
    """Runs episodes, in an event loop in a thread: it handles HTTP, and waits for processes. Starts at the first episode."""

    def __init__(self, env: Any, most: int) -> None:
        self._env, self._places = env, asyncio.Semaphore(most)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._serving: asyncio.Future[Any] | None = None
        self._stack = AsyncExitStack()

    async def run(self, task: Any, context: Any, begun: Callable[[Any], None]) -> Any:
        """One episode. `begun` is called with each trace, in the thread. Cancelling this ends the episode's processes."""
        if self._loop is None:
            self._loop = loop_in_thread("episodes")
        here, ended = asyncio.get_running_loop(), asyncio.Event()

        async def play() -> Any:
            try:
                async with self._places:
                    if self._serving is None:
                        self._serving = asyncio.ensure_future(self._stack.enter_async_context(self._env.serving()))
                    await asyncio.shield(self._serving)
                    (slot,) = self._env.slots(task)
                    return await self._env.run_slot(slot, context, on_trace=begun)
            finally:
                with suppress(RuntimeError):  # `here` is closed
                    here.call_soon_threadsafe(ended.set)

        try:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(play(), self._loop))
        except asyncio.CancelledError:
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), ABORT_S)
            raise

    def close(self) -> None:
        """End all episodes, their processes, and verifiers' servers."""
        if self._loop is not None:
            end_loop(self._loop, CLOSE_S, self._stack)


def _close(episodes: _Episodes, address: ExitStack, gateway: Any) -> None:
    episodes.close()
    address.close()
    gateway.close()


def _rollout(traces: Sequence[Any], sessions: Sequence[AgentSession], metrics: Mapping[str, float]) -> Rollout:
    """The turns of the traces.

    A turn is credited with all that is earned from then on. So each of several traces earns its reward less that of the next
    one: from there on, this adds up to its own reward.
    """
    turns: list[Turn] = []
    for number, (trace, session) in enumerate(zip(traces, sessions, strict=True)):
        turns += session.conversation.turns
        if len(traces) > 1:
            later = traces[number + 1].reward if number + 1 < len(traces) else 0.0
            turns[-1] = msgspec.structs.replace(turns[-1], reward=trace.reward - later)
    counts: dict[str, float] = defaultdict(float, new_segments=len(traces) - 1)
    for session in sessions:
        for name, value in session.conversation.metrics.items():
            counts[name] += value
        counts["cancelled_turns"] += session.made - len(session.conversation.answers)
        counts["sampling_ignored"] += session.ignored
    return Rollout(turns=tuple(turns), reward=traces[0].reward, metrics={**counts, **metrics})


def _metrics(traces: Sequence[Any]) -> dict[str, float]:
    """Rewards without their weights, metrics, and whether a time limit ended the agent: means over the traces of an agent.

    If the agents have several names, the metrics begin with them.
    """
    found = defaultdict(list)
    names = {trace.agent.name for trace in traces}
    for trace in traces:
        prefix = f"{trace.agent.name}/" if len(names) > 1 else ""
        rewards = {name: one.score for name, one in trace.rewards.items() if one is not None}
        total = {"reward": trace.reward} if len(traces) > 1 else {}
        for name, value in {**total, "timed_out": trace.is_timeout, **rewards, **trace.metrics}.items():
            if value is not None:
                found[prefix + name].append(float(value))
    return {name: fmean(values) for name, values in found.items()}
