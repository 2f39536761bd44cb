"""The whole pipeline in one process: the same run file gives the same run, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.integration.runs import (
    assert_conserved,
    assert_provenance,
    assert_trained_once,
    groups,
    run,
    steps,
    summary,
    trained,
    weights_checksum,
)

SCHEDULES: dict[str, dict[str, Any]] = {
    "pipeline": {"engine__kv_on_update": "keep"},
    "pipeline, recompute": {"engine__kv_on_update": "recompute"},
    "pipeline, max_lag 1": {"schedule__max_lag": 1, "engine__kv_on_update": "keep"},
    "conventional": {"schedule__kind": "conventional", "schedule__steps_per_round": 2},
    "async": {"schedule__kind": "async", "schedule__steps_per_round": 2},
}


def timeless(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics without what depends on the clock: times, and engine and actor as last seen on the board."""
    clocked = {"time_s", "train_s", "wait_s", "publish_s", "saving_s", "cpu_s", "engine"}
    clocked |= {"started_length_mean", "actor_dropped", "actor_dropped_tokens"}
    records = [msgspec.to_builtins(step) for step in steps(run_dir)]
    for record in records:
        del record["update"]["time_s"]
    return [{key: value for key, value in record.items() if key not in clocked} for record in records]


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_same_run_file_gives_the_same_run(name: str, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for run_dir in (first, second):
        counts = run(run_dir, **SCHEDULES[name], trainer__steps=3, evaluation__problems=4)
        assert counts["status"] == "finished"
        assert counts["optimizer_steps"] == 3
        assert_conserved(counts)
    one, other = (run_dir / "rollouts" for run_dir in (first, second))
    for record in ("rollouts.jsonl", "trained.jsonl", "evaluation-before.jsonl", "evaluation-after.jsonl"):
        assert (one / record).read_bytes() == (other / record).read_bytes(), record
    assert timeless(first) == timeless(second)
    last = Path("checkpoints") / "step_00000003"
    assert weights_checksum(first / last) == weights_checksum(second / last)
    assert_trained_once(first)
    spanning = assert_provenance(first)
    assert bool(spanning) == name.startswith("pipeline"), "only in flight does a sequence see an update"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["conventional", "async"])
def test_rounds_have_the_lag_of_the_method_and_batches_that_are_not_sorted_by_length(kind: str, tmp_path: Path) -> None:
    """Conventional: 0 .. G-1 within a round. Async: the first round on policy, then G .. 2G-1.

    A round is complete before its first step: in order of completion its last batch would be the long rollouts.
    """
    run(tmp_path / "r", schedule__kind=kind, schedule__steps_per_round=2, trainer__steps=6)
    records = trained(tmp_path / "r")
    later = [{0}, {1}] if kind == "conventional" else [{2}, {3}]
    assert [{sample.lag_max for sample in record.samples} for record in records] == [{0}, {1}, *later, *later]
    finished = [group.index for group in groups(tmp_path / "r")]
    assert finished != sorted(finished), "if they end in order, this shows nothing"
    for first in (0, 2, 4):
        taken = [sample.group_index for record in records[first : first + 2] for sample in record.samples]
        assert taken == sorted(taken)


@pytest.mark.slow
def test_streams_in_memory_and_in_files_give_the_same_run(tmp_path: Path) -> None:
    for kind in ("memory", "files"):
        run(tmp_path / kind, stream__kind=kind, trainer__steps=2)
    records = [(tmp_path / kind / "rollouts" / "rollouts.jsonl").read_bytes() for kind in ("memory", "files")]
    assert records[0] == records[1]


def test_no_key_that_tools_rely_on_and_no_metric_is_left_out(tmp_path: Path) -> None:
    run(tmp_path / "r", trainer__steps=2, evaluation__problems=4)
    promised = """schedule wall_s optimizer_steps samples_trained tokens_generated tokens_trained reward_first reward_last
    eval_reward_before eval_reward_after ess_mean ess_min lag_mean lag_max weight_updates update_pause_s_p50
    update_pause_s_p99 engine_busy_fraction trainer_busy_fraction rollouts_started rollouts_trained rollouts_dropped
    rollouts_queued rollouts_in_progress"""
    written = summary(tmp_path / "r")
    assert [key for key in promised.split() if written[key] is None] == []
    for name in ("config.yaml", "metrics.jsonl", "rollouts/rollouts.jsonl", "checkpoints/step_00000002/model.safetensors"):
        assert (tmp_path / "r" / name).is_file()
    learnt = [step for step in steps(tmp_path / "r") if step.tokens_trained]
    assert learnt
    # The board may be older than the first groups, and there is no correlation if all rollouts have the same lag.
    may_be_none = {"engine", "started_length_mean", "length_lag_correlation", "gradient_cosine"}
    for step in learnt:
        assert {name for name, value in msgspec.structs.asdict(step).items() if value is None} <= may_be_none
