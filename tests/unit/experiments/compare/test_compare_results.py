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
    findings,
    limit_of,
    ratio,
    row,
    target_reward,
)
from pipelinerl.experiments.runs import Execution
from pipelinerl.metrics.evaluations import EvaluationRecord
from tests.unit.record_parts import evaluation


def result(
    schedule: str,
    seed: int = 0,
    *,
    time_s: float | None = 10.0,
    rate: float = 100.0,
    status: str = "finished",
    share: float | None = None,
    core_s: dict[str, float] | None = None,
) -> RunResult:
    quantities = {
        "time_to_reward_s": time_s,
        "samples_to_reward": 1000.0,
        "samples_per_s": rate if status == "finished" else None,
        "limit_share": share,
    }
    return RunResult(
        schedule=schedule,
        seed=seed,
        settings=Settings(1, 8),
        execution=Execution(run=f"{schedule}/seed-{seed}", status=status, began="", load_before=0.1),
        held_out=[],
        quantities=dict.fromkeys(QUANTITIES) | quantities,
        core_s=core_s,
    )


def runs_of(schedule: str, rates: Sequence[float], *times_s: float | None) -> list[RunResult]:
    return [result(schedule, n, time_s=time_s, rate=rates[n]) for n, time_s in enumerate(times_s)]


RUNS = [
    *runs_of("pipeline", (200.0, 180.0, 220.0), 10.0, 12.0, 8.0),
    *reversed(runs_of("conventional:1", (110.0, 100.0, 90.0), 14.0, 15.0, 30.0)),  # seeds in any order
    *runs_of("conventional:4", (120.0, 125.0, 130.0), 20.0, 21.0, None),
    *runs_of("async:2", (999.0,) * 3, 1.0, 1.0, 1.0),
]
numbers = st.one_of(st.none(), st.floats(0.1, 100))


@given(st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=5))
def test_ratios_against_a_reference(times: list[tuple[float | None, float | None, float | None]]) -> None:
    names = ("pipeline", "conventional:1", "conventional:2")
    runs = [
        result(name, seed, time_s=time_s) for seed, one in enumerate(times) for name, time_s in zip(names, one, strict=True)
    ]
    found = ratio(runs, "pipeline", "time_to_reward_s", low_is_good=True)

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


def rewards(schedule: str, *of_seeds: list[float]) -> list[tuple[str, list[EvaluationRecord]]]:
    return [
        (schedule, [evaluation("online", version, reward_mean=reward) for version, reward in enumerate(values)])
        for values in of_seeds
    ]


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


MIXED = [*runs_of("pipeline", (100.0,) * 3, *(10.0,) * 3), *runs_of("conventional:1", (100.0,) * 3, 9.0, 12.0, 13.0)]


@pytest.mark.parametrize(
    ("runs", "target", "finding"),
    [
        (RUNS, 0.9, "reached a held-out reward of 0.9 1.40 times sooner than the best conventional schedule, conv"),
        (RUNS, 0.9, "made samples 1.67 times faster than the best conventional schedule, conventional:4"),
        (RUNS, 0.9, "conventional:4: 1 of 3 runs did not reach 0.9."),
        ([result("pipeline", time_s=20.0), RUNS[5]], 0.5, "1.43 times later than the best conventional schedule"),
        ([result("pipeline", rate=80.0), RUNS[5]], 0.5, "made samples 1.38 times slower"),
        ([result("pipeline", rate=80.0), RUNS[5]], 0.5, "Here it does not help."),
        (MIXED, 0.5, "Not in every seed"),
        ([result("pipeline", time_s=None)], 0.5, "There is no conventional run that reached"),
        ([result("pipeline", time_s=None)], None, "there is no target"),
        ([result("conventional:4", time_s=None, status="diverged: nan")], 0.5, "conventional:4: 1 of 1 runs diverged."),
    ],
)
def test_findings_say_whether_it_helps(runs: list[RunResult], target: float | None, finding: str) -> None:
    rows = [row(runs, name) for name in dict.fromkeys(run.schedule for run in runs)]
    assert finding in " ".join(findings(rows, target))


def test_the_limit_is_the_best_conventional_schedule_s() -> None:
    parts = {"generation": 50.0, "training": 30.0, "idle": 12.0, "weights": 8.0}
    pipelines = [result("pipeline", 0, share=0.8, core_s=parts), result("pipeline", 1, share=0.9, core_s=parts)]
    slow = [result("conventional:2", seed, share=0.25) for seed in range(2)]
    best = [result("conventional:4", 0, share=0.5), result("conventional:4", 1, share=0.4)]
    limit = limit_of([*pipelines, *slow, *best])
    assert limit is not None
    assert (limit.s_max.per_seed, limit.s_max.baseline) == ([pytest.approx(2.0), pytest.approx(2.5)], "conventional:4")
    assert limit.share.per_seed == [0.8, 0.9]
    assert limit.core_share["idle"].median == pytest.approx(0.12)
    found = " ".join(findings([row(pipelines, "pipeline")], None, limit))
    assert "2.25 (2.00 to 2.50) times as fast as conventional:4 (S_max). pipeline reached 85% (80% to 90%) of that" in found
    assert "The rest of the cores' time: idle 12.0%, weights 8.0%." in found

    assert limit_of([*pipelines[:1], result("pipeline", 1), *best]) is None, "a pipeline that was not measured"
    alone = limit_of(pipelines)
    assert alone is not None
    assert (alone.s_max.median, alone.share.median) == (None, pytest.approx(0.85))
