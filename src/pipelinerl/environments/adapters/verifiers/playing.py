"""One attempt at a row of an environment of verifiers."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar, copy_context
from functools import partial, wraps
from typing import Any, NamedTuple

from verifiers.envs.env_group import EnvGroup
from verifiers.envs.environment import Environment
from verifiers.rubrics.rubric import Rubric
from verifiers.rubrics.rubric_group import RubricGroup

from pipelinerl.environments.adapters.verifiers.client import MODEL, PolicyClient
from pipelinerl.environments.adapters.verifiers.loading import Loaded
from pipelinerl.environments.user.trial import in_daemon_thread
from pipelinerl.errors import EnvironmentSetupError, RolloutError
from pipelinerl.interfaces import GenerationClient
from pipelinerl.types import Rollout

# ------------------------------------------------------------------------------------------------------------------------
# The reward functions of an environment of verifiers: which will do, where they run, and what they raise.
#
# verifiers takes 0 for a function that raises, and writes a line to its log. Here it is noted as well: a mistake in a
# reward,
# or a judge that is away, should show in the metrics.


class RewardError(NamedTuple):
    """What a reward function raised, in a line. `of_thread`: probably only because it ran in a thread."""

    line: str
    of_thread: bool


_noted: ContextVar[list[RewardError] | None] = ContextVar("_noted", default=None)


def note_errors() -> list[RewardError]:
    """From now on, what reward functions raise in this task, or in tasks that it starts, is put on the list returned."""
    errors: list[RewardError] = []
    _noted.set(errors)
    return errors


def prepare_rubrics(environment: Environment, name: str, *, threads: bool) -> None:
    """Have the environment's reward functions watched; with `threads`, those that aren't `async` run in threads.

    Raises EnvironmentSetupError if its rollouts can't be scored one by one, or are all worth nothing.
    """
    rubrics = list({id(rubric): rubric for rubric in _rubrics(environment)}.values())
    if any(rubric.has_group_rewards or rubric.has_advantages for rubric in rubrics):
        raise EnvironmentSetupError(
            f"environment {name} has reward functions of whole groups (of states, completions, ...); here each rollout is "
            "scored by itself, so it can't be trained on"
        )
    if all(_standard(rubric) and not any(rubric.weights) for rubric in rubrics):
        raise EnvironmentSetupError(f"environment {name} has no reward function with a weight: every rollout is worth 0")
    for rubric in filter(_standard, rubrics):
        if not rubric.funcs:  # verifiers refuses to score a rollout by nothing, though not a group
            rubric.score_rollout = rubric.dummy_score_rollout
        rubric.funcs = [_watched(function, threads) for function in rubric.funcs]


def _rubrics(environment: Environment) -> Iterator[Rubric]:
    if isinstance(environment, EnvGroup):
        for inner in environment.envs:
            yield from _rubrics(inner)
    else:
        yield from _parts(environment.rubric)


def _parts(rubric: Rubric) -> Iterator[Rubric]:
    if isinstance(rubric, RubricGroup):
        for inner in rubric.rubrics:
            yield from _parts(inner)
    else:
        yield rubric


def _standard(rubric: Rubric) -> bool:
    """Whether it scores by its functions and nothing else."""
    return type(rubric).score_rollout is Rubric.score_rollout


def _watched(function: Callable[..., Any], threads: bool) -> Callable[..., Any]:
    """The same function to verifiers, which looks at its name and signature and awaits what it returns."""
    in_thread = threads and not inspect.iscoroutinefunction(function)

    @wraps(function)
    async def watched(*arguments: Any, **named: Any) -> float:
        call = partial(function, *arguments, **named)
        try:
            value = await asyncio.wrap_future(in_daemon_thread(partial(copy_context().run, call))) if in_thread else call()
            return float(await value if inspect.isawaitable(value) else value)
        except Exception as error:
            if (errors := _noted.get()) is not None:
                line = f"{watched.__name__} raised {type(error).__name__}: {' '.join(str(error).split())}"
                # So say signals, SQLite and math-verify; that is not worth 0, but our mistake.
                errors.append(RewardError(line, of_thread=in_thread and "thread" in str(error)))
            raise

    return watched


class Player:
    """Plays rows of one environment, any number at a time."""

    def __init__(self, loaded: Loaded, *, template: Mapping[str, Any], threads: bool, drop_raised: bool) -> None:
        """Raises EnvironmentSetupError for rubrics that can't score a rollout by itself."""
        prepare_rubrics(loaded.environment, loaded.name, threads=threads)
        self._name = loaded.name
        self._environment = loaded.environment
        self._template = template
        self._drop_raised = drop_raised

    async def play(self, row: Mapping[str, Any], client: GenerationClient) -> Rollout:
        """Metrics are the rubric's, the conversation's, `reward_errors` (functions that raised) and `prompt_too_long` (1: so
        the rollout ended).

        Raises what a call of the model raised, if the rollout ended with that, and RolloutError for other errors in it.
        """
        policy = PolicyClient(client, self._template)
        raised = note_errors()
        output = await self._environment.run_rollout(dict(row), policy, MODEL, sampling_args={})
        turns = policy.conversation.turns
        if (error := output["error"]) is not None:
            raise policy.failure or RolloutError(f"environment {self._name} ended with {error['error_chain_repr']}")
        if policy.too_long is not None and not turns:
            raise policy.too_long
        for line, of_thread in raised:
            if of_thread:
                raise RolloutError(f"reward function {line} (set environment.args.threads to false)")
            if self._drop_raised:
                raise RolloutError(f"reward function {line}")
        metrics = {
            **policy.conversation.metrics,
            "prompt_too_long": float(policy.too_long is not None),
            "reward_errors": float(len(raised)),
            **(output["metrics"] or {}),
        }
        return Rollout(turns=turns, reward=output["reward"], metrics=metrics)
