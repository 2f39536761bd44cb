"""What the sharded learner refuses and reports; that it computes what one process does is tested with real processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipelinerl.checkpoint_folders import FileRecord, Folders
from pipelinerl.config.schema import TrainerConfig
from pipelinerl.models.loading import load_model
from pipelinerl.preprocess.packing import pack
from pipelinerl.trainer.sharding.learner import ShardedLearner, ShardedPolicy
from pipelinerl.trainer.sharding.ranks import Saved, Team
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


def test_what_another_rank_has_sent_of_its_part_is_reported(tmp_path: Path) -> None:
    """So the trainer makes progress while it waits for a long transfer."""

    class Sending(Folders):
        def finished(self, file: Path) -> FileRecord:
            for sent_bytes in (0, 5, 5, 9):
                self.on_sent(sent_bytes)
            return FileRecord(9, "checksum")

    messages: list[Saved] = []
    peers: Any = SimpleNamespace(send=messages.append, receive=lambda kind, rank: messages.pop(0))
    ranks = [ShardedLearner.__new__(ShardedLearner) for _ in range(2)]
    for rank, learner in enumerate(ranks):
        learner.lora, learner._team = None, Team(rank, 2, peers, None, torch.device("cpu"))  # type: ignore[arg-type]
        learner.optimizer = SimpleNamespace(state=dict)  # type: ignore[assignment]
    answer = ranks[1]._save_rows(str(tmp_path), Sending(tmp_path.parent))
    peers.send = lambda order: messages.append(answer)  # after what came before
    sent: list[int] = []
    ranks[0].on_sent = sent.append
    assert ranks[0].save_optimizer(tmp_path) == {"optimizer-00002-of-00002.safetensors": FileRecord(9, "checksum")}
    assert sent == [5, 9]
