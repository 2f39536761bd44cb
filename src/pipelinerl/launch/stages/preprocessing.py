"""The preprocessor of a run: in the trainer's process, or in a separate one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import UserError
from pipelinerl.hub.client import HubClient, HubReader
from pipelinerl.launch.session import Session
from pipelinerl.preprocess.preprocessor import prepare, run_stage
from pipelinerl.process import stop_on_sigterm
from pipelinerl.status.board import starting
from pipelinerl.types import PREPROCESSOR, TRAINER, Group, Prepared, goal_reached

if TYPE_CHECKING:
    from pipelinerl.models.lora import LoraModel
    from pipelinerl.serving.client.scoring import ServerScorer


def run_preprocessing(session: Session, hub: HubClient) -> None:
    """The preprocessing process, until the trainer has reached its goal or SIGTERM asks it to stop."""
    starting(hub, [PREPROCESSOR], "loads the reference model, if there is one")
    reader = HubReader(hub, Group, ahead=1, prepare=make_preprocessor(session.config))
    stop = stop_on_sigterm(threading.Event())
    run_stage(reader, hub, lambda: stop() or goal_reached(hub.read(TRAINER)))


def scores_in_the_step(config: RunConfig) -> bool:
    """Whether the ranks of a sharded trainer compute with the reference model of the KL term, in the step."""
    trainer = config.trainer
    return trainer.loads_reference and trainer.ranks > 1 and config.launch.preprocessor == "with_trainer"


def make_preprocessor(config: RunConfig, lora: LoraModel | None = None) -> Callable[[Group], Prepared]:
    """What prepares the groups of a run.

    The reference model of the KL term is loaded, unless it is the base model under the adapters of `lora`. There is none
    here if ranks of a sharded trainer compute with it in the step.
    """
    in_the_step = scores_in_the_step(config)
    if config.trainer.kl_coefficient == 0 or in_the_step:
        return partial(prepare, config=config.preprocess, scores_prompts=not in_the_step)
    if teacher := server_scorer(config):
        return partial(prepare, config=config.preprocess, score=teacher.score)
    from pipelinerl.models.loading import load_model  # noqa: PLC0415 - with torch, which nothing else here needs
    from pipelinerl.trainer.logprobs import FrozenModelScorer  # noqa: PLC0415 - as above

    trainer, under = config.trainer, None if config.trainer.teacher else lora
    reference = FrozenModelScorer(
        under.model if under else load_model(trainer.reference(config.model), trainer.device),
        temperature=config.actor.temperature,
        micro_batch_tokens=trainer.micro_batch_tokens,
        lora=under,
        head_chunk=trainer.head_chunk,
    )
    return partial(prepare, config=config.preprocess, score=reference.score)


def server_scorer(config: RunConfig) -> ServerScorer | None:
    """The teacher, if it is a server. Raises UserError if its key is not set."""
    if config.trainer.teacher is None or not config.trainer.teacher_is_server:
        return None
    from pipelinerl.serving.client.scoring import ServerScorer  # noqa: PLC0415 - an extra

    named = config.trainer.teacher_key_env
    if named and not os.environ.get(named):
        raise UserError(f"trainer.teacher_key_env: the environment variable {named} is not set")
    return ServerScorer(config.trainer.teacher, os.environ[named] if named else None)
