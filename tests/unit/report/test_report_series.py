"""The numbers that runs are compared by, against references that say the same slowly."""

from __future__ import annotations

import math
import random
from statistics import fmean
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.config.schema import RunConfig, ScheduleConfig
from pipelinerl.metrics.evaluations import EvaluationRecord
from pipelinerl.metrics.records import StepRecord
from pipelinerl.metrics.sinks import TimelineRecord
from pipelinerl.report import series as module
from pipelinerl.report.series import (
    Columns,
    Reached,
    Seen,
    StepColumns,
    begin_s,
    measure,
    name_of,
    rates_after,
    reached_held_out,
    slots_in_use,
)


def step(version: int, time_s: float, reward: float | None = 0.0, **changed: float) -> StepRecord:
    values = {"samples": 10, "train_s": 0.5, "wait_s": 1.5, "completion_length_mean": 20.0} | changed
    return StepRecord(version=version, time_s=time_s, reward_mean=reward, **values)  # type: ignore[arg-type]


def look(worker: int, time_s: float, in_progress: int) -> TimelineRecord:
    return TimelineRecord(worker=worker, time_s=time_s, in_progress=in_progress, queued=0, tokens_generated=0, version=0)


STEPS = [step(n, 5.0 + 2.0 * n, 0.1 * n) for n in range(1, 11)]


def test_time_begins_when_the_trainer_is_ready_and_engines_are() -> None:
    assert begin_s(STEPS) == 5.0  # 7 - 0.5 - 1.5
    engines = [look(0, 4.0, 0), look(1, 5.5, 0), look(0, 5.25, 0), look(0, 6.0, 3)]
    assert begin_s(STEPS, engines) == 5.5
    assert begin_s(STEPS, [look(0, 4.0, 2), look(1, 6.0, 0)]) == 5.0  # it was at work before
    assert begin_s(STEPS, [look(0, 5.75, 2), look(1, 6.0, 0)]) == 5.75  # it came up then, and was at work by its first look
    before = EvaluationRecord(when="before", version=0, time_s=6.0, problems=1)
    after = EvaluationRecord(when="after", version=10, time_s=30.0, problems=1)
    assert begin_s(STEPS, [], [before, after]) == 6.0
    assert begin_s(STEPS, [look(0, 99.0, 0)]) == 6.5  # never after the first step began


def test_columns_of_steps_have_times_sums_and_rates() -> None:
    columns = StepColumns()
    before = EvaluationRecord(when="before", version=0, time_s=6.0, problems=1)
    for one in [*STEPS[:4], step(3, 20.0, tokens_trained=100), step(4, 24.0, tokens_trained=100, ess=0.5)]:  # resumed
        columns.add(one, [before])
    assert columns.begin_s == 6.0
    assert list(columns["version"]) == [1, 2, 3, 4]
    assert list(columns["rollouts"]) == [10, 20, 30, 40]
    assert [60 * minutes for minutes in columns["minutes"]] == pytest.approx([1, 3, 14, 18])
    assert list(columns["samples_per_s"]) == pytest.approx([10, 5, 10 / 11, 2.5])
    assert list(columns["trained_per_s"])[2:] == pytest.approx([100 / 11, 25])
    assert [math.isnan(ess) for ess in columns["ess"]] == [True, True, True, False]
    assert all(map(math.isnan, columns["never"]))
    assert len(columns["never"]) == 4


def test_rates_are_over_all_of_training() -> None:
    found = measure(STEPS, 5.0)
    assert (found.training_s, found.samples, found.steps) == (20.0, 100, 10)
    assert found.samples_per_s == 5.0
    assert found.tokens_per_s == 100.0
    assert found.length_mean == 20.0
    assert found.trainer_busy_s == 5.0
    uneven = [*STEPS[:2], *(step(n, 5.0 + 4.0 * n) for n in range(3, 11))]
    assert measure(uneven, 5.0).samples_per_s_later == pytest.approx(80 / (45.0 - 9.0))


def test_rates_after_the_fill_count_every_sample_and_every_token() -> None:
    uneven = [msgspec.structs.replace(one, completion_length_mean=float(number)) for number, one in enumerate(STEPS)]
    tokens = sum(one.samples * number for number, one in enumerate(uneven) if number >= 4)
    assert rates_after(uneven, 4) == pytest.approx((60 / 12.0, tokens / 12.0))
    assert [rates_after(STEPS[:steps], fill) for steps, fill in ((10, 10), (1, 1), (10, 0))] == [None] * 3


@pytest.mark.parametrize("seed", range(5))
def test_slots_in_use_while_generating(seed: int) -> None:
    rng = random.Random(seed)
    timeline = [look(rng.randrange(3), time / 8, rng.choice((0, 0, 5))) for time in rng.sample(range(800), 60)]
    totals = []  # of all engines, in the middle of each eighth of a second from 30 s to 90 s
    for eighth in range(240, 720):
        so_far = sorted((one for one in timeline if one.time_s <= eighth / 8), key=lambda one: one.time_s)
        totals.append(sum({one.worker: one.in_progress for one in so_far}.values()))
    assert slots_in_use(timeline, 30.0, 60.0, 16) == pytest.approx(fmean(total for total in totals if total) / 16)
    assert slots_in_use([look(0, 1.0, 0)], 0.0, 5.0, 8) is None
    assert slots_in_use([], 0.0, 5.0, 8) is None


def slow_reached_held_out(points: list[tuple[int, float]], steps: list[StepRecord], begin: float, target: float) -> object:
    """The definition, version by version."""
    versions, rewards = zip(*points, strict=True)
    for version in range(versions[0], versions[-1] + 1):
        if np.interp(version, versions, rewards) >= target - 1e-9:
            done = [one for one in steps if one.version <= version]
            time_s = done[-1].time_s - begin if done else 0.0
            return Reached(version=version, time_s=time_s, samples=sum(one.samples for one in done))
    return None


@given(
    st.lists(st.integers(0, 100), min_size=1, max_size=8),
    st.integers(1, 5),
    st.integers(0, 100),
)
def test_the_step_that_reaches_a_held_out_reward(hundredths: list[int], every: int, target: int) -> None:
    points = [(number * every, reward / 100) for number, reward in enumerate(hundredths)]
    steps = [StepRecord(version=n, time_s=5.0 + n * n, samples=n) for n in range(1, points[-1][0] + 1)]
    assert reached_held_out(points, steps, 5.0, target / 100) == slow_reached_held_out(points, steps, 5.0, target / 100)


def test_schedules_have_the_names_that_comparisons_use() -> None:
    assert name_of(RunConfig(schedule=ScheduleConfig(kind="conventional", steps_per_round=2))) == "conventional:2"
    assert name_of(RunConfig()) == "pipeline"


def follow_page(curves: Columns, page: dict[str, list[Any]], at: Seen) -> Seen:
    """What a page does with a part of the curves."""
    part, at = curves.since(at)
    if part is not None:
        for name, values in part["columns"].items():
            page[name] = [*page.get(name, [])[: part["start"]], *values]
    return at


def test_a_page_that_follows_has_what_a_new_page_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_POINTS", 8)
    curves, page, at = Columns(), dict[str, list[Any]](), Seen()
    for n in range(100):
        curves.append({"n": n, **({"late": 2.0} if n >= 50 else {}), "bad": math.nan})
        if n in (17, 60):
            curves.cut(n - 4)  # resumed
        if n % 3 == 0:
            at = follow_page(curves, page, at)
    at = follow_page(curves, page, at)
    fresh: dict[str, list[Any]] = {}
    follow_page(curves, fresh, Seen())
    assert page == fresh
    assert 4 < len(page["n"]) <= 8
    assert set(page["bad"]) == {None}
    assert page["n"] == sorted(page["n"])
    assert page["late"][0] is None
    assert page["late"][-1] == 2.0
    assert curves.since(at) == (None, at)
