"""The preprocessor of a run: in the trainer's process, or in a separate one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from pipelinerl.config.schema import RunConfig
from pipelinerl.hub.client import HubClient, HubReader
from pipelinerl.launch.session import Session
from pipelinerl.preprocess.preprocessor import prepare, run_stage
from pipelinerl.process import stop_on_sigterm
from pipelinerl.status.board import starting
from pipelinerl.types import PREPROCESSOR, TRAINER, Group, Prepared, goal_reached

if TYPE_CHECKING:
    from pipelinerl.models.lora import LoraModel


def run_preprocessing(session: Session, hub: HubClient) -> None:
    """The preprocessing process, until the trainer has reached its goal or SIGTERM asks it to stop."""
    starting(hub, [PREPROCESSOR], "loads the reference model, if there is one")
    reader = HubReader(hub, Group, ahead=1, prepare=make_preprocessor(session.config))
    stop = stop_on_sigterm(threading.Event())
    run_stage(reader, hub, lambda: stop() or goal_reached(hub.read(TRAINER)))


def scores_in_the_step(config: RunConfig) -> bool:
    """Whether the ranks of a sharded trainer compute with the reference model of a KL penalty, in the step."""
    trainer = config.trainer
    return trainer.kl_coefficient > 0 and trainer.ranks > 1 and config.launch.preprocessor == "with_trainer"


def make_preprocessor(config: RunConfig, lora: LoraModel | None = None) -> Callable[[Group], Prepared]:
    """What prepares the groups of a run.

    The reference model of a KL penalty is the base model under the adapters of `lora`; without them it is loaded. It
    is None if ranks of a sharded trainer compute with it in the step.
    """
    if config.trainer.kl_coefficient == 0 or scores_in_the_step(config):
        return partial(prepare, config=config.preprocess)
    from pipelinerl.models.loading import load_model  # noqa: PLC0415 - with torch, which nothing else here needs
    from pipelinerl.trainer.logprobs import FrozenModelScorer  # noqa: PLC0415 - as above

    reference = FrozenModelScorer(
        lora.model if lora else load_model(config.model, config.trainer.device),
        temperature=config.actor.temperature,
        micro_batch_tokens=config.trainer.micro_batch_tokens,
        lora=lora,
        head_chunk=config.trainer.head_chunk,
    )
    return partial(prepare, config=config.preprocess, score=reference.score)
