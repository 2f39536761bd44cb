"""A run that trains adapters: engines hold and compute with merged weights, it learns, and goes on where it stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from pipelinerl.errors import ConfigError, RunDirectoryError
from pipelinerl.models.loading import load_model
from pipelinerl.models.state import named_weights
from pipelinerl.trainer import trainer
from tests.integration.runs import (
    assert_conserved,
    assert_provenance,
    resume,
    run,
    small_run,
    steps,
    trained,
    weights_checksum,
)

pytestmark = pytest.mark.slow

LORA = {"model__lora__rank": 8, "trainer__learning_rate": 3e-3}


def test_engines_are_right_all_along_and_the_model_under_the_adapters_is_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe compares what both sides compute with after each update: here its bound is that of rounding alone."""
    monkeypatch.setitem(trainer.TOLERANCE, trainer.torch.float32, 1e-4)
    kl = {"trainer__kl_coefficient": 0.05, "preprocess__zero_advantage": "keep"}
    counts = run(tmp_path / "r", trainer__steps=4, **LORA, **kl)
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


def test_the_next_step_after_a_resume_is_the_same(tmp_path: Path) -> None:
    settings = {"schedule__kind": "conventional", "trainer__keep_checkpoints": 10, **LORA}
    run(tmp_path / "straight", trainer__steps=4, trainer__checkpoint_every=3, **settings)
    run(tmp_path / "halves", trainer__steps=2, **settings)
    with pytest.raises(RunDirectoryError, match=r'was run with model\.lora {"rank":8,.*: set it to that again'):
        resume(tmp_path / "halves", trainer__steps=3, model__lora__alpha=4)
    for goal in (3, 4):
        resume(tmp_path / "halves", trainer__steps=goal)
    for version in (3, 4):
        checkpoint = Path("checkpoints") / f"step_{version:08d}"
        assert weights_checksum(tmp_path / "straight" / checkpoint) == weights_checksum(tmp_path / "halves" / checkpoint)
    assert trained(tmp_path / "straight") == trained(tmp_path / "halves")


def test_a_layer_that_is_not_there_ends_the_run_at_once(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"model\.lora\.target_modules: .* gate_proj, up_proj, down_proj; 'query' isn't one"
    ):
        run(tmp_path / "r", model__lora__target_modules="[query]")
