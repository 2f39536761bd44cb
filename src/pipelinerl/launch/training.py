"""The training side of a run: the trainer, over prepared groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pipelinerl.checkpoint import load_checkpoint
from pipelinerl.files import JsonLines
from pipelinerl.interfaces import Board, StreamReader, WeightSender
from pipelinerl.launch.session import Session
from pipelinerl.launch.starting import starting
from pipelinerl.metrics.sinks import Sink, make_sink
from pipelinerl.models.loading import checkpoint_activations, load_model, load_tokenizer
from pipelinerl.preprocess import Prepared, pack
from pipelinerl.status import generation_stages
from pipelinerl.trainer import CheckpointPlan, Learner, SampleQueue, Trainer, TrainerState
from pipelinerl.trainer.provenance import TRAINED_FILE


@dataclass(frozen=True)
class TrainingLogs:
    """Where the trainer writes what it did."""

    metrics: Sink
    trained: JsonLines


@contextmanager
def open_logs(session: Session) -> Iterator[TrainingLogs]:
    metrics = make_sink(session.run.root, tensorboard=session.config.metrics.tensorboard)
    with closing(metrics), JsonLines(session.run.rollouts / TRAINED_FILE) as trained:
        yield TrainingLogs(metrics, trained)


def build_trainer(
    session: Session, board: Board, reader: StreamReader[Prepared], sender: WeightSender, logs: TrainingLogs
) -> Trainer:
    """Load the model, or the checkpoint that the plan names, and make the trainer. Nothing is sent or trained yet."""
    config, plan = session.config, session.plan
    starting(board, ["trainer"], "loads the model")
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
        config.schedule.max_lag,
        by_index=session.schedule.trains_in_rounds(),
        position=state.position,
        counts=state.counters.queue,
    )
    return Trainer(
        config.trainer,
        learner,
        queue,
        session.schedule,
        sender,
        board=board,
        sink=logs.metrics,
        trained_log=logs.trained,
        checkpoints=CheckpointPlan(directory=session.run.checkpoints, tokenizer=load_tokenizer(source)),
        state=state,
        engines=[stages.engine for stages in generation_stages(config.engine.processes)],
        started_s=session.records_from_s,
    )


@contextmanager
def failures_on_board(trainer: Trainer) -> Iterator[None]:
    """Whatever ends training inside is said on the board, with the last counts of the rollouts, and raised."""
    try:
        yield
    except BaseException as error:
        trainer.fail(type(error).__name__)
        raise
