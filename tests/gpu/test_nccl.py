"""A sharded trainer over nccl, with the one rank that one GPU allows: devices, streams and types are those of several."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from pipelinerl.channel import listen
from pipelinerl.config.schema import TrainerConfig
from pipelinerl.trainer.sharding import ranks
from tests.integration import sharded_parts as parts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
NAMES = ["default", "untied", "checkpointing", "lora", "bfloat16", "kl", "kl_lora"]


def test_one_rank_over_nccl_equals_one_process(tmp_path: Path) -> None:
    parts.write_models(tmp_path)
    config = TrainerConfig(ranks=1, device="cuda")
    with ranks.join(config, 0, listen(), parts.KEY, start_s=60.0, stall_s=60.0) as team:
        for name in NAMES:
            parts.train_alone(tmp_path, name, tmp_path / "alone" / name, device="cuda")
            parts.train_as_rank(tmp_path, name, tmp_path / "rank" / name, team, device="cuda")
    for name in NAMES:
        ours, theirs = (
            msgspec.json.decode((tmp_path / who / name / "outcome.json").read_bytes(), type=parts.Outcome)
            for who in ("rank", "alone")
        )
        for step, expected in zip(ours.steps, theirs.steps, strict=True):
            assert step == pytest.approx(expected, rel=1e-5, abs=1e-5), name
        weights, expected_weights = (load_file(tmp_path / who / name / "weights.safetensors") for who in ("rank", "alone"))
        for key, tensor in weights.items():
            torch.testing.assert_close(tensor, expected_weights[key], rtol=0.01, atol=1e-5, msg=f"{name}: {key}")
