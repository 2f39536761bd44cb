"""Repeats recorded completions: the log-probs of the recorded tokens, with the weights that sampled each of them.

The run's random numbers also draw each token again. If an engine of this package sampled the completion, it is the recorded
one, except where rounding moves a boundary of the distribution across the random number.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from pipelinerl.actor.client import derive_seed
from pipelinerl.config.schema import RunConfig
from pipelinerl.engine.sampler import request_key, sample, uniforms
from pipelinerl.errors import RunInterruptedError, UserError
from pipelinerl.experiments.recompute import KV, Feed, Recompute, Sampled, SavedWeights, feeds_of, values_of
from pipelinerl.types import Group

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.3}
"""Largest difference of log-probs by `model.dtype`: the run's engine had other sequences in its batches, so it rounded
otherwise.
"""


class Origin(NamedTuple):
    """Where a completion is recorded: turn number `turn` of attempt number `attempt` of group `group`."""

    group: int
    rollout: str
    attempt: int
    turn: int


def recorded_completions(group: Group) -> list[Sampled]:
    """The completions of a group that have tokens, each of its `Origin`."""
    return [
        Sampled(turn.prompt_ids, turn.completion, Origin(group.index, rollout.id, rollout.attempt, number))
        for rollout in group.rollouts
        for number, turn in enumerate(rollout.turns)
        if turn.completion.token_ids
    ]


def versions_of(group: Group, kv: KV) -> set[int]:
    """The versions of weights that are needed to repeat the group."""
    return {version for sampled in recorded_completions(group) for version in feeds_of(sampled, kv)}


class GenerationResult(msgspec.Struct, frozen=True, kw_only=True):
    """`switches`: weight updates within completions. `drawn`: tokens that the run's random numbers draw again; None for
    another package's engine. `gaps`: of each completion, largest first, the largest difference of a log-prob, and where.
    """

    groups: int
    completions: int
    tokens: int
    switches: int
    drawn: int | None
    gaps: tuple[tuple[float, str], ...]


def repeat_groups(
    groups: Sequence[Group], config: RunConfig, weights: SavedWeights, *, stop: Callable[[], bool] = lambda: False
) -> GenerationResult:
    """Repeat the completions of these groups. Raises UserError if there are none, RunInterruptedError."""
    sequences = [one for group in groups for one in recorded_completions(group)]
    if not sequences:
        raise UserError("the chosen groups have no completion to repeat")
    longest = max(len(one.prompt_ids) + len(one.completion.token_ids) for one in sequences)
    model, slots = weights.new_model(0, config.engine.device), min(config.engine.slots, len(sequences))
    recompute = Recompute(model, slots=slots, max_length=longest, temperature=config.actor.temperature)
    found: dict[Origin, list[float]] = defaultdict(list)
    drawn = 0
    for _, feeds, logprobs_NV in recompute.run(sequences, weights, config.engine.kv_on_update):
        if stop():
            raise RunInterruptedError("the replay was stopped while it repeated generation")
        ids, _ = values_of(feeds)
        drawn += _drawn_again(feeds, ids, logprobs_NV, config.seed)
        logprobs = iter(logprobs_NV.gather(1, torch.tensor(ids, device=logprobs_NV.device)[:, None])[:, 0].tolist())
        for feed in feeds:
            found[feed.sequence.of] += islice(logprobs, feed.predicted)
    gaps = [_gap(one, found[one.of]) for one in sequences]
    return GenerationResult(
        groups=len(groups),
        completions=len(sequences),
        tokens=sum(len(one.completion.token_ids) for one in sequences),
        switches=sum(len(one.completion.weight_versions) - 1 for one in sequences),
        drawn=None if config.engine.kind == "vllm" else drawn,
        gaps=tuple(sorted(gaps, reverse=True)),
    )


def _drawn_again(feeds: Sequence[Feed], ids: Sequence[int], logprobs_NV: Tensor, seed: int) -> int:
    """How many of the tokens `ids` the run's random numbers draw again. `seed`: the run's."""
    keys: list[int] = []
    tokens: list[int] = []
    for feed in feeds:
        one: Origin = feed.sequence.of
        of_request = derive_seed(derive_seed(seed, one.group, one.attempt), one.turn)
        keys += [request_key("", of_request)] * feed.predicted
        tokens += range(feed.token, feed.token + feed.predicted)
    drawn_N = uniforms(np.array(keys, dtype=np.int64), np.array(tokens, dtype=np.int64))
    again_N, _ = sample(logprobs_NV, None, drawn_N.to(logprobs_NV.device))
    return sum(one == other for one, other in zip(again_N.tolist(), ids, strict=True))


def _gap(sampled: Sampled, again: Sequence[float]) -> tuple[float, str]:
    completion, (group, rollout, _, turn) = sampled.completion, sampled.of
    before = completion.logprobs
    differences = [abs(a - b) if math.isfinite(a - b) else math.inf for a, b in zip(before, again, strict=True)]
    token = max(range(len(differences)), key=differences.__getitem__)
    version = next(span.version for span in completion.weight_versions if span.start <= token < span.end)
    place = f"group {group}, rollout {rollout}" + (f", turn {turn}" if turn else "")
    return differences[token], (
        f"{place}, token {token} (version {version}): its log-prob is {before[token]:.6f} in the record and "
        f"{again[token]:.6f} in the replay"
    )
