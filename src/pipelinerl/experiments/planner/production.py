"""Runs a generation process as in a run (environment, actor and engine), without a trainer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelinerl.actor.actor import Actor
from pipelinerl.actor.admission import Admission
from pipelinerl.actor.evaluation import Evaluations
from pipelinerl.actor.groups import GroupRunner
from pipelinerl.actor.probe import WeightProbe
from pipelinerl.actor.rollouts import RolloutContext
from pipelinerl.actor.status import GenerationStatus
from pipelinerl.config.schema import EvaluationConfig, RunConfig
from pipelinerl.engine import LocalEngine
from pipelinerl.environments.registry import make_environment
from pipelinerl.interfaces import Environment, StreamWriter, Tokenizer
from pipelinerl.launch.stages.engines import load_local_engine
from pipelinerl.launch.stages.generation import RolloutWriter
from pipelinerl.models.loading import load_tokenizer, stop_token_ids
from pipelinerl.schedule import PipelineSchedule
from pipelinerl.status.board import MemoryBoard
from pipelinerl.stream import FileStreamWriter
from pipelinerl.types import ENGINE, Group
from pipelinerl.weights.memory import MemoryChannel


@dataclass(frozen=True, kw_only=True)
class Generator:
    """The parts of a generation process. Created by `load_generator`."""

    config: RunConfig
    environment: Environment
    tokenizer: Tokenizer
    model: Any
    engine: LocalEngine
    vocabulary: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Production:
    """What an actor produced in `wall_s`, with all slots in use.

    `groups` are all groups it finished. `first` are those started before any unfinished group, so that they are not biased
    to short completions. `active` is the number of sequences in progress at each engine step.
    """

    groups: list[Group]
    first: list[Group]
    wall_s: float
    tokens: int
    rollouts: int
    active: list[int]


def load_generator(config: RunConfig) -> Generator:
    """Load the environment, model and engine of a run file. Raises UserError if one can't be loaded."""
    tokenizer = load_tokenizer(config.model)
    environment = make_environment(config.environment.kind, config.environment.args, tokenizer, config.seed)
    model, engine = load_local_engine(config)
    return Generator(
        config=config,
        environment=environment,
        tokenizer=tokenizer,
        model=model,
        engine=engine,
        vocabulary=model.get_input_embeddings().weight.shape[0],
        stop_token_ids=stop_token_ids(model, tokenizer),
    )


async def produce(
    generator: Generator, folder: Path, *, seconds: float, rollouts: int, keep_going: Callable[[], bool] = lambda: False
) -> Production:
    """Run an actor that writes its groups and records to `folder`, as to a run directory.

    The actor warms up until as many rollouts as there are slots have ended. The measurement then runs for at least
    `seconds` and one rollout, until the first `rollouts` rollouts in order of start have ended, and while `keep_going()`.
    """
    with _actor(generator, folder) as (actor, records):
        try:
            await _until(actor, lambda: records.rollouts >= generator.config.engine.slots)
            begin_s, tokens, before = time.perf_counter(), generator.engine.progress().tokens_generated, records.rollouts
            active: list[int] = []

            def done() -> bool:
                active.append(generator.engine.in_progress)
                long = time.perf_counter() - begin_s >= seconds and records.rollouts > before
                return long and records.first_rollouts >= rollouts and not keep_going()

            await _until(actor, done)
            wall_s = time.perf_counter() - begin_s
            return Production(
                groups=records.groups,
                first=records.first,
                wall_s=wall_s,
                tokens=generator.engine.progress().tokens_generated - tokens,
                rollouts=records.rollouts - before,
                active=active,
            )
        finally:
            await actor.stop()


class _Records(RolloutWriter):
    """Writes groups to disk as a run does, and keeps them in memory."""

    def __init__(self, stream: StreamWriter[Group], rollouts: Path) -> None:
        super().__init__(stream, rollouts)
        self.groups: list[Group] = []
        self.rollouts = 0
        self.first_rollouts = 0
        self._by_index: dict[int, Group] = {}
        self._complete = 0

    def write(self, record: Group) -> None:
        super().write(record)
        self.groups.append(record)
        self.rollouts += len(record.rollouts)
        self._by_index[record.index] = record
        while self._complete in self._by_index:
            self.first_rollouts += len(self._by_index[self._complete].rollouts)
            self._complete += 1

    @property
    def first(self) -> list[Group]:
        return [self._by_index[index] for index in range(self._complete)]


@contextmanager
def _actor(generator: Generator, folder: Path) -> Iterator[tuple[Actor, _Records]]:
    config = generator.config
    folder.mkdir(parents=True, exist_ok=True)
    board, schedule = MemoryBoard(), PipelineSchedule(config.trainer.batch_size)
    with (
        closing(FileStreamWriter(folder / "stream", Group, capacity=1 << 20)) as stream,
        closing(Admission.alone(folder / "admission", schedule, board)) as admission,
        closing(_Records(stream, folder / "rollouts.jsonl")) as records,
    ):
        context = RolloutContext.of(
            config.actor,
            generator.environment,
            generator.engine,
            generator.tokenizer,
            seed=config.seed,
            slots=config.engine.slots,
            stop_token_ids=generator.stop_token_ids,
        )
        groups, evaluations = GroupRunner(context, config.actor), Evaluations(context, EvaluationConfig())
        probe = WeightProbe(context.client, board, ENGINE)
        actor = Actor(
            groups=groups,
            admission=admission,
            writer=records,
            receiver=MemoryChannel().receiver,
            probe=probe,
            evaluations=evaluations,
            status=GenerationStatus(board, groups, evaluations, probe),
        )
        yield actor, records


async def _until(actor: Actor, done: Callable[[], bool]) -> None:
    while not done():
        await actor.iterate()
