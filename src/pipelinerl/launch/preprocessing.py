"""The preprocessor of a run: in the trainer's process, or in one of its own."""

from __future__ import annotations

from pipelinerl.config.schema import RunConfig
from pipelinerl.interfaces import Board, StreamReader, StreamWriter
from pipelinerl.launch.roles import PREPROCESSOR_STAGE
from pipelinerl.launch.session import Session
from pipelinerl.launch.starting import starting
from pipelinerl.launch.streams import group_reader, prepared_reader
from pipelinerl.preprocess import Prepared, PreparingReader, Preprocessor, PreprocessorStage, ReferenceScorer, pack
from pipelinerl.types import Group


def preparing(config: RunConfig, reader: StreamReader[Group]) -> PreparingReader:
    """The groups of `reader`, prepared as they are read. Loads the reference model, if there is a KL penalty to it."""
    return PreparingReader(reader, Preprocessor(config.preprocess, _reference(config)))


def prepared_groups(session: Session) -> StreamReader[Prepared]:
    """What the trainer reads. The reference model is loaded here if the preprocessor is in this process."""
    store = session.streams()
    if session.config.launch.preprocessor == "process":
        return prepared_reader(store)
    return preparing(session.config, group_reader(store))


def build_preprocessor(
    session: Session, board: Board, reader: StreamReader[Group], writer: StreamWriter[Prepared]
) -> PreprocessorStage:
    """The preprocessor as a stage of its own, between two streams."""
    starting(board, [PREPROCESSOR_STAGE], "loads the reference model, if there is one")
    return PreprocessorStage(preparing(session.config, reader), writer, board=board, name=PREPROCESSOR_STAGE)


def _reference(config: RunConfig) -> ReferenceScorer | None:
    """The initial model, frozen, if a KL penalty to it is asked for."""
    if config.trainer.kl_coefficient == 0:
        return None
    from pipelinerl.models.loading import load_model  # noqa: PLC0415 - with torch, which nothing else here needs
    from pipelinerl.trainer import FrozenModelScorer  # noqa: PLC0415 - as above

    return FrozenModelScorer(
        load_model(config.model, config.trainer.device),
        temperature=config.actor.temperature,
        micro_batch_tokens=config.trainer.micro_batch_tokens,
        pack=pack,
    )
