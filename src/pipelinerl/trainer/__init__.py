"""The trainer stage: queue, loss, optimizer step, ESS guard, checkpoints, and publishing weights."""

from __future__ import annotations

from pipelinerl.trainer.logprobs import FrozenModelScorer
from pipelinerl.trainer.micro_batch import Packer
from pipelinerl.trainer.queue import QueueCounts, QueuePosition, SampleQueue
from pipelinerl.trainer.status import TrainerOutput
from pipelinerl.trainer.step import Learner, StepResult
from pipelinerl.trainer.trainer import CheckpointPlan, Trainer, TrainerCounters, TrainerState

__all__ = [
    "CheckpointPlan",
    "FrozenModelScorer",
    "Learner",
    "Packer",
    "QueueCounts",
    "QueuePosition",
    "SampleQueue",
    "StepResult",
    "Trainer",
    "TrainerCounters",
    "TrainerOutput",
    "TrainerState",
]
