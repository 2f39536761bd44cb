"""The limit of a pipeline: against sums over single decode steps, and against simulated runs with known speed-ups."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pipelinerl.config.load import load_config
from pipelinerl.experiments.compare.limit import LIMIT, WorkCosts, core_seconds, costs_of, limit_s
from pipelinerl.experiments.planner import scenario, simulate
from pipelinerl.metrics.records import StepRecord, TimelineRecord
from pipelinerl.report.series import RunRecords
from pipelinerl.schedule import ConventionalSchedule, PipelineSchedule, Schedule
from tests.unit.record_parts import step

H, CORES, TICK_S = 10, 3, 0.25
FULL_S, OTHER_S = 0.02, 0.03
"""CPU seconds of a token while the engine is full, and while it has fewer sequences."""


def measured(*settings: str) -> RunRecords:
    """A run of two engines and four optimizer steps, from 1 s to 11 s, with what each tick of an engine took.

    The first engine is full in two ticks of three. The second one waits in every other tick, and polls for a hundredth.
    """
    timeline: list[TimelineRecord] = []
    for worker in range(2):
        tokens, cpu_s, updates_s = 0, 5.0 + worker, 1.0  # from before the run
        for tick in range(60):
            waits = bool(worker and tick % 2)
            used = 0 if tick < 4 or waits else 3 if tick % 3 == 2 else H
            record = {"in_progress": used, "queued": 0, "tokens_generated": tokens, "version": 0, "cpu_s": cpu_s}
            timeline.append(TimelineRecord(worker=worker, time_s=tick * TICK_S, update_cpu_s=updates_s, **record))
            tokens, cpu_s = tokens + used, cpu_s + (used * (FULL_S if used == H else OTHER_S) if used else 0.01)
            updates_s, cpu_s = updates_s + 0.001, cpu_s + 0.001
    cpu_s = {"step": 0.5, "publish": 0.03, "saving": 0.02, "other": 0.1}
    trained = {"completion_length_mean": 5.5, "tokens_forwarded": 50, "cpu_s": cpu_s}
    steps = [step(n, 1.0 + 2.5 * n, train_s=0.5, wait_s=2.0, **trained) for n in range(1, 5)]
    records = sorted(timeline, key=lambda record: record.time_s)
    config = load_config(None, ["--engine.slots", str(H), *settings])
    return RunRecords(Path(), config, steps, [], {"launcher_cpu_s": 0.7}, records)


def test_each_core_second_has_one_cause() -> None:
    """The engines' ticks in the run, one after the other: a record has the state of the following tick."""
    run, full_s, tokens, more_s = measured(), [], 0, 0.0
    costs = costs_of(run)
    assert costs is not None
    for before, after in ((a, b) for a in run.timeline for b in run.timeline if a.worker == b.worker):
        if after.time_s != before.time_s + TICK_S:
            continue
        sampled, spent_s = after.tokens_generated - before.tokens_generated, after.cpu_s - before.cpu_s - 0.001
        if sampled and min(before.in_progress, after.in_progress) == H:
            full_s += [spent_s / sampled] * sampled
        if 1.0 <= before.time_s < 11.0:
            tokens, more_s = tokens + sampled, more_s + spent_s - sampled * FULL_S
    assert full_s == pytest.approx([FULL_S] * len(full_s))
    assert costs == pytest.approx(WorkCosts(FULL_S, 4 * 0.5 / (4 * 50)))

    trained = 4 * 8 * 5.5
    found = core_seconds(run, costs, CORES)
    expected = {
        "generation": trained * FULL_S,
        "training": 4 * 0.5,
        "engines not full": more_s,
        "never trained on": (tokens - trained) * FULL_S,
        "weights": 4 * 0.03 + 2 * 40 * 0.001,
        "preparation": 0.4,
        "evaluation": 0.08,
        "launcher": 0.7,
    }
    assert found == pytest.approx(expected | {"idle": CORES * 10.0 - sum(expected.values())})
    assert limit_s(run.steps, costs, CORES) == pytest.approx(sum(found[part] for part in LIMIT) / CORES)


def test_ranks_compute_at_the_same_time() -> None:
    one, two = measured(), measured("--trainer.ranks", "2")
    assert [costs.trained_s for run in (one, two) if (costs := costs_of(run))] == [0.01, 0.02]


@pytest.mark.parametrize("settings", [("--engine.kind", "http", "--engine.servers", "1"), ("--trainer.device", "cuda")])
def test_without_cpu_seconds_of_all_work_there_is_no_limit(settings: tuple[str, ...]) -> None:
    assert costs_of(measured(*settings)) is None
    old = measured()
    assert costs_of(old._replace(steps=[step(1)])) is None
    assert costs_of(old._replace(timeline=old.timeline[:1])) is None


# ---- simulated runs: one engine and one trainer, each on a core of its own


SIMULATED = scenario.Costs(decode_step_s=tuple(0.5 + 0.125 * h for h in range(17)), train_step_s=3.0, train_token_s=0.25)
PROMPT, B, G = 2, 8, 2


class Work:
    """Groups of four: two short answers, and two of `longest` tokens. All are trained on."""

    prompt_tokens = float(PROMPT)

    def __init__(self, longest: int) -> None:
        self.lengths = (1, longest, 1, longest)

    def group(self, index: int) -> scenario.GroupWork:
        order = random.Random(index).sample(self.lengths, 4)
        return scenario.GroupWork(tuple(order), (True,) * 4)


def simulated(schedule: Schedule, longest: int) -> tuple[float, list[StepRecord]]:
    """The time of 20 steps with 16 slots, and their records."""
    options = {"engines": 1, "slots": 16, "group_size": 4, "batch_size": B, "steps": 20}
    run = simulate.simulate(scenario.Scenario(schedule=schedule, workload=Work(longest), costs=SIMULATED, **options))
    records = [step(n, completion_length_mean=(1 + longest) / 2) for n in range(1, 21)]
    tokens = {"tokens_forwarded": B * (1 + longest) // 2 + B * PROMPT}
    return run.time_s, [step(one.version, completion_length_mean=one.completion_length_mean, **tokens) for one in records]


@pytest.mark.parametrize("longest", [1, 4, 9, 30])
def test_the_speed_up_of_simulated_rounds_is_known(longest: int) -> None:
    """A round of 16 sequences decodes once at 16 and then at 8. A perfect pipeline always decodes at 16."""
    time_s, steps = simulated(ConventionalSchedule(B, G), longest)
    tokens = B * (1 + longest) // 2
    training_s = SIMULATED.train_step_s + SIMULATED.train_token_s * (tokens + B * PROMPT)
    round_s = SIMULATED.decode_step_s[16] + (longest - 1) * SIMULATED.decode_step_s[8] + G * training_s
    assert time_s == pytest.approx(10 * round_s)
    perfect_s = (G * tokens * SIMULATED.decode_step_s[16] / 16 + G * training_s) / 2

    costs = WorkCosts(SIMULATED.decode_step_s[16] / 16, training_s / (tokens + B * PROMPT))
    assert time_s / limit_s(steps, costs, 2) == pytest.approx(round_s / perfect_s)
    pipeline_s, steps = simulated(PipelineSchedule(B, None, stock=2 * B), longest)
    share = limit_s(steps, costs, 2) / pipeline_s
    assert 0.5 < share < 1
