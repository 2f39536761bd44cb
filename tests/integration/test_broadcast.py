"""Whole runs whose weights go straight from the trainer into engine servers, by torch.distributed over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.runs import (
    assert_conserved,
    assert_provenance,
    start,
    start_processes,
    steps,
    summary,
    wait,
    weights_checksum,
    write_environment,
)

pytestmark = pytest.mark.slow
BROADCAST = {"engine__kind": "http", "weights__kind": "collective"}


@pytest.mark.exhaustive
def test_a_run_with_deltas_equals_one_that_sends_all_weights_and_resumes(tmp_path: Path) -> None:
    settings = {
        # One sequence at a time, in rounds: log-probabilities depend on the batch in their last bits.
        "engine__slots": 1,
        "schedule__kind": "conventional",
        "environment__kind": write_environment(
            tmp_path, "def reward(self, problem, text):\n    return float(len(text) % 2)"
        ),
        "actor__max_tokens": 12,
        "trainer__batch_size": 8,
        "trainer__learning_rate": 1e-6,
        **BROADCAST,
    }
    weights, sent = {}, {}
    for encoding in ("full", "delta"):
        run_dir = tmp_path / encoding
        ended = wait(start_processes(run_dir, trainer__steps=5, weights__encoding=encoding, **settings))
        assert (ended.status, ended.error) == (0, "")
        weights[encoding] = weights_checksum(run_dir / "checkpoints" / "step_00000005")
        sent[encoding] = [step.update for step in steps(run_dir)]
        assert sum(step.grad_norm or 0.0 for step in steps(run_dir)) > 0, "the weights have changed"
        assert_conserved(summary(run_dir))
        assert_provenance(run_dir)
    assert weights["delta"] == weights["full"]
    # Before a step is recorded, at least the update of the step before it is complete.
    assert all(a and b and a.version >= n for n, (a, b) in enumerate(zip(sent["full"], sent["delta"], strict=True)))
    last, full = sent["delta"][-1], sent["full"][-1]
    assert last is not None
    assert full is not None
    assert (last.encoding, full.encoding) == ("delta", "full")
    assert last.bytes < 0.7 * full.bytes, "in float32 the lower half of nearly every weight changes, the upper half rarely"

    run_dir = tmp_path / "delta"
    ended = wait(start("train", "--resume", str(run_dir), "--trainer.steps=8"))
    assert (ended.status, ended.error) == (0, "")
    assert [step.version for step in steps(run_dir)] == list(range(1, 9))
    assert (last := steps(run_dir)[-1].update) is not None
    assert last.encoding == "delta"
