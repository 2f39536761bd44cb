"""Repeats recorded completions: the log-probs of the recorded tokens, with the weights that sampled each of them.

The run's random numbers also draw each token again. If an engine of this package sampled the completion, it is the recorded
one, except where rounding moves a boundary of the distribution across the random number.
"""

from __future__ import annotations

import math
import random
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

    def seed(self, run: int) -> int:
        """The seed of its request."""
        return derive_seed(derive_seed(run, self.group, self.attempt), self.turn)


def recorded_completions(group: Group) -> Iterator[Recorded]:
    """The completions of a group that have tokens."""
    for rollout in group.rollouts:
        for number, turn in enumerate(rollout.turns):
            if turn.completion.token_ids:
                yield Recorded(group.index, rollout.id, rollout.attempt, number, Sampled(turn.prompt_ids, turn.completion))


def versions_of(group: Group, kv: KV) -> set[int]:
    """The versions of weights that are needed to repeat the group."""
    return {piece.version for recorded in recorded_completions(group) for piece in pieces_of(recorded.sampled, kv)}


def choose_groups(indices: Sequence[int], count: int, seed: int) -> list[int]:
    """`count` of the indices, or all if there are fewer; ascending."""
    return sorted(random.Random(seed).sample(indices, min(count, len(indices))))


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
    repeater = _Repeater(config, weights, completions)
    gaps = []
    for begin in range(0, len(completions), repeater.slots):
        if stop():
            raise RunInterruptedError("the replay was stopped while it repeated generation")
        gaps += repeater.repeat(completions[begin : begin + repeater.slots])
    return GenerationResult(
        groups=len(groups),
        completions=len(completions),
        tokens=sum(len(one.sampled.completion.token_ids) for one in completions),
        switches=sum(len(one.sampled.completion.weight_versions) - 1 for one in completions),
        drawn=None if config.engine.kind == "vllm" else repeater.drawn,
        gaps=tuple(sorted(gaps, reverse=True)),
    )


class _Repeater:
    """Computes log-probs of recorded tokens again. `drawn` counts the tokens that the run's random numbers draw again."""

    def __init__(self, config: RunConfig, weights: SavedWeights, completions: Sequence[Recorded]) -> None:
        self.slots = min(config.engine.slots, len(completions))
        self.drawn = 0
        self._weights = weights
        self._seed, self._kv = config.seed, config.engine.kv_on_update
        self._recompute = Recompute(
            weights.new_model(0, config.engine.device),
            slots=self.slots,
            max_length=max(len(one.sampled.prompt_ids) + len(one.sampled.completion.token_ids) for one in completions),
            temperature=config.actor.temperature,
        )

    def repeat(self, wave: Sequence[Recorded]) -> list[Gap]:
        sequences = [one.sampled for one in wave]
        found: list[list[float]] = [[] for _ in wave]
        for _, feeds, logprobs_NV in self._recompute.run(sequences, self._weights, self._kv):
            ids, _ = values_of(sequences, feeds)
            self.drawn += self._drawn_again(wave, feeds, ids, logprobs_NV)
            logprobs = iter(logprobs_NV.gather(1, torch.tensor(ids, device=logprobs_NV.device)[:, None])[:, 0].tolist())
            for feed in feeds:
                found[feed.row] += islice(logprobs, feed.kept)
        return [_gap(one, again) for one, again in zip(wave, found, strict=True)]

    def _drawn_again(self, wave: Sequence[Recorded], feeds: Sequence[Feed], ids: list[int], logprobs_NV: Tensor) -> int:
        keys = [request_key("", wave[feed.row].seed(self._seed)) for feed in feeds for _ in range(feed.kept)]
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
