"""`summary.json` from hand-made records, and the table that shows it."""

from __future__ import annotations

import re
from collections import Counter
from io import StringIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from rich.console import Console, RenderableType

from pipelinerl.config.schema import EnvironmentConfig, ModelConfig, RunConfig
from pipelinerl.experiments.compare.results import QUANTITIES
from pipelinerl.metrics.evaluations import EvaluationRecord
from pipelinerl.metrics.records import StepRecord
from pipelinerl.metrics.summary import account_for_rollouts, summarize
from pipelinerl.report.terminal import final_table, sample_before_after
from pipelinerl.types import ActorProgress, EngineProgress, Progress, StageStatus, TrainerProgress, WeightTransfer
from tests.unit.record_parts import answered, evaluation, status, statuses_of, step

CONFIG = RunConfig(seed=3, model=ModelConfig(path="some/model"), environment=EnvironmentConfig(kind="gcd"))
ENGINE = EngineProgress(
    version=8, tokens_generated=5000, busy_s=45.0, ready_s=50.0, weight_updates=8, pauses_s=(0.001, 0.002, 0.003, 0.104)
)
ACTOR = ActorProgress(
    rollouts_started=100,
    rollouts_handed_over=85,
    rollouts_cut=17,
    rollouts_dropped={"timeout": 2, "error": 1},
    dropped_tokens={"timeout": 90, "error": 0},
    rollouts_in_progress=12,
)
TRAINER = TrainerProgress(version=8, trained=64, dropped={"stale": 5, "timeout": 1}, queued=7, busy_s=20.0, ready_s=40.0)


def statuses(actor: ActorProgress = ACTOR) -> dict[str, StageStatus]:
    progress: dict[str, Progress] = {"engine": ENGINE, "actor": actor, "trainer": TRAINER}
    return statuses_of(*(status(stage, "done", progress=one) for stage, one in progress.items()))


def update(version: int) -> WeightTransfer:
    """All weights are 1000 bytes; every third update is a delta."""
    size, encoding = (100, "delta") if version % 3 == 0 else (1000, "full")
    return WeightTransfer(version=version, bytes=size, time_s=version / 10, encoding=encoding)


def steps(count: int) -> list[StepRecord]:
    """Rewards 0.1, 0.2, ...; step n trains n * 10 tokens at lag n; the ESS of the second step was not measured.

    The update to version n is recorded by step n + 1; that to version 4, by two steps."""
    return [
        step(
            n,
            float(n),
            tokens_trained=10 * n,
            reward_mean=n / 10,
            completion_length_mean=float(n),
            sampled_length_mean=20.0 if n > 1 else None,
            ess=None if n == 2 else 1 - n / 100,
            lag_mean=float(n),
            lag_max=2 * n,
            update=update(n - 1 - (n == 6)) if n > 1 else None,
        )
        for n in range(1, count + 1)
    ]


def summary_of(records: list[StepRecord], *evaluations: EvaluationRecord, **stages: StageStatus) -> dict[str, Any]:
    return summarize(CONFIG, records, evaluations, stages, wall_s=1.0, status="finished")


def whole_run(**changes: Any) -> dict[str, Any]:
    arguments = {
        "wall_s": 50.0,
        "status": "finished",
        "stream_rollouts": 8,
        "peak_memory_bytes": {"generation": 2**30, "training": 2**29},
    } | changes
    two = [answered(0.3, 10), answered(0.4, 30)]
    before = EvaluationRecord.of(two, when="before", version=0, time_s=0.0)
    last = evaluation("after", 8, reward_mean=0.95, reward_standard_error=0.05)
    return summarize(CONFIG, steps(8), [before, evaluation("after", 5), last], statuses(), **arguments)


def as_text(renderable: RenderableType, width: int = 140) -> str:
    console = Console(file=StringIO(), width=width)
    console.print(renderable)
    return console.file.getvalue()


def table_of(summary: dict[str, Any]) -> str:
    return " ".join(as_text(final_table(summary), 400).split())


LOW = [replace(one, ess=ess) for one, ess in zip(steps(5), (0.9, 0.49, None, 0.5, 0.1), strict=True)]
FALLEN = [
    step(n, reward_mean=0.9, reward_read_mean=mean, reward_std=mean)
    for n, mean in {n: 0.5 if n < 6 else 0.0 for n in range(1, 30)}.items()
]


@pytest.mark.parametrize(
    ("records", "numbers", "row"),
    [
        (
            LOW,
            {"ess_low_steps": 2, "ess_low_first": 2},
            "ESS │ mean 0.497, min 0.100; below 0.5 in 2 steps, first in step 2 │",
        ),
        (
            FALLEN,
            {"reward_first": 0.5, "reward_last": 0.0},
            "COLLAPSED │ every rollout has had the lowest reward, 0, since step 6",
        ),
        (steps(100), {"reward_first": 0.3, "reward_last": 9.8}, "0.300 -> 9.800 (means of 5 steps each)"),
    ],
    ids=["low ESS", "a collapse, by the rewards of all rollouts read", "the first and the last steps"],
)
def test_what_the_steps_say_is_counted_and_shown(records: list[StepRecord], numbers: dict[str, float], row: str) -> None:
    summary = summary_of(records)
    assert {name: summary[name] for name in numbers} == pytest.approx(numbers)
    assert row in table_of(summary)


def test_all_keys_are_always_there() -> None:
    empty = summarize(CONFIG, [], [], {}, wall_s=0.0, status="failed: the model can't be loaded")
    assert set(empty) == set(whole_run())
    by_compare = {"time_to_reward_s", "samples_to_reward", "samples_per_s_later", "length_mean", "slots_used_fraction"}
    assert QUANTITIES.keys() - by_compare - {"reward_last", "saving_s", "limit_share"} <= set(empty)
    assert {"lag_mean", "lag_max", "engine_busy_fraction", "trainer_busy_fraction", "rollouts_queued"} <= set(empty)
    for key in ("reward_first", "ess_min", "lag_max", "tokens_per_s", "eval_after_lengths", "rollouts_started"):
        assert empty[key] is None, key
    assert "model can't be loaded" in as_text(final_table(empty))


def test_the_numbers_by_hand() -> None:
    expected = {
        "model": "some/model",
        "version": 8,
        "samples_per_s": 64 / 50,
        "tokens_per_s": 100,
        "tokens_trained": 360,
        "reward_first": 0.15,  # min(5, 8 / 4) = 2 steps
        "reward_last": 0.75,
        "ess_mean": 1 - (1 + 3 + 4 + 5 + 6 + 7 + 8) / 700,
        "ess_min": 0.92,
        "lag_mean": sum(n * n for n in range(1, 9)) / 36,  # a token weighs as a token
        "lag_max": 16,
        "trained_length_mean": 4.5,
        "sampled_length_mean": 20.0,
        "update_pause_s_p50": 0.0025,
        "update_pause_s_p99": 0.003 + 0.97 * 0.101,
        "update_bytes_mean": (4 * 1000 + 2 * 100) / 6,  # versions 1, 2, 3, 4, 6, 7
        "update_s_p50": 0.35,
        "update_delta_fraction": 2 / 6,
        "engine_busy_fraction": 0.9,
        "trainer_busy_fraction": 0.5,
        "eval_reward_before": 0.35,
        "eval_reward_after": 0.95,  # the last of two
        "eval_before_lengths": {"mean": 20.0, "p50": 20.0, "p99": 29.8},
        "rollouts_dropped": {"timeout": 3, "error": 1, "stale": 5},
        "actor_dropped_length_mean": {"timeout": 45.0, "error": 0.0},
        "rollouts_queued": 15,
        "cut_fraction": 0.2,
        "nothing_learned": None,
        "generated_per_trained": {"rollouts": (64 + 9) / 64, "tokens": (8 * 36 + 90) / (8 * 36)},
        "no_gradient_fraction": 0.0,
    }
    summary = whole_run()
    for key, value in expected.items():
        assert summary[key] == (pytest.approx(value) if isinstance(value, float | dict) else value), key
    assert "conservation_error" not in summary  # 100 = 64 + 9 + 15 + 12


@pytest.mark.parametrize(
    ("reward", "std", "trained", "cut", "reason"),
    [
        (0.0, 0.0, {}, 85, "every rollout had the reward 0; 100% of the answers were cut"),
        (1.0, 0.0, {"tokens_trained": 10, "grad_norm": 0.0}, 0, "every rollout had the reward 1; check the answers"),
        (0.5, 0.5, {}, 0, "in every group all rewards were equal"),
    ],
)
def test_a_run_that_could_learn_nothing_says_so_and_why(
    reward: float, std: float, trained: dict[str, Any], cut: int, reason: str
) -> None:
    records = [step(version, reward_mean=reward, reward_std=std, **trained) for version in (1, 2)]
    summary = summary_of(records, **statuses(replace(ACTOR, rollouts_cut=cut)))
    assert reason in summary["nothing_learned"]
    table = table_of(summary)
    assert f"NOTHING LEARNED │ {summary['nothing_learned']}" in table
    assert f"{cut / 85:.1%} cut at their limit" in table
    assert summary_of([*records, step(3, tokens_trained=1, grad_norm=0.1)])["nothing_learned"] is None


def test_evaluations_while_training_and_of_each_environment_are_in_the_summary_and_the_table() -> None:
    def evaluated(when: str, version: int, words: float, **fields: Any) -> EvaluationRecord:
        metrics = {"words/reward": words, "numbers/reward": 0.5, "words/boxed": 1.0}
        return evaluation(when, version, reward_mean=words, metrics=metrics, **fields)

    summary = summary_of(
        steps(8),
        evaluated("before", 0, 0.1),
        evaluated("online", 3, 0.2, version_min=3, version_max=5),
        evaluated("online", 6, 0.3, skipped=2),
        evaluated("after", 8, 0.4),
    )
    first, last = summary["eval_online"]
    assert (first["version"], first["version_min"], first["version_max"]) == (3, 3, 5)
    assert (last["version"], last["reward"], summary["eval_skipped"]) == (6, 0.3, 2)
    table = as_text(final_table(summary))
    assert "evaluations: 2, the last 0.300 (version 6); 2 skipped" in table
    for row in (r"words +│ 0\.100 -> 0\.400", r"numbers +│ 0\.500 -> 0\.500"):
        assert re.search(row, table), row


@given(
    trained=st.integers(0, 50),
    queued=st.integers(0, 50),
    in_stream=st.integers(0, 50),
    in_progress=st.integers(0, 50),
    at_actor=st.dictionaries(st.sampled_from("abc"), st.integers(0, 9)),
    at_trainer=st.dictionaries(st.sampled_from("bcd"), st.integers(0, 9)),
    lost=st.integers(-3, 3),
)
def test_conservation(
    *, trained: int, queued: int, in_stream: int, in_progress: int, at_actor: Any, at_trainer: Any, lost: int
) -> None:
    dropped = Counter(at_actor) + Counter(at_trainer)
    started = trained + queued + in_stream + in_progress + dropped.total() + lost
    actor = ActorProgress(rollouts_started=started, rollouts_in_progress=in_progress, rollouts_dropped=at_actor)
    account = account_for_rollouts(actor, TrainerProgress(trained=trained, queued=queued, dropped=at_trainer), in_stream)
    assert Counter(account["rollouts_dropped"]) == dropped
    assert ("conservation_error" in account) == (lost != 0)
    if lost:
        assert account["conservation_error"]["missing"] == lost


def test_the_table_shows_what_matters() -> None:
    text = as_text(final_table(whole_run(peak_gpu_memory_bytes={"training": 2**31})))
    for shown in (
        "2.00 GiB (training 2.00 GiB)",
        "gcd, pipeline, seed 3: finished",
        "0.350 ± 0.050 -> 0.950 ± 0.050",
        "8 optimizer steps, 64 rollouts in 50s",
        "1.28 samples/s, 100 tokens/s generated, with start-up",
        "mean 0.951, min 0.920",
        "pause p50 2.5 ms, p99 101 ms",
        "engine 90%, trainer 50%",
        "1.50 GiB (generation 1.00 GiB, training 512 MiB)",
        "100 started = 64 trained + 9 dropped (stale 5, timeout 3, error 1) + 15 queued + 12 unfinished",
    ):
        assert shown in text, shown
    lost = whole_run(stream_rollouts=6)
    error = lost["conservation_error"]
    assert (error["started"], error["accounted"], error["missing"]) == (100, 98, 2)
    assert error["queued_in_stream"] + error["queued_at_trainer"] == lost["rollouts_queued"]
    assert "NOT ACCOUNTED FOR" in as_text(final_table(lost))


def test_the_metrics_of_the_environment_come_first() -> None:
    def used(one: StepRecord, errors: float, **metrics: float) -> StepRecord:
        calls = {"tool_calls": 2.0, "tool_errors": errors, "never": 0.0}
        return replace(one, metrics=calls | metrics, metric_counts=dict.fromkeys(metrics, one.version))

    before, *_, almost, after = steps(8)
    records = [used(before, 1.0, distinct=0.25), used(almost, 0.5), used(after, 0.74, distinct=0.5)]
    summary = summary_of([records[0], *steps(8)[1:6], *records[1:]])
    assert summary["metrics_last"]["distinct"] == 0.5
    assert summary["metrics_last"]["tool_errors"] == pytest.approx(0.62)
    shown = as_text(final_table(summary))
    rows = [[cell.strip() for cell in line.split("│")[1:3]] for line in shown.splitlines() if line.startswith("│")]
    assert rows[0] == ["metrics", "distinct 0.25 -> 0.5, tool_calls 2 -> 2, tool_errors 1 -> 0.62"]


def test_a_sample_is_shown_literally() -> None:
    before = answered(0.0, prompt="84,36: [bold]", completion="12>[red]")
    text = as_text(sample_before_after(before, answered(1.0)))
    assert "84,36: [bold]" in text
    assert "before training, reward 0" in text
    assert "12>[red]" in text
    assert "(empty)" in text
