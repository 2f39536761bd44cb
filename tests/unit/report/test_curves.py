"""The columns of a run's steps, the figure, what a page gets of them, and the numbers that runs are compared by."""

from __future__ import annotations

import math
import random
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.errors import RunDirectoryError
from pipelinerl.metrics.records import EngineRecord, Record, StepRecord, TimelineRecord
from pipelinerl.report import curves as module
from pipelinerl.report.curves import Columns, Seen, StepColumns, begin_s, draw_curves
from pipelinerl.report.series import measure, rates_after, reached_held_out, slots_in_use
from tests.unit.record_parts import evaluation, step, write_records

TIMES = {"train_s": 0.5, "wait_s": 1.5, "completion_length_mean": 20.0}
STEPS = [step(n, 5.0 + 2.0 * n, samples=10, **TIMES) for n in range(1, 11)]


def look(worker: int, time_s: float, in_progress: int) -> TimelineRecord:
    return TimelineRecord(worker=worker, time_s=time_s, in_progress=in_progress, queued=0, tokens_generated=0, version=0)


def test_time_begins_when_the_trainer_is_ready_and_engines_are() -> None:
    assert begin_s(STEPS) == 5.0  # 7 - 0.5 - 1.5
    engines = [look(0, 4.0, 0), look(1, 5.5, 0), look(0, 5.25, 0), look(0, 6.0, 3)]
    assert begin_s(STEPS, engines) == 5.5
    assert begin_s(STEPS, [look(0, 4.0, 2), look(1, 6.0, 0)]) == 5.0  # it was at work before
    assert begin_s(STEPS, [look(0, 5.75, 2), look(1, 6.0, 0)]) == 5.75  # it came up then, and was at work by its first look
    assert begin_s(STEPS, [], [evaluation("before", 0, 6.0), evaluation("after", 10, 30.0)]) == 6.0
    assert begin_s(STEPS, [look(0, 99.0, 0)]) == 6.5  # never after the first step began


def test_columns_of_steps_have_times_sums_and_rates() -> None:
    columns = StepColumns()
    resumed = [step(3, 20.0, samples=10, tokens_trained=100), step(4, 24.0, samples=10, tokens_trained=100, ess=0.5)]
    for one in [*STEPS[:4], *resumed]:
        columns.add(one, [evaluation("before", 0, 6.0)])
    assert columns.begin_s == 6.0
    assert list(columns["version"]) == [1, 2, 3, 4]
    assert list(columns["rollouts"]) == [10, 20, 30, 40]
    assert [60 * minutes for minutes in columns["minutes"]] == pytest.approx([1, 3, 14, 18])
    assert list(columns["samples_per_s"]) == pytest.approx([10, 5, 10 / 11, 2.5])
    assert list(columns["trained_per_s"])[2:] == pytest.approx([100 / 11, 25])
    assert [math.isnan(ess) for ess in columns["ess"]] == [True, True, True, False]
    assert [math.isnan(value) for value in columns["never"]] == [True] * 4


def follow_page(columns: Columns, page: dict[str, list[Any]], at: Seen) -> Seen:
    """What a page does with a part of the curves."""
    part, at = columns.since(at)
    if part is not None:
        for name, values in part["columns"].items():
            page[name] = [*page.get(name, [])[: part["start"]], *values]
    return at


def test_a_page_that_follows_has_what_a_new_page_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_POINTS", 8)
    columns, page, at = Columns(), dict[str, list[Any]](), Seen()
    for n in range(100):
        columns.append({"n": n, **({"late": 2.0} if n >= 50 else {}), "bad": math.nan})
        if n in (17, 60):
            columns.cut("n", n - 4)  # resumed
        if n % 3 == 0:
            at = follow_page(columns, page, at)
    at = follow_page(columns, page, at)
    fresh: dict[str, list[Any]] = {}
    follow_page(columns, fresh, Seen())
    assert page == fresh
    assert 4 < len(page["n"]) <= 8
    assert set(page["bad"]) == {None}
    assert page["n"] == sorted(page["n"])
    assert (page["late"][0], page["late"][-1]) == (None, 2.0)
    assert columns.since(at) == (None, at)


ALL = [
    step(1, 4.0, tokens_trained=200, reward_mean=0.25, ess=1.0, lag_mean=0.0, lag_max=0, completion_length_mean=25.0),
    step(2, 6.0, reward_mean=0.5, engine=EngineRecord(version=1, in_progress=8, tokens_generated=900, tokens_per_s=450.0)),
    step(3, 6.0, tokens_trained=10, lag_mean=1.5, lag_max=2, metrics={"a/reward": 0.5}),
    evaluation("online", 2, 5.0, metrics={"a/reward": 0.5}),
    evaluation("before", 0, reward_standard_error=0.1),
    evaluation("after", 3, 8.0),
    evaluation("after", 3, 9.0, problems=0, reward_mean=None),
]


@pytest.mark.parametrize("records", [ALL, pytest.param(ALL[:1], marks=pytest.mark.slow)], ids=["all", "one step"])
def test_a_png_is_drawn(tmp_path: Path, records: list[Record]) -> None:
    with pytest.raises(RunDirectoryError, match=r"nothing to draw: .*metrics\.jsonl"):
        draw_curves(tmp_path, tmp_path / "curves.png")
    write_records(tmp_path, *records)
    draw_curves(tmp_path, tmp_path / "curves.png")
    header = (tmp_path / "curves.png").read_bytes()[:24]
    assert header.startswith(b"\x89PNG\r\n\x1a\n")
    assert int.from_bytes(header[16:20], "big") > 1000


def test_rates_are_over_all_of_training() -> None:
    found = measure(STEPS, 5.0)
    assert (found.training_s, found.samples_per_s, found.tokens_per_s, found.length_mean) == (20.0, 5.0, 100.0, 20.0)
    uneven = [*STEPS[:2], *(step(n, 5.0 + 4.0 * n, samples=10) for n in range(3, 11))]
    assert measure(uneven, 5.0).samples_per_s_later == pytest.approx(80 / (45.0 - 9.0))


def test_rates_after_the_fill_count_every_sample_and_every_token() -> None:
    uneven = [step(n, 5.0 + 2.0 * n, samples=10, completion_length_mean=float(n)) for n in range(1, 11)]
    assert rates_after(uneven, 4) == pytest.approx((60 / 12.0, 10 * sum(range(5, 11)) / 12.0))
    assert [rates_after(STEPS[:steps], fill) for steps, fill in ((10, 10), (1, 1), (10, 0))] == [None] * 3


@pytest.mark.parametrize("seed", range(3))
def test_slots_in_use_while_generating(seed: int) -> None:
    rng = random.Random(seed)
    timeline = [look(rng.randrange(3), time / 8, rng.choice((0, 0, 5))) for time in rng.sample(range(800), 60)]
    totals = []  # of all engines, in the middle of each eighth of a second from 30 s to 90 s
    for eighth in range(240, 720):
        so_far = sorted((one for one in timeline if one.time_s <= eighth / 8), key=lambda one: one.time_s)
        totals.append(sum({one.worker: one.in_progress for one in so_far}.values()))
    assert slots_in_use(timeline, 30.0, 60.0, 16) == pytest.approx(fmean(total for total in totals if total) / 16)
    assert [slots_in_use(idle, 0.0, 5.0, 8) for idle in ([look(0, 1.0, 0)], [])] == [None, None]


def slow_reached_held_out(points: list[tuple[int, float]], steps: list[StepRecord], begin: float, target: float) -> object:
    """The definition, version by version."""
    versions, rewards = zip(*points, strict=True)
    for version in range(versions[0], versions[-1] + 1):
        if np.interp(version, versions, rewards) >= target - 1e-9:
            done = [one for one in steps if one.version <= version]
            time_s = done[-1].time_s - begin if done else 0.0
            return time_s, sum(one.samples for one in done)
    return None


@given(
    st.lists(st.integers(0, 100), min_size=1, max_size=8),
    st.integers(1, 5),
    st.integers(0, 100),
)
def test_the_step_that_reaches_a_held_out_reward(hundredths: list[int], every: int, target: int) -> None:
    points = [(number * every, reward / 100) for number, reward in enumerate(hundredths)]
    steps = [step(n, 5.0 + n * n, samples=n) for n in range(1, points[-1][0] + 1)]
    assert reached_held_out(points, steps, 5.0, target / 100) == slow_reached_held_out(points, steps, 5.0, target / 100)
