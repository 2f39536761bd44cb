"""Repeats recorded completions: the log-probs of the recorded tokens, with the weights that sampled each of them.

The run's random numbers also draw each token again. If an engine of this package sampled the completion, it is the recorded
one, except where rounding moves a boundary of the distribution across the random number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
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
from pipelinerl.experiments.recompute import KV, Feed, Recompute, Sampled, SavedWeights, pieces_of, values_of
from pipelinerl.types import Group

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.3}
"""Largest difference of log-probs by `model.dtype`: the run's engine had other sequences in its batches, so it rounded
otherwise.
"""


class Recorded(NamedTuple):
    """One recorded completion: turn number `turn` of attempt number `attempt` of group `group`."""

    group: int
    rollout: str
    attempt: int
    turn: int
    sampled: Sampled


def recorded_completions(group: Group) -> Iterator[Recorded]:
    """The completions of a group that have tokens."""
    for rollout in group.rollouts:
        for number, turn in enumerate(rollout.turns):
            if turn.completion.token_ids:
                yield Recorded(group.index, rollout.id, rollout.attempt, number, Sampled(turn.prompt_ids, turn.completion))


def versions_of(group: Group, kv: KV) -> set[int]:
    """The versions of weights that are needed to repeat the group."""
    return {piece.version for recorded in recorded_completions(group) for piece in pieces_of(recorded.sampled, kv)}


class Gap(NamedTuple):
    """The token of a completion whose log-prob differs most. `logprob` is the replay's."""

    difference: float
    group: int
    rollout: str
    turn: int
    token: int
    version: int
    recorded: float
    logprob: float

    def __str__(self) -> str:
        turn = f", turn {self.turn}" if self.turn else ""
        return (
            f"group {self.group}, rollout {self.rollout}{turn}, token {self.token} (version {self.version}): its log-prob "
            f"is {self.recorded:.6f} in the record and {self.logprob:.6f} in the replay"
        )


class GenerationResult(msgspec.Struct, frozen=True, kw_only=True):
    """`switches`: weight updates within completions. `drawn`: tokens that the run's random numbers draw again; None for
    another package's engine. `gaps`: one per completion, largest first.
    """

    groups: int
    completions: int
    tokens: int
    switches: int
    drawn: int | None
    gaps: tuple[Gap, ...]


def repeat_groups(
    groups: Sequence[Group], config: RunConfig, weights: SavedWeights, *, stop: Callable[[], bool] = lambda: False
) -> GenerationResult:
    """Repeat the completions of these groups. Raises UserError if there are none, RunInterruptedError."""
    completions = [one for group in groups for one in recorded_completions(group)]
    if not completions:
        raise UserError("the chosen groups have no completion to repeat")
    completions.sort(key=lambda one: len(one.sampled.prompt_ids))  # equal lengths share one attention call
    slots, kv = min(config.engine.slots, len(completions)), config.engine.kv_on_update
    longest = max(len(one.sampled.prompt_ids) + len(one.sampled.completion.token_ids) for one in completions)
    model = weights.new_model(0, config.engine.device)
    recompute = Recompute(model, slots=slots, max_length=longest, temperature=config.actor.temperature)
    gaps, drawn = [], 0
    for begin in range(0, len(completions), slots):
        if stop():
            raise RunInterruptedError("the replay was stopped while it repeated generation")
        wave = completions[begin : begin + slots]
        sequences = [one.sampled for one in wave]
        found: list[list[float]] = [[] for _ in wave]
        for _, feeds, logprobs_NV in recompute.run(sequences, weights, kv):
            ids, _ = values_of(sequences, feeds)
            drawn += _drawn_again(wave, feeds, ids, logprobs_NV, config.seed)
            logprobs = iter(logprobs_NV.gather(1, torch.tensor(ids, device=logprobs_NV.device)[:, None])[:, 0].tolist())
            for feed in feeds:
                found[feed.row] += islice(logprobs, feed.kept)
        gaps += [_gap(one, again) for one, again in zip(wave, found, strict=True)]
    return GenerationResult(
        groups=len(groups),
        completions=len(completions),
        tokens=sum(len(one.sampled.completion.token_ids) for one in completions),
        switches=sum(len(one.sampled.completion.weight_versions) - 1 for one in completions),
        drawn=None if config.engine.kind == "vllm" else drawn,
        gaps=tuple(sorted(gaps, reverse=True)),
    )


def _drawn_again(wave: Sequence[Recorded], feeds: Sequence[Feed], ids: Sequence[int], logprobs_NV: Tensor, seed: int) -> int:
    """How many of the tokens `ids` the run's random numbers draw again. `seed`: the run's."""
    keys = []
    for feed in feeds:
        one = wave[feed.row]
        of_request = derive_seed(derive_seed(seed, one.group, one.attempt), one.turn)
        keys += [request_key("", of_request)] * feed.kept
    tokens = [token for feed in feeds for token in range(feed.token, feed.token + feed.kept)]
    drawn_N = torch.from_numpy(uniforms(np.array(keys, dtype=np.uint64), np.array(tokens, dtype=np.int64)))
    again_N, _ = sample(logprobs_NV, None, drawn_N.to(logprobs_NV.device))
    return sum(one == other for one, other in zip(again_N.tolist(), ids, strict=True))


def _gap(recorded: Recorded, again: Sequence[float]) -> Gap:
    completion = recorded.sampled.completion
    before = completion.logprobs
    differences = [abs(a - b) if math.isfinite(a - b) else math.inf for a, b in zip(before, again, strict=True)]
    token = max(range(len(differences)), key=differences.__getitem__)
    version = next(span.version for span in completion.weight_versions if span.start <= token < span.end)
    return Gap(
        differences[token], recorded.group, recorded.rollout, recorded.turn, token, version, before[token], again[token]
    )
