"""The training side of a run: preprocessor and trainer over one model."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from pipelinerl.checkpoint import load_checkpoint
from pipelinerl.config.schema import RunConfig
from pipelinerl.files import JsonLines
from pipelinerl.interfaces import Board, Schedule, StreamReader, WeightSender
from pipelinerl.launch.plan import StartPlan
from pipelinerl.launch.run_directory import RunDirectory
from pipelinerl.metrics.sinks import make_sink
from pipelinerl.models.loading import checkpoint_activations, load_model, load_tokenizer
from pipelinerl.preprocess.packing import pack
from pipelinerl.preprocess.preprocessor import Preprocessor
from pipelinerl.trainer import CheckpointPlan, FrozenModelScorer, Learner, SampleQueue, Trainer, TrainerState
from pipelinerl.types import Group, StageStatus


def build_trainer(
    config: RunConfig,
    run: RunDirectory,
    *,
    board: Board,
    schedule: Schedule,
    plan: StartPlan,
    reader: StreamReader[Group],
    sender: WeightSender,
    started_s: float,
) -> Trainer:
    """Load the model, or the checkpoint that the plan names, and make the trainer. Nothing is sent or trained yet."""
    _starting(board)
    checkpoint = load_checkpoint(Path(plan.checkpoint)) if plan.checkpoint else None
    source = msgspec.structs.replace(config.model, path=str(checkpoint.path)) if checkpoint else config.model
    model = load_model(source, config.trainer.device)
    if config.trainer.gradient_checkpointing:
        checkpoint_activations(model)
    learner = Learner(
        model,
        config.trainer,
        temperature=config.actor.temperature,
        pack=pack,
        skip_zero_advantage=config.preprocess.zero_advantage == "skip",
    )
    state = TrainerState.resume(checkpoint, learner) if checkpoint else TrainerState()
    queue = SampleQueue(
        reader,
        Preprocessor(config.preprocess, _reference(config)),
        config.schedule.max_lag,
        position=state.position,
        counts=state.counters.queue,
    )
    return Trainer(
        config.trainer,
        learner,
        queue,
        schedule,
        sender,
        board=board,
        sink=make_sink(run.root, tensorboard=config.metrics.tensorboard),
        trained_log=JsonLines(run.rollouts / "trained.jsonl"),
        checkpoints=CheckpointPlan(directory=run.checkpoints, tokenizer=load_tokenizer(source)),
        state=state,
        started_s=started_s,
    )


def _reference(config: RunConfig) -> FrozenModelScorer | None:
    """The initial model, frozen, if a KL penalty to it is asked for."""
    if config.trainer.kl_coefficient == 0:
        return None
    return FrozenModelScorer(
        load_model(config.model, config.trainer.device),
        temperature=config.actor.temperature,
        micro_batch_tokens=config.trainer.micro_batch_tokens,
        pack=pack,
    )


def _starting(board: Board) -> None:
    now = time.monotonic()
    board.publish(
        StageStatus(stage="trainer", pid=os.getpid(), state="starting", detail="loads the model", since_s=now, written_s=now)
    )
