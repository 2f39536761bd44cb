"""The training process: the policy, and the trainer, which reads prepared groups."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipelinerl.checkpoint import Checkpoint, load_checkpoint
from pipelinerl.files import JsonLines
from pipelinerl.interfaces import Board, StreamReader, WeightSender
from pipelinerl.launch.interrupts import stop_on_sigterm
from pipelinerl.launch.session import Session
from pipelinerl.launch.stages.preprocessing import prepared_groups
from pipelinerl.launch.stages.weights import make_sender
from pipelinerl.metrics.sinks import Sink, make_sink
from pipelinerl.models.loading import load_model, load_tokenizer
from pipelinerl.models.lora import LoraModel, refuse_adapter
from pipelinerl.preprocess.packing import pack
from pipelinerl.status.board import MmapBoard
from pipelinerl.status.reporter import generation_stages, starting
from pipelinerl.trainer import CheckpointPlan, Learner, SampleQueue, Trainer, TrainerOutput, TrainerState
from pipelinerl.trainer.records import TRAINED_FILE
from pipelinerl.types import TRAINER, Prepared


def run_training(session: Session, weights_fd: int) -> None:
    """The training process, to its end. SIGTERM asks it to stop with a checkpoint."""
    torch.set_num_threads(session.here.threads)
    stopping = threading.Event()
    board = MmapBoard(session.run.scratch)
    policy = load_policy(session, board)
    with (
        closing(prepared_groups(session, policy.lora)) as reader,
        closing(make_sender(session, weights_fd, stopping.is_set)) as sender,
        open_logs(session) as logs,
    ):
        trainer = build_trainer(session, board, policy, reader=reader, sender=sender, logs=logs)
        stop = stop_on_sigterm(stopping)
        with failures_on_board(trainer):
            trainer.run(stop)


@dataclass(frozen=True)
class TrainingLogs:
    """The files that the trainer writes its records to."""

    metrics: Sink
    trained: JsonLines


@contextmanager
def open_logs(session: Session) -> Iterator[TrainingLogs]:
    metrics = make_sink(session.run.root, tensorboard=session.config.metrics.tensorboard)
    with closing(metrics), JsonLines(session.run.rollouts / TRAINED_FILE) as trained:
        yield TrainingLogs(metrics, trained)


@dataclass(frozen=True)
class Policy:
    """The model to train and the checkpoint it was loaded from, if any. With `model.lora`, it has the adapters of `lora`."""

    model: Any
    lora: LoraModel | None
    tokenizer: Any
    checkpoint: Checkpoint | None


def load_policy(session: Session, board: Board) -> Policy:
    """Load the model, or the checkpoint that the plan names.

    With adapters: load the run's initial model and the checkpoint's adapters.
    """
    config, plan = session.config, session.plan
    starting(board, [TRAINER], "loads the model")
    checkpoint = load_checkpoint(Path(plan.checkpoint)) if plan.checkpoint else None
    merged = config.model.model_copy(update={"path": str(checkpoint.path)}) if checkpoint else config.model
    if config.model.lora is None:
        if checkpoint:
            refuse_adapter(checkpoint.path)
        return Policy(load_model(merged, config.trainer.device), None, load_tokenizer(merged), checkpoint)
    lora = LoraModel(load_model(config.model, config.trainer.device), config.model.lora, seed=config.seed)
    if checkpoint:
        lora.load_adapter(checkpoint.path)
    return Policy(lora.model, lora, load_tokenizer(merged), checkpoint)


def build_trainer(
    session: Session,
    board: Board,
    policy: Policy,
    *,
    reader: StreamReader[Prepared],
    sender: WeightSender,
    logs: TrainingLogs,
) -> Trainer:
    """Make the trainer of `policy`, with the state of its checkpoint. Nothing is sent or trained yet."""
    config = session.config
    learner = Learner(
        policy.model,
        config.trainer,
        temperature=config.actor.temperature,
        pack=pack,
        correction=config.correction,
        skip_zero_advantage=config.preprocess.zero_advantage == "skip",
        lora=policy.lora,
    )
    state = TrainerState.resume(policy.checkpoint, learner) if policy.checkpoint else TrainerState()
    queue = SampleQueue(
        reader,
        by_index=session.schedule.trains_in_rounds(),
        position=state.position,
        counts=state.counters.queue,
    )
    generation = generation_stages(config.engine.processes)
    return Trainer(
        config.trainer,
        learner,
        queue,
        session.schedule,
        sender,
        output=TrainerOutput(
            board=board,
            sink=logs.metrics,
            trained_log=logs.trained,
            engines=[stages.engine for stages in generation],
            actors=[stages.actor for stages in generation],
            started_s=session.records_from_s,
        ),
        checkpoints=CheckpointPlan(directory=session.run.checkpoints, tokenizer=policy.tokenizer),
        state=state,
    )


@contextmanager
def failures_on_board(trainer: Trainer) -> Iterator[None]:
    """On an exception inside, publish the failure with the final rollout counts on the status board, and re-raise."""
    try:
        yield
    except BaseException as error:
        trainer.fail(type(error).__name__)
        raise
