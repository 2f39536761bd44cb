"""A run that trains adapters: engines hold and compute with merged weights, it learns, and goes on where it stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from pipelinerl.models.loading import load_model
from pipelinerl.models.state import named_weights
from pipelinerl.trainer import trainer
from tests.integration.runs import assert_conserved, assert_provenance, run, small_run, steps

pytestmark = pytest.mark.slow


def test_engines_are_right_all_along_and_the_model_under_the_adapters_is_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe compares what both sides compute with after each update: here its bound is that of rounding alone."""
    monkeypatch.setitem(trainer.TOLERANCE, trainer.torch.float32, 1e-4)
    kl = {"trainer__kl_coefficient": 0.05, "preprocess__zero_advantage": "keep"}
    counts = run(tmp_path / "r", trainer__steps=4, model__lora__rank=8, trainer__learning_rate=3e-3, **kl)
    assert counts["status"] == "finished"
    assert counts["weight_updates"] == 5
    assert_conserved(counts)
    assert_provenance(tmp_path / "r")
    first, *_, last = steps(tmp_path / "r")
    assert first.on_policy_gap is not None
    assert first.on_policy_gap < 1e-4
    assert last.kl_behaviour_policy_k3 is not None
    checkpoint = tmp_path / "r" / "checkpoints" / "step_00000004"
    base = named_weights(load_model(small_run(tmp_path / "r").model))
    merged = load_file(checkpoint / "model.safetensors")
    changed = {name for name, weight in merged.items() if not weight.equal(base[name])}
    assert changed == {name for name in merged if "_proj" in name}
