"""Held-out problems, answered once each through the engine that trains: same code path, none of it trained on."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from pipelinerl.actor.client import EngineClient, RolloutClient, derive_seed, let_rollouts_run
from pipelinerl.actor.rollouts import Failure, TimeLimits, attempt
from pipelinerl.errors import EnvironmentSetupError, RunDirectoryError
from pipelinerl.interfaces import Environment, Tokenizer
from pipelinerl.types import (
    FinishReason,
    Problem,
    Rollout,
    SamplingParams,
    VersionSpan,
    spans_from_versions,
    versions_from_spans,
)

IDLE_S = 0.002


class RecordSink(Protocol):
    """Where readable records go, one a line (`files.JsonLines`)."""

    def write(self, record: Any) -> None: ...


class EvaluatedProblem(msgspec.Struct, frozen=True, kw_only=True):
    """One held-out problem and its answer.

    Of several turns, `prompt` is the first one's and `completion` all the model's texts in order; `token_ids`,
    `weight_versions` and `length` are over all sampled tokens. An attempt that failed has reward 0 and says why.
    """

    problem_id: str
    reward: float
    prompt: str = ""
    completion: str = ""
    token_ids: tuple[int, ...] = ()
    weight_versions: tuple[VersionSpan, ...] = ()
    length: int = 0
    finish_reason: FinishReason | None = None
    failure: str | None = None


@dataclass(frozen=True)
class Evaluation:
    """`reward` is the mean over all problems, failed attempts as 0; None without problems. `failed` is by reason."""

    problems: tuple[EvaluatedProblem, ...]
    reward: float | None
    failed: dict[str, int]


async def evaluate(
    environment: Environment,
    problems: Sequence[Problem],
    *,
    client: EngineClient,
    tokenizer: Tokenizer,
    sampling: SamplingParams,
    limits: TimeLimits,
    slots: int,
    records: RecordSink,
    name: str = "evaluation",
    on_progress: Callable[[int], None] = lambda _done: None,
) -> Evaluation:
    """Answer each problem once, at most `slots` at a time, stepping the engine until all are done.

    Nothing else may be using the engine. Seeds depend on a problem's place in `problems` alone, so that evaluations of
    different weights, and of different runs, differ by their weights only. `on_progress` is called after every engine
    step with the number of problems done. Records are written at the end, in the order of `problems`.
    """
    waiting = deque(enumerate(problems))
    running: dict[asyncio.Task[Rollout | Failure], int] = {}
    done: dict[int, EvaluatedProblem] = {}
    try:
        while waiting or running:
            while waiting and len(running) < slots:
                number, problem = waiting.popleft()
                seed = derive_seed("evaluation", number)
                view = RolloutClient(client, tokenizer, sampling, name=f"{name}.{number}", seed=seed)
                running[asyncio.create_task(attempt(environment, problem, view, limits))] = number
            await let_rollouts_run(2)
            if not await client.step():
                await asyncio.sleep(IDLE_S)
            for task in [task for task in running if task.done()]:
                number = running.pop(task)
                done[number] = evaluated(problems[number], task.result(), tokenizer)
            on_progress(len(done))
    finally:
        for task in running:
            task.cancel()
    answered = tuple(done[number] for number in range(len(problems)))
    for record in answered:
        write_record(records, record)
    reward = sum(record.reward for record in answered) / len(answered) if answered else None
    failed = Counter(record.failure.partition(":")[0] for record in answered if record.failure is not None)
    return Evaluation(answered, reward, dict(failed))


def write_record(records: RecordSink, record: object) -> None:
    """Raises RunDirectoryError when it can't be written (a full disk)."""
    try:
        records.write(record)
    except OSError as error:
        raise RunDirectoryError(
            f"can't write a record of a rollout: {error.strerror or error}; make room and resume"
        ) from error


def held_out_problems(environment: Environment, count: int) -> Sequence[Problem]:
    """The environment's first `count` held-out problems. Raises EnvironmentSetupError if it can't give them."""
    try:
        problems = tuple(environment.held_out(count))
    except Exception as error:
        raise EnvironmentSetupError(
            f"held_out({count}) of the environment raised {type(error).__name__}: {error}"
        ) from error
    wrong = [problem for problem in problems if not isinstance(problem, Problem)]
    if wrong or len(problems) > count:
        what = f"a {type(wrong[0]).__name__} among them" if wrong else f"{len(problems)} of them"
        raise EnvironmentSetupError(f"held_out({count}) of the environment must return at most {count} Problems, not {what}")
    return problems


def evaluated(problem: Problem, outcome: Rollout | Failure, tokenizer: Tokenizer) -> EvaluatedProblem:
    """The record of one answer."""
    if isinstance(outcome, Failure):
        return EvaluatedProblem(problem_id=str(problem.id), reward=0.0, failure=f"{outcome.reason}: {outcome.message}")
    completions = [turn.completion for turn in outcome.turns]
    token_ids = tuple(token_id for completion in completions for token_id in completion.token_ids)
    versions = [
        version
        for completion in completions
        for version in versions_from_spans(completion.weight_versions, len(completion.token_ids))
    ]
    return EvaluatedProblem(
        problem_id=str(problem.id),
        reward=outcome.reward,
        prompt=tokenizer.decode(outcome.turns[0].prompt_ids),
        completion="\n".join(tokenizer.decode(completion.token_ids) for completion in completions),
        token_ids=token_ids,
        weight_versions=spans_from_versions(versions),
        length=len(token_ids),
        finish_reason=completions[-1].finish_reason,
    )
