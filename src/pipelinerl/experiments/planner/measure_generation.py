"""Measures generation: an actor at full load as in a run, and an engine's decode steps and weight updates.

    python -m pipelinerl.experiments.planner.measure_generation CONFIG.yaml FOLDER MESSAGES

As a command it only computes, beside the process that measures, as the other generation processes of a run do. It says
`ready` in the file MESSAGES and generates until it is stopped.

Decode steps are timed with the KV cache as full as in a batch that is kept full. The sequences are random tokens, with the
distribution of ages at a random moment.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from pipelinerl.actor.actor import Actor
from pipelinerl.actor.client import EngineClient
from pipelinerl.actor.evaluation import Evaluations
from pipelinerl.actor.groups import GroupRunner
from pipelinerl.actor.rollouts import RolloutContext
from pipelinerl.config.load import config_from_yaml
from pipelinerl.config.schema import EvaluationConfig, RunConfig
from pipelinerl.engine import LocalEngine
from pipelinerl.environments.registry import make_environment
from pipelinerl.errors import PipelineRLError, UserError
from pipelinerl.experiments.planner.calibration import READY, DecodeCost, LengthDistribution
from pipelinerl.experiments.statistics import powers_of_two
from pipelinerl.hub.admission import AdmissionState
from pipelinerl.hub.hub import CountedStream, Direct, Hub
from pipelinerl.interfaces import Environment, Tokenizer, WeightUpdate
from pipelinerl.launch.stages.engines import load_local_engine
from pipelinerl.models.loading import load_tokenizer, stop_token_ids
from pipelinerl.models.state import checksum, named_weights
from pipelinerl.resources.hardware import clock_of
from pipelinerl.schedule import PipelineSchedule
from pipelinerl.status.board import MemoryBoard
from pipelinerl.stream.files import FileStream
from pipelinerl.types import GenerationRequest, Group, SamplingParams
from pipelinerl.weights.memory import MemoryWeightSender
from pipelinerl.weights.sending import source_checksum


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
    """What an actor produced in `busy_s` (see `clock_of`), with all slots in use.

    `groups` are all groups it finished. `first` are those started before any unfinished group, so that they are not biased
    to short completions. `active` is the number of sequences in progress at each engine step.
    """

    groups: list[Group]
    first: list[Group]
    busy_s: float
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
            while records.rollouts < generator.config.engine.slots:
                await actor.iterate()
            clock = clock_of(generator.config.engine.device)
            start_s, begin_s = time.perf_counter(), clock()
            tokens, before = generator.engine.progress().tokens_generated, records.rollouts
            active = [generator.engine.in_progress]

            def unfinished() -> bool:
                short = time.perf_counter() - start_s < seconds or records.rollouts == before
                return short or records.first_rollouts < rollouts

            while unfinished() or keep_going():
                await actor.iterate()
                active.append(generator.engine.in_progress)
            return Production(
                groups=records.groups,
                first=records.first,
                busy_s=clock() - begin_s,
                tokens=generator.engine.progress().tokens_generated - tokens,
                rollouts=records.rollouts - before,
                active=active,
            )
        finally:
            await actor.stop()


class _Records(Direct):
    """Writes groups to disk as a run does, and keeps them in memory.

    `first` are the groups before the first one that is unfinished, in order of their start.
    """

    def __init__(self, hub: Hub) -> None:
        super().__init__(hub)
        self.groups: list[Group] = []
        self.first: list[Group] = []
        self.rollouts = 0
        self.first_rollouts = 0
        self._later: dict[int, Group] = {}

    def hand_over(self, group: Group) -> None:
        super().hand_over(group)
        self.groups.append(group)
        self.rollouts += len(group.rollouts)
        self._later[group.index] = group
        while following := self._later.pop(len(self.first), None):
            self.first.append(following)
            self.first_rollouts += len(following.rollouts)


@contextmanager
def _actor(generator: Generator, folder: Path) -> Iterator[tuple[Actor, _Records]]:
    config = generator.config
    (folder / "rollouts").mkdir(parents=True, exist_ok=True)
    admission = AdmissionState(PipelineSchedule(config.trainer.batch_size))
    stream = CountedStream(FileStream(folder / "stream"))
    with closing(Hub(admission, stream, folder, MemoryBoard())) as hub:
        records = _Records(hub)
        records.open()
        context = RolloutContext.of(
            config.actor,
            generator.environment,
            EngineClient(generator.engine),
            generator.tokenizer,
            seed=config.seed,
            slots=config.engine.slots,
            stop_token_ids=generator.stop_token_ids,
        )
        actor = Actor(
            groups=GroupRunner(context, config.actor),
            evaluations=Evaluations(context, EvaluationConfig()),
            board=hub,
            admission=records,
            receiver=MemoryWeightSender().receiver,
        )
        yield actor, records


# ---- the engine


STEPS = 16
"""Consecutive decode steps in a round: few, so that the fill of the cache hardly changes."""
MIN_ROUNDS = 2
UPDATES = 3


def decode_costs(generator: Generator, lengths: LengthDistribution, prompt_tokens: int, seconds: float) -> list[DecodeCost]:
    """Times of decode steps at 1, 2, 4, ... H sequences, about `seconds` at each size (at least MIN_ROUNDS rounds)."""
    rng = np.random.default_rng(generator.config.seed)
    costs = []
    for active in (*powers_of_two(generator.engine.slots - 1), generator.engine.slots):
        ages = rng.choice(lengths.longest, size=active, p=lengths.ages())
        times_s: list[float] = []
        begin_s, rounds = time.perf_counter(), 0
        while rounds < MIN_ROUNDS or time.perf_counter() - begin_s < seconds:
            times_s += _decode_round(generator, (prompt_tokens + ages - STEPS // 2).tolist(), rng)
            rounds += 1
        costs.append(DecodeCost(active=active, step_s=median(times_s)))
    return costs


def _decode_round(generator: Generator, contexts: Sequence[int], rng: np.random.Generator) -> list[float]:
    """Seconds of each of STEPS steps in which exactly the sequences with these context lengths decode."""
    engine = generator.engine
    # Prefill takes several steps. Sequences already in progress decode meanwhile, and must not reach their budget.
    budget = STEPS + 4 + sum(contexts) // generator.config.engine.prefill_tokens
    room = engine.max_length - budget
    if room < 1:
        raise UserError(
            f"engine.max_length {engine.max_length} leaves no room to measure decode steps; set it to {budget + 16} or more"
        )
    names = _submit(generator, [min(max(context, 1), room) for context in contexts], budget, rng)
    while _sampled_in_step(engine) < len(contexts):
        pass
    engine.step()  # one untimed step, which compacts the rows
    times_s = []
    clock = clock_of(generator.config.engine.device)
    for _ in range(STEPS):
        begin_s = clock()
        engine.step()
        times_s.append(clock() - begin_s)
    _clear(engine, names)
    return times_s


def update_pause_s(generator: Generator, lengths: LengthDistribution, prompt_tokens: int) -> float:
    """The engine's pause for an update with all slots in use, recomputation of the cache included (`kv_on_update`)."""
    engine, rng = generator.engine, np.random.default_rng(generator.config.seed)
    ages = rng.choice(lengths.longest, size=engine.slots, p=lengths.ages()).tolist()
    names = _submit(generator, [min(prompt_tokens + age, engine.max_length - 2) for age in ages], 2, rng)
    engine.step()
    weights = {name: value.clone() for name, value in named_weights(generator.model).items()}
    update = WeightUpdate(engine.version, checksum(weights), weights, source_checksum(weights))
    pauses_s = [engine.update_weights(update).pause_s for _ in range(UPDATES)]
    _clear(engine, names)
    return median(pauses_s)


def prompt_tokens_mean(groups: Sequence[Group]) -> float:
    """Mean tokens of a rollout's context that were not sampled: the last turn's prompt less all earlier completions."""
    return fmean(
        len(rollout.turns[-1].prompt_ids) - sum(len(turn.completion.token_ids) for turn in rollout.turns[:-1])
        for group in groups
        for rollout in group.rollouts
        if rollout.turns
    )


def _submit(generator: Generator, lengths: Sequence[int], max_tokens: int, rng: np.random.Generator) -> list[str]:
    """Submit random prompts of these lengths; returns the requests' names."""
    names = [f"measured-{i}" for i in range(len(lengths))]
    sampling = SamplingParams(max_tokens=max_tokens)
    for name, length in zip(names, lengths, strict=True):
        ids = tuple(rng.integers(generator.vocabulary, size=length).tolist())
        generator.engine.submit(GenerationRequest(id=name, prompt_ids=ids, sampling=sampling))
    return names


def _sampled_in_step(engine: LocalEngine) -> int:
    before = engine.progress().tokens_generated
    engine.step()
    return engine.progress().tokens_generated - before


def _clear(engine: LocalEngine, names: Sequence[str]) -> None:
    for name in names:
        engine.cancel(name)
    engine.step()


def main(arguments: Sequence[str]) -> int:
    config_path, folder, messages = map(Path, arguments)
    try:
        generator = load_generator(config_from_yaml(config_path.read_text(encoding="utf-8")))
        messages.write_text(f"{READY}\n", encoding="utf-8")
        asyncio.run(produce(generator, folder, seconds=0, rollouts=0, keep_going=lambda: True))
    except PipelineRLError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
