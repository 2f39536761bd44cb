"""From runs to a comparison's numbers, by hand-made runs and slow references."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.experiments.compare.compare import rounded
from pipelinerl.experiments.compare.page import findings
from pipelinerl.experiments.compare.results import (
    RunResult,
    best_conventional,
    ratio,
    row,
    samples_per_s,
    target_reward,
    time_to_reward,
)
from pipelinerl.experiments.compare.settings import Settings
from pipelinerl.report.series import Measured, Reached


def result(schedule: str, seed: int = 0, *, time_s: float | None = 10.0, rate: float = 100.0, **changed: Any) -> RunResult:
    measured = Measured(
        begin_s=1.0,
        training_s=20.0,
        steps=8,
        samples=2000,
        samples_per_s=rate,
        samples_per_s_later=rate,
        tokens_per_s=10 * rate,
        length_mean=10.0,
        trainer_busy_s=5.0,
    )
    values: dict[str, Any] = {
        "schedule": schedule,
        "kind": schedule.partition(":")[0],
        "seed": seed,
        "settings": Settings(1, 1, 8, 1),
        "status": "finished",
        "began": "2026-01-01T00:00:00+00:00",
        "load_before": 0.1,
        "run_dir": str(Path("runs")),
        "measured": measured,
        "reached": None if time_s is None else Reached(version=5, time_s=time_s, samples=1000),
        "rewards": [0.2, 0.9],
        "ess_mean": 0.99,
        "ess_min": 0.9,
        "lag_mean": 1.0,
        "lag_max": 3,
        "engine_busy_fraction": 0.9,
        "trainer_busy_fraction": 0.5,
        "slots_used_fraction": 0.7,
    }
    return RunResult(**values | changed)


RUNS = [
    result("pipeline", 0, time_s=10.0, rate=200.0),
    result("pipeline", 1, time_s=12.0, rate=180.0),
    result("pipeline", 2, time_s=8.0, rate=220.0),
    result("conventional:1", 2, time_s=30.0, rate=90.0),  # seeds in any order
    result("conventional:1", 0, time_s=14.0, rate=110.0),
    result("conventional:1", 1, time_s=15.0, rate=100.0),
    result("conventional:4", 0, time_s=20.0, rate=120.0),
    result("conventional:4", 1, time_s=21.0, rate=125.0),
    result("conventional:4", 2, time_s=None, rate=130.0),
    result("async:2", 0, time_s=1.0, rate=999.0),
    result("async:2", 1, time_s=1.0, rate=999.0),
    result("async:2", 2, time_s=1.0, rate=999.0),
]


def test_ratios_are_seed_by_seed_to_the_conventional_with_the_best_median() -> None:
    time = ratio(RUNS, "pipeline", time_to_reward, low_is_good=True)
    assert time.baseline == "conventional:1"  # median 15; that of conventional:4 is 21
    assert time.per_seed == [1.4, 1.25, 3.75]
    assert (time.median, time.min, time.max) == (1.4, 1.25, 3.75)
    rate = ratio(RUNS, "pipeline", samples_per_s, low_is_good=False)
    assert rate.baseline == "conventional:4"
    assert rate.per_seed == [pytest.approx(200 / 120), pytest.approx(180 / 125), pytest.approx(220 / 130)]
    own = ratio(RUNS, "conventional:4", samples_per_s, low_is_good=False)
    assert own.per_seed == [1.0, 1.0, 1.0]


def test_schedules_that_mostly_do_not_get_there_are_not_the_best() -> None:
    runs = [result("conventional:1", seed, time_s=1.0 if seed == 0 else None) for seed in range(3)]
    assert best_conventional(runs, time_to_reward, low_is_good=True) is None
    runs += [result("conventional:8", seed, time_s=99.0) for seed in range(3)]
    assert best_conventional(runs, time_to_reward, low_is_good=True) == "conventional:8"
    assert best_conventional([result("pipeline")], time_to_reward, low_is_good=True) is None


def test_a_run_that_diverged_counts_for_nothing() -> None:
    diverged = result("conventional:4", time_s=1.0, rate=900.0, status="diverged: the loss is nan")
    assert time_to_reward(diverged) is None
    assert samples_per_s(diverged) is None
    found = row([diverged, result("conventional:4", 1)], "conventional:4")
    assert (found.runs, found.diverged, found.reached) == (2, 1, 1)
    assert found.samples_per_s.median is None
    assert found.time_to_reward_s.per_seed == [None, 10.0]


numbers = st.one_of(st.none(), st.floats(0.1, 100))


@given(st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=5))
def test_ratios_against_a_reference(times: list[tuple[float | None, float | None, float | None]]) -> None:
    names = ("pipeline", "conventional:1", "conventional:2")
    runs = [
        result(name, seed, time_s=time_s) for seed, one in enumerate(times) for name, time_s in zip(names, one, strict=True)
    ]
    found = ratio(runs, "pipeline", time_to_reward, low_is_good=True)

    medians = {
        name: median(float("inf") if one[place] is None else one[place] for one in times)  # type: ignore[type-var]
        for place, name in enumerate(names)
        if place > 0
    }
    best = min(medians, key=lambda name: medians[name])
    if medians[best] == float("inf"):
        assert found.baseline is None
        assert found.median is None
        return
    assert found.baseline == best
    place = names.index(best)
    expected = [None if one[0] is None or one[place] is None else one[place] / one[0] for one in times]  # type: ignore[operator]
    assert found.per_seed == pytest.approx(expected)
    assert (found.median is None) == (None in expected)


def rewards(schedule: str, *of_seeds: list[float]) -> list[RunResult]:
    return [result(schedule, seed, rewards=values) for seed, values in enumerate(of_seeds)]


def test_the_target_is_what_every_kind_can_reach() -> None:
    pipeline = rewards("pipeline", [0.2, 0.8, 0.98], [0.2, 0.99, 0.9])  # 0.98 in its worst seed
    good = rewards("conventional:1", [0.2, 0.97], [0.2, 1.0])
    diverged = rewards("conventional:64", [0.2, 0.21], [0.2, 0.0])
    # 0.2 + 0.9 * (0.97 - 0.2) = 0.893, in steps of 0.01
    assert target_reward(pipeline + good + diverged) == 0.89
    assert target_reward(pipeline) == 0.90  # 0.2 + 0.9 * 0.78 = 0.902


def test_there_is_no_target_if_nothing_is_learnt() -> None:
    assert target_reward(rewards("pipeline", [0.5, 0.4, 0.5])) is None
    assert target_reward(rewards("pipeline", [])) is None
    assert target_reward([]) is None


def test_findings_say_it_when_it_helps() -> None:
    said = " ".join(
        findings([row(RUNS, name) for name in ("pipeline", "conventional:1", "conventional:4")], 0.9, "held-out")
    )
    assert "reached a held-out reward of 0.9 1.40 times sooner than the best conventional schedule, conventional:1" in said
    assert "made samples 1.67 times faster than the best conventional schedule, conventional:4" in said
    assert "does not help" not in said
    assert "conventional:4: 1 of 3 runs did not reach 0.9." in said


def test_findings_say_it_when_it_does_not_help() -> None:
    slow = [result("pipeline", time_s=20.0, rate=80.0), result("conventional:1", time_s=10.0, rate=100.0)]
    said = findings([row(slow, "pipeline"), row(slow, "conventional:1")], 0.5, "held-out")
    assert said[0].startswith("pipeline reached a held-out reward of 0.5 2.00 times later")
    assert said[0].endswith("Here it does not help.")
    assert said[1].startswith("pipeline made samples 1.25 times slower")
    mixed = [
        *(result("pipeline", seed, time_s=10.0) for seed in range(3)),
        *(result("conventional:1", seed, time_s=time_s) for seed, time_s in enumerate((9.0, 12.0, 13.0))),
    ]
    assert "Not in every seed" in findings([row(mixed, "pipeline"), row(mixed, "conventional:1")], 0.5, "held-out")[0]


def test_findings_without_a_ratio() -> None:
    alone = [result("pipeline", time_s=None)]
    said = " ".join(findings([row(alone, "pipeline")], 0.5, "held-out"))
    assert "There is no conventional run that reached" in said
    assert "pipeline: 1 of 1 runs did not reach 0.5." in said
    assert "there is no target" in findings([row(alone, "pipeline")], None, "held-out")[0]
    diverged = [result("conventional:4", status="diverged: nan")]
    assert findings([row(diverged, "conventional:4")], 0.5, "held-out") == ["conventional:4: 1 of 1 runs diverged."]


def test_numbers_are_rounded_for_the_file() -> None:
    assert rounded({"a": [1.23456789, float("nan"), 7, True, None, "x"]}) == {"a": [1.23457, None, 7, True, None, "x"]}
