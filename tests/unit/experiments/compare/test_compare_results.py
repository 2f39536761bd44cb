"""From runs to a comparison's numbers, by hand-made runs and slow references."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.experiments.compare.results import (
    QUANTITIES,
    RunResult,
    Settings,
    Spread,
    findings,
    ratio,
    row,
    target_reward,
)
from pipelinerl.experiments.runs import Execution
from pipelinerl.metrics.evaluations import EvaluationRecord


def result(
    schedule: str,
    seed: int = 0,
    *,
    time_s: float | None = 10.0,
    rate: float = 100.0,
    status: str = "finished",
    rewards: Sequence[float] = (),
) -> RunResult:
    quantities = {
        "time_to_reward_s": time_s,
        "samples_to_reward": 1000.0,
        "samples_per_s": rate if status == "finished" else None,
    }
    answered = [
        EvaluationRecord(when="online", version=n, time_s=n, problems=1, reward_mean=r) for n, r in enumerate(rewards)
    ]
    return RunResult(
        schedule=schedule,
        seed=seed,
        settings=Settings(1, 8),
        execution=Execution(run=f"{schedule}/seed-{seed}", status=status, began="", load_before=0.1),
        held_out=answered,
        quantities=dict.fromkeys(QUANTITIES) | quantities,
    )


def times_sooner(runs: list[RunResult], schedule: str = "pipeline") -> Spread:
    return ratio(runs, schedule, "time_to_reward_s", low_is_good=True)


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


def test_a_run_that_diverged_counts_for_nothing() -> None:
    diverged = result("conventional:4", time_s=None, rate=900.0, status="diverged: the loss is nan")
    found = row([diverged, result("conventional:4", 1)], "conventional:4")
    assert (found.runs, found.diverged, found.reached) == (2, 1, 1)
    assert found.quantities["samples_per_s"].per_seed == [None, 100.0]
    assert found.quantities["samples_per_s"].median is None
    assert found.quantities["time_to_reward_s"].per_seed == [None, 10.0]


numbers = st.one_of(st.none(), st.floats(0.1, 100))


@given(st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=5))
def test_ratios_against_a_reference(times: list[tuple[float | None, float | None, float | None]]) -> None:
    names = ("pipeline", "conventional:1", "conventional:2")
    runs = [
        result(name, seed, time_s=time_s) for seed, one in enumerate(times) for name, time_s in zip(names, one, strict=True)
    ]
    found = times_sooner(runs)

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


MIXED = [
    *(result("pipeline", seed, time_s=10.0) for seed in range(3)),
    *(result("conventional:1", seed, time_s=time_s) for seed, time_s in enumerate((9.0, 12.0, 13.0))),
]


@pytest.mark.parametrize(
    ("runs", "target", "finding"),
    [
        (RUNS, 0.9, "reached a held-out reward of 0.9 1.40 times sooner than the best conventional schedule, conv"),
        (RUNS, 0.9, "made samples 1.67 times faster than the best conventional schedule, conventional:4"),
        (RUNS, 0.9, "conventional:4: 1 of 3 runs did not reach 0.9."),
        ([result("pipeline", time_s=20.0), RUNS[4]], 0.5, "1.43 times later than the best conventional schedule"),
        ([result("pipeline", rate=80.0), RUNS[4]], 0.5, "made samples 1.38 times slower"),
        ([result("pipeline", rate=80.0), RUNS[4]], 0.5, "Here it does not help."),
        (MIXED, 0.5, "Not in every seed"),
        ([result("pipeline", time_s=None)], 0.5, "There is no conventional run that reached"),
        ([result("pipeline", time_s=None)], None, "there is no target"),
        ([result("conventional:4", time_s=None, status="diverged: nan")], 0.5, "conventional:4: 1 of 1 runs diverged."),
    ],
)
def test_findings_say_whether_it_helps(runs: list[RunResult], target: float | None, finding: str) -> None:
    rows = [row(runs, name) for name in dict.fromkeys(run.schedule for run in runs)]
    assert finding in " ".join(findings(rows, target))
