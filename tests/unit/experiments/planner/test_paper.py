"""The analytical model against slow, literal versions of its formulas, and against the paper's case study."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.cli import main
from pipelinerl.experiments.planner.calibration import LengthDistribution
from pipelinerl.experiments.planner.paper import (
    PaperWorkload,
    best_pipeline,
    conventional,
    h100,
    pipeline,
    pipeline_max_lag,
)

histograms = st.dictionaries(st.integers(1, 30), st.integers(1, 9), min_size=1, max_size=6)


def workload(histogram: dict[int, int], accelerators: int = 6, batch_size: int = 8) -> PaperWorkload:
    lengths = LengthDistribution(histogram)
    return PaperWorkload(accelerators=accelerators, batch_size=batch_size, lengths=lengths, utilisation=h100(), tau=5.0)


@given(histograms, st.integers(1, 5))
def test_conventional_against_the_formula_step_by_step(histogram: dict[int, int], steps_per_round: int) -> None:
    work = workload(histogram)
    total = sum(histogram.values())
    sequences = 8 * steps_per_round
    tokens = time = 0.0
    for step in range(1, max(histogram) + 1):
        running = sequences * sum(count for length, count in histogram.items() if length >= step) / total
        each = running / 6
        time += float(work.utilisation.step_time(each))
        tokens += running
    found = conventional(work, steps_per_round)
    assert found.generation_rate == pytest.approx(tokens / time)
    assert found.training_rate == pytest.approx(6 / 5.0)
    # A round: generate all tokens, then train on all of them.
    assert found.rate == pytest.approx(tokens / (time + tokens * 5.0 / 6))


@given(histograms, st.integers(1, 500))
def test_lag_is_rounded_up_from_the_exact_quotient(histogram: dict[int, int], in_progress: int) -> None:
    tokens = sum(length * count for length, count in histogram.items())
    exact = -(-in_progress * max(histogram) * sum(histogram.values()) // (tokens * 8))
    assert int(pipeline_max_lag(workload(histogram), in_progress)) == exact


@given(histograms, st.integers(0, 12))
def test_the_search_against_trying_everything(histogram: dict[int, int], max_lag: int) -> None:
    work = workload(histogram)
    tried = [pipeline(work, h, i) for h in range(1, 41) for i in range(1, 6)]
    allowed = [candidate for candidate in tried if candidate.max_lag <= max_lag]
    found = best_pipeline(work, max_lag, most_slots=40)
    if not allowed:
        assert found is None
        return
    fastest = max(candidate.rate for candidate in allowed)
    equal = [candidate for candidate in allowed if candidate.rate >= fastest * (1 - 1e-9)]
    assert found == min(equal, key=lambda candidate: (candidate.max_lag, candidate.slots, candidate.generating))


def test_the_command_prints_the_case_study(capsys: pytest.CaptureFixture[str]) -> None:
    """The paper has: lag 133, rate 16.9, 192 slots, 44 that generate; 10.7 in rounds of 134 steps; 1.57 times faster."""
    assert main(["lab", "plan"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if " 133 " in line]
    assert re.findall(r"[\d.]+", line) == ["133", "16.98", "193", "44", "10.74", "134", "1.58"]
    assert main(["lab", "plan", "--trainer.batch_size", "48"]) == 2
