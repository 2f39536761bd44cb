"""Measures the costs of an engine: decode steps by batch size, prefill, weight updates.

Decode steps are timed with the KV cache as full as in a batch that is kept full. The sequences are random tokens, with the
distribution of ages at a random moment.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import fmean, median

import numpy as np

from pipelinerl.engine import LocalEngine
from pipelinerl.errors import UserError
from pipelinerl.experiments.planner.calibration import DecodeCost
from pipelinerl.experiments.planner.lengths import LengthDistribution
from pipelinerl.experiments.planner.production import Generator
from pipelinerl.experiments.planner.utilisation import powers_of_two
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.models.state import checksum, named_weights
from pipelinerl.types import GenerationRequest, Group, SamplingParams

STEPS = 16
"""Consecutive decode steps in a round: few, so that the fill of the cache hardly changes."""
MIN_ROUNDS = 2
UPDATES = 3
PREFILL_REPETITIONS = 7


def decode_costs(generator: Generator, lengths: LengthDistribution, prompt_tokens: int, seconds: float) -> list[DecodeCost]:
    """Times of decode steps at 1, 2, 4, ... H sequences, about `seconds` at each size (at least MIN_ROUNDS rounds)."""
    rng = np.random.default_rng(generator.config.seed)
    costs = []
    for active in powers_of_two(generator.engine.slots):
        ages = rng.choice(lengths.longest, size=active, p=lengths.ages())
        times_s: list[float] = []
        begin_s, rounds = time.perf_counter(), 0
        while rounds < MIN_ROUNDS or time.perf_counter() - begin_s < seconds:
            times_s += _decode_round(generator, (prompt_tokens + ages - STEPS // 2).tolist(), rng)
            rounds += 1
        quartiles = np.quantile(times_s, (0.25, 0.5, 0.75))
        costs.append(
            DecodeCost(
                active=active,
                step_s=float(quartiles[1]),
                step_s_p25=float(quartiles[0]),
                step_s_p75=float(quartiles[2]),
                steps=len(times_s),
            )
        )
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
    names = []
    for i, context in enumerate(contexts):
        names.append(f"decode-{i}")
        _submit(generator, names[-1], min(max(context, 1), room), budget, rng)
    while _sampled_in_step(engine) < len(contexts):
        pass
    engine.step()  # one untimed step, which compacts the rows
    times_s = []
    for _ in range(STEPS):
        begin_s = time.perf_counter()
        engine.step()
        times_s.append(time.perf_counter() - begin_s)
    _clear(engine, names)
    return times_s


def prefill_costs(generator: Generator, prompt_tokens: int) -> tuple[float, float]:
    """(fixed seconds of a step with prefill, seconds per prompt token), measured with one prompt and with many."""
    rng = np.random.default_rng(generator.config.seed)
    many = max(1, min(generator.engine.slots, generator.config.engine.prefill_tokens // prompt_tokens))
    one_s, many_s = (
        median(_prefill_s(generator, count, prompt_tokens, rng) for _ in range(PREFILL_REPETITIONS)) for count in (1, many)
    )
    if many == 1 or many_s <= one_s:
        return 0.0, many_s / (many * prompt_tokens)
    token_s = (many_s - one_s) / ((many - 1) * prompt_tokens)
    return max(0.0, one_s - token_s * prompt_tokens), token_s


def _prefill_s(generator: Generator, count: int, prompt_tokens: int, rng: np.random.Generator) -> float:
    for i in range(count):
        _submit(generator, f"prefill-{i}", prompt_tokens, 1, rng)
    begin_s = time.perf_counter()
    while generator.engine.in_progress or generator.engine.queued:
        generator.engine.step()
    return time.perf_counter() - begin_s


def update_pause_s(generator: Generator, lengths: LengthDistribution, prompt_tokens: int) -> float:
    """The engine's pause for an update with all slots in use, recomputation of the cache included (`kv_on_update`)."""
    engine, rng = generator.engine, np.random.default_rng(generator.config.seed)
    names = []
    for i, age in enumerate(rng.choice(lengths.longest, size=engine.slots, p=lengths.ages()).tolist()):
        names.append(f"update-{i}")
        _submit(generator, names[-1], min(prompt_tokens + age, engine.max_length - 2), 2, rng)
    engine.step()
    weights = {name: value.clone() for name, value in named_weights(generator.model).items()}
    held = checksum(weights)
    pauses_s = [engine.update_weights(WeightUpdate(engine.version, held, weights)).pause_s for _ in range(UPDATES)]
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


def _submit(generator: Generator, name: str, prompt_tokens: int, max_tokens: int, rng: np.random.Generator) -> None:
    ids = tuple(rng.integers(generator.vocabulary, size=prompt_tokens).tolist())
    generator.engine.submit(GenerationRequest(id=name, prompt_ids=ids, sampling=SamplingParams(max_tokens=max_tokens)))


def _sampled_in_step(engine: LocalEngine) -> int:
    before = engine.progress().tokens_generated
    engine.step()
    return engine.progress().tokens_generated - before


def _clear(engine: LocalEngine, names: Sequence[str]) -> None:
    for name in names:
        engine.cancel(name)
    engine.step()
