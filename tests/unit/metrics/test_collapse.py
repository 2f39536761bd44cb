"""A reward that falls to its floor is noticed, and one that never rose is not a collapse."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from pipelinerl.metrics.records import PATIENCE, CollapseWatch, StepRecord, collapse_of
from tests.unit.record_parts import step


def steps(rewards: Sequence[float]) -> list[StepRecord]:
    """Rewards of 0 and 1 with these means."""
    stds = {mean: math.sqrt(mean * (1 - mean)) for mean in rewards}
    return [step(version, reward_read_mean=mean, reward_std=stds[mean]) for version, mean in enumerate(rewards, start=1)]


RISEN = [0.25, 0.4, 0.6, 0.8, 0.8, 0.8, 0.8]


def test_a_run_that_stays_at_its_floor_says_so_once_after_20_steps_and_which_steps_once_it_has_recovered() -> None:
    watch, notes = CollapseWatch(), []
    for one in steps(RISEN + [0.0] * 30):
        watch.observe(one)
        notes.append(watch.note)
    assert notes[: 7 + PATIENCE - 1] == [None] * (7 + PATIENCE - 1)
    (note,) = set(notes[7 + PATIENCE - 1 :])
    assert note is not None
    assert watch.now == note
    assert "lowest reward, 0, since step 8; the best 5 steps had a mean of 0.76" in note
    watch.observe(step(38, reward_read_mean=0.25, reward_std=0.4))
    assert "in steps 8 to 37" in str(watch.note)
    assert not watch.now


@pytest.mark.parametrize(
    "rewards",
    [
        [*RISEN, *[1.0] * 40],  # the ceiling
        [0.0] * 60,  # it never rose
        [0.0, 0.02, 0.0, 0.02, 0.0, *[0.0] * 40],  # a lucky answer
        [*RISEN, *[0.0] * 19, 0.25],  # for a short time
        [*RISEN, *[0.01] * 40],  # low, but rewards differ
    ],
)
def test_other_runs_have_not_collapsed(rewards: list[float]) -> None:
    assert collapse_of(steps(rewards)) is None


def test_the_floor_may_be_any_reward() -> None:
    fallen = [step(version, reward_mean=-2.0, reward_std=0.0) for version in range(8, 40)]
    assert collapse_of([*steps(RISEN), *fallen]) is not None
