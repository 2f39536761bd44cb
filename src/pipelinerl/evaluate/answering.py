"""Problems answered K times each by one engine. Nobody else uses it, and its weights stay as they are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pipelinerl.actor.client import EngineClient, RolloutClient, derive_seed, let_rollouts_run
from pipelinerl.actor.rollouts import Failure, TimeLimits, attempt
from pipelinerl.evaluate.records import AttemptRecord
from pipelinerl.interfaces import Engine, Environment, Tokenizer
from pipelinerl.types import Problem, Rollout, SamplingParams, spans_from_versions, versions_from_spans

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
    name = str(questions.problems[number].id)
    if isinstance(outcome, Failure):
        failure = f"{outcome.reason}: {outcome.message}"
        return AttemptRecord(number=number, attempt=k, problem_id=name, reward=0.0, passed=False, failure=failure)
    completions = [turn.completion for turn in outcome.turns]
    token_ids = tuple(token_id for completion in completions for token_id in completion.token_ids)
    versions = [
        version
        for completion in completions
        for version in versions_from_spans(completion.weight_versions, len(completion.token_ids))
    ]
    return AttemptRecord(
        number=number,
        attempt=k,
        problem_id=name,
        reward=outcome.reward,
        passed=outcome.reward >= questions.pass_at,
        prompt=tokenizer.decode(outcome.turns[0].prompt_ids),
        completion="\n".join(tokenizer.decode(completion.token_ids) for completion in completions),
        token_ids=token_ids,
        weight_versions=spans_from_versions(versions),
        length=len(token_ids),
        finish_reason=completions[-1].finish_reason,
    )
