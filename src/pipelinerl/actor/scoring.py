"""Scores the rollouts of a group together, in environments that do so (`ScoresGroups`)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pipelinerl.actor.rollouts import Failure, TimeLimits, finite, guarded, metrics_of, type_name
from pipelinerl.errors import RolloutError
from pipelinerl.interfaces import ScoresGroups
from pipelinerl.types import Problem, Rollout


async def score(
    environment: ScoresGroups, problem: Problem, rollouts: Sequence[Rollout], limits: TimeLimits
) -> list[Rollout] | Failure:
    """The rollouts of a group with the rewards and metrics that the environment gives them when all have ended."""

    async def compare() -> list[Rollout]:
        scored = await environment.score_group(problem, rollouts)
        if not isinstance(scored, Sequence) or len(scored) != len(rollouts):
            raise RolloutError(f"score_group returned {type_name(scored)}, not a list of {len(rollouts)} rollouts")
        return [_rescored(before, after) for before, after in zip(rollouts, scored, strict=True)]

    return await guarded(compare, limits, "score_group")


def _rescored(before: Rollout, after: object) -> Rollout:
    if not isinstance(after, Rollout) or after.turns != before.turns:
        raise RolloutError("score_group may change only rewards and metrics, and not the order of the rollouts")
    return msgspec.structs.replace(before, reward=finite(after.reward, "the reward"), metrics=metrics_of(after.metrics))
