"""The trainer stage: queue, loss, optimizer step, ESS guard, checkpoints, and publishing weights."""

from __future__ import annotations

from pipelinerl.trainer.logprobs import FrozenModelScorer
from pipelinerl.trainer.queue import SampleQueue
from pipelinerl.trainer.status import TrainerOutput
from pipelinerl.trainer.step import Learner, StepResult
from pipelinerl.trainer.trainer import Trainer

__all__ = [
    "FrozenModelScorer",
    "Learner",
    "SampleQueue",
    "StepResult",
    "Trainer",
    "TrainerOutput",
]
