"""Runs K attempts at each problem on one engine, whose weights do not change."""

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
"""Time that cancelled attempts get to end."""


class Questions(NamedTuple):
    """The problems and how they are attempted: K = `attempts` times each; a reward of at least `pass_at` is a pass."""

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
    """Run all attempts, at most `slots` at a time. Returns False if `stop` ended them early.

    The attempts at a problem are started one after another, so that their prompt is computed once. Seeds depend only on
    `questions.seed`, the problem's position and the attempt, so different weights get the same random numbers.
    `on_attempt` is called for each attempt in order of completion, failed ones included. Raises what the engine raises.
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
