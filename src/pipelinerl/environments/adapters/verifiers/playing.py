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

# ---- reward functions: check them, run them in threads, record their errors
# verifiers logs a function that raises and counts it as 0. Recording the error as well makes it visible in the metrics.


class RewardError(NamedTuple):
    """The error of a reward function in one line. `of_thread`: probably caused by running in a thread."""

    line: str
    of_thread: bool


_errors: ContextVar[list[RewardError] | None] = ContextVar("_errors", default=None)


def collect_errors() -> list[RewardError]:
    """A list that from now on receives the errors of reward functions in this task and in tasks that it starts."""
    errors: list[RewardError] = []
    _errors.set(errors)
    return errors


def prepare_rubrics(environment: Environment, name: str, *, threads: bool) -> None:
    """Record the errors of the environment's reward functions; with `threads`, run those that aren't `async` in threads.

    Raises EnvironmentSetupError if rollouts can't be scored one by one, or if every reward would be 0.
    """
    rubrics = list({id(rubric): rubric for rubric in _rubrics(environment)}.values())
    if any(rubric.has_group_rewards or rubric.has_advantages for rubric in rubrics):
        raise EnvironmentSetupError(
            f"environment {name} has reward functions of whole groups (of states, completions, ...); here each rollout is "
            "scored by itself, so it can't be trained on"
        )
    if all(_is_standard(rubric) and not any(rubric.weights) for rubric in rubrics):
        raise EnvironmentSetupError(f"environment {name} has no reward function with a weight: every rollout is worth 0")
    for rubric in filter(_is_standard, rubrics):
        if not rubric.funcs:  # verifiers can't score a single rollout without functions, only a group
            rubric.score_rollout = rubric.dummy_score_rollout
        rubric.funcs = [_recording_errors(function, threads) for function in rubric.funcs]


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


def _is_standard(rubric: Rubric) -> bool:
    """Whether the rubric uses the scoring method of its base class, which only calls its functions."""
    return type(rubric).score_rollout is Rubric.score_rollout


def _recording_errors(function: Callable[..., Any], threads: bool) -> Callable[..., Any]:
    """The function with its errors recorded. Keeps name and signature, which verifiers inspects; verifiers awaits it."""
    in_thread = threads and not inspect.iscoroutinefunction(function)

    @wraps(function)
    async def wrapper(*arguments: Any, **named: Any) -> float:
        call = partial(function, *arguments, **named)
        try:
            value = await asyncio.wrap_future(in_daemon_thread(partial(copy_context().run, call))) if in_thread else call()
            return float(await value if inspect.isawaitable(value) else value)
        except Exception as error:
            if (errors := _errors.get()) is not None:
                line = f"{wrapper.__name__} raised {type(error).__name__}: {' '.join(str(error).split())}"
                # Signals, SQLite and math-verify raise such errors in threads. The thread is at fault, not the answer.
                errors.append(RewardError(line, of_thread=in_thread and "thread" in str(error)))
            raise

    return wrapper


class Player:
    """Runs rollouts of one environment, any number at a time."""

    def __init__(self, loaded: Loaded, *, template: Mapping[str, Any], threads: bool, drop_raised: bool) -> None:
        """Raises EnvironmentSetupError for rubrics that can't score single rollouts."""
        prepare_rubrics(loaded.environment, loaded.name, threads=threads)
        self._name = loaded.name
        self._environment = loaded.environment
        self._template = template
        self._drop_raised = drop_raised

    async def play(self, row: Mapping[str, Any], client: GenerationClient) -> Rollout:
        """Run one rollout.

        Metrics are the rubric's, the conversation's, `reward_errors` (number of functions that raised) and `prompt_too_long`
        (1 if that ended the rollout). If an error ended the rollout, raises the error of the model call, else RolloutError.
        """
        policy = PolicyClient(client, self._template)
        raised = collect_errors()
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
