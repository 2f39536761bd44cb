"""What the sharded learner refuses; that it computes what one process does is tested with real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipelinerl.config.schema import TrainerConfig
from pipelinerl.models.loading import load_model
from pipelinerl.preprocess.packing import pack
from pipelinerl.trainer.sharding.learner import ShardedLearner, ShardedPolicy
from pipelinerl.trainer.sharding.ranks import Team
from tests.unit.models.test_sharded_model import fake_mesh, no_group_afterwards, saved

__all__ = ["no_group_afterwards"]


def test_a_parameter_that_is_not_sharded_is_refused(tmp_path: Path) -> None:
    """The optimizer would train a copy that the model does not use."""
    config, trainer, peers = saved(tmp_path), TrainerConfig(ranks=2), None
    team = Team(1, 2, peers, fake_mesh(), torch.device("cpu"))  # type: ignore[arg-type]
    options: Any = {"temperature": 1.0, "pack": pack}
    policy = ShardedPolicy(config, trainer, team)
    policy.model = load_model(config)
    with pytest.raises(RuntimeError, match="parameters of the model are not sharded"):
        ShardedLearner(policy, trainer, team, **options)
