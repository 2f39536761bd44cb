"""The preprocessor of a run: in the trainer's process, or in a separate one."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import TYPE_CHECKING

from pipelinerl.config.schema import RunConfig
from pipelinerl.interfaces import StreamReader
from pipelinerl.launch.session import Session
from pipelinerl.launch.stages.streams import group_reader, prepared_reader, prepared_writer
from pipelinerl.parent_pipe import stop_on_sigterm
from pipelinerl.preprocess import PreparingReader, Preprocessor, PreprocessorStage, ReferenceScorer, pack
from pipelinerl.status.board import MmapBoard
from pipelinerl.status.reporter import starting
from pipelinerl.types import PREPROCESSOR, TRAINER, Group, Prepared, goal_reached

if TYPE_CHECKING:
    from pipelinerl.models.lora import LoraModel


def run_preprocessing(session: Session) -> None:
    """The preprocessing process, between two streams, until the trainer has reached its goal or SIGTERM asks it to stop."""
    board, store = MmapBoard(session.run.scratch), session.streams()
    with closing(group_reader(store)) as reader, closing(prepared_writer(store)) as writer:
        starting(board, [PREPROCESSOR], "loads the reference model, if there is one")
        stage = PreprocessorStage(preparing(session.config, reader), writer, board=board, name=PREPROCESSOR)
        stop = stop_on_sigterm(threading.Event())
        stage.run(lambda: stop() or goal_reached(board.read(TRAINER)))


def preparing(config: RunConfig, reader: StreamReader[Group], lora: LoraModel | None = None) -> PreparingReader:
    """A reader that prepares the groups of `reader` as they are read (see `make_preprocessor`)."""
    return PreparingReader(reader, make_preprocessor(config, lora))


def make_preprocessor(config: RunConfig, lora: LoraModel | None = None) -> Preprocessor:
    """The preprocessor of a run.

    The reference model of a KL penalty is the base model under the adapters of `lora`; without them it is loaded. It
    is None if ranks of a sharded trainer compute with it in the step.
    """
    return Preprocessor(config.preprocess, _reference(config, lora))


def prepared_groups(session: Session, lora: LoraModel | None) -> StreamReader[Prepared]:
    """The trainer's reader: the prepared stream, or `preparing` if groups are prepared in this process.

    `lora` are the adapters of the trainer's model, if it has any.
    """
    store = session.streams()
    if session.config.launch.preprocessor == "process":
        return prepared_reader(store)
    return preparing(session.config, group_reader(store), lora)


def scores_in_the_step(config: RunConfig) -> bool:
    """Whether the ranks of a sharded trainer compute with the reference model of a KL penalty, in the step."""
    trainer = config.trainer
    return trainer.kl_coefficient > 0 and trainer.ranks > 1 and config.launch.preprocessor == "with_trainer"


def _reference(config: RunConfig, lora: LoraModel | None) -> ReferenceScorer | None:
    """The scorer with the initial model, if a KL penalty is configured."""
    if config.trainer.kl_coefficient == 0 or scores_in_the_step(config):
        return None
    from pipelinerl.models.loading import load_model  # noqa: PLC0415 - with torch, which nothing else here needs
    from pipelinerl.trainer import FrozenModelScorer  # noqa: PLC0415 - as above

    return FrozenModelScorer(
        lora.model if lora else load_model(config.model, config.trainer.device),
        temperature=config.actor.temperature,
        micro_batch_tokens=config.trainer.micro_batch_tokens,
        pack=pack,
        lora=lora,
        head_chunk=config.trainer.head_chunk,
    )
