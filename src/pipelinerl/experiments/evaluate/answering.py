"""Problems answered K times each by one engine. Nobody else uses it, and its weights stay as they are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from pipelinerl.actor.client import EngineClient, RolloutClient, derive_seed, let_rollouts_run
from pipelinerl.actor.evaluation import evaluated
from pipelinerl.actor.rollouts import Failure, TimeLimits, attempt
from pipelinerl.experiments.evaluate.records import AttemptRecord
from pipelinerl.interfaces import Engine, Environment, Tokenizer
from pipelinerl.types import Problem, Rollout, SamplingParams

IDLE_S = 0.002
END_S = 2.0
"""For attempts to end that are given up."""


class Questions(NamedTuple):
    """What is asked, and how: `attempts` K at each problem; a reward of at least `pass_at` is a pass."""

    environment: Environment
    problems: Sequence[Problem]
    attempts: int
    sampling: SamplingParams
    limits: TimeLimits
    pass_at: float
    seed: int


async def answer(
    questions: Questions,
    engine: Engine,
    tokenizer: Tokenizer,
    slots: int,
    *,
    stop: Callable[[], bool],
    on_attempt: Callable[[AttemptRecord], None],
) -> bool:
    """Make every attempt, at most `slots` at a time; False if `stop` said to stop before that.

    The attempts at a problem follow one another, so that their prompt is computed once. Seeds depend on `questions.seed`, a
    problem's place and the attempt alone: different weights get the same random numbers. `on_attempt` gets each in order of
    completion. Raises what the engine raises; attempts that fail are records.
    """
    client = EngineClient(engine)
    waiting = ((number, k) for number in range(len(questions.problems)) for k in range(questions.attempts))
    running: dict[asyncio.Task[Rollout | Failure], tuple[int, int]] = {}
    upcoming = next(waiting, None)
    try:
        while (upcoming is not None or running) and not stop():
            while upcoming is not None and len(running) < slots:
                number, k = upcoming
                seed = derive_seed("eval", questions.seed, number, k)
                view = RolloutClient(client, tokenizer, questions.sampling, name=f"eval.{number}.{k}", seed=seed)
                rollout = attempt(questions.environment, questions.problems[number], view, questions.limits)
                running[asyncio.create_task(rollout)] = upcoming
                upcoming = next(waiting, None)
            await let_rollouts_run()
            if not await client.step():
                await asyncio.sleep(IDLE_S)
            for task in [task for task in running if task.done()]:
                on_attempt(_record(questions, *running.pop(task), task.result(), tokenizer))
        return upcoming is None and not running
    finally:
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=END_S)


def _record(questions: Questions, number: int, k: int, outcome: Rollout | Failure, tokenizer: Tokenizer) -> AttemptRecord:
    record = evaluated(questions.problems[number], outcome, tokenizer)
    passed = record.failure is None and record.reward >= questions.pass_at
    return AttemptRecord(number=number, attempt=k, passed=passed, **msgspec.structs.asdict(record))
