"""Sampling from a mixed policy with the engine itself: weights change at exact tokens of sequences that start together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import msgspec
from torch import Tensor

from pipelinerl.engine import LocalEngine
from pipelinerl.experiments.study.prompts import Prompt
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.models.state import checksum
from pipelinerl.types import Completion, VersionSpan, versions_from_spans

# ------------------------------------------------------------------------------------------------------------------------
# Which weights sample which token of the stale-KV study. Pure arithmetic.
#
# A sequence of up to L tokens is sampled while g = g_max optimizer steps are taken, so an interval of L/g tokens is one step
# long. The first update arrives after two intervals, then there is one at the end of each:
#
#     token       0 ... 2L/g ... 3L/g ...      (g-1)L/g ... L
#     weights     |   C   |  C+1  |  C+2  ...      |  C+g-2 |      trained on by C+g: lags g, g-1, ..., 2
#
# so there are g - 2 switches, and no token is fresher than lag 2. Token t is by `C + max(0, floor(t g / L) - 1)`: where L/g
# is
# not a whole number, a switch takes place at the first token at or after its point.
#
# Source: PipelineRL, arXiv 2509.19128, section 5.1.


class Stretch(NamedTuple):
    """Tokens `start <= t < end` of every completion, sampled by one `version`."""

    start: int
    end: int
    version: int


def mixed_version(token: int, first: int, lag: int, length: int) -> int:
    """The weights that sample token number `token`, if `first` (C) samples the first and the trainer is at C + `lag`."""
    return first + max(0, token * lag // length - 1)


def mixed_policy(first: int, lag: int, length: int) -> tuple[Stretch, ...]:
    """The stretches of a mixed policy over `length` (L) tokens. Raises ValueError unless 1 <= lag <= length."""
    if not 1 <= lag <= length:
        raise ValueError(f"a lag of {lag} steps over {length} tokens: each step needs a token at least")
    edges = interval_edges(lag, length)
    starts = [0, *edges[2:-1]]
    return tuple(
        Stretch(start, end, mixed_version(start, first, lag, length)) for start, end in pairwise([*starts, edges[-1]])
    )


def lagged_policy(version: int, length: int) -> tuple[Stretch, ...]:
    """Conventional RL: one version samples all tokens."""
    return (Stretch(0, length, version),)


def interval_edges(lag: int, length: int) -> tuple[int, ...]:
    """0 = first edge < ... < last edge = length: the `lag` intervals, each between neighbours, that optimizer steps take.

    Edge i is ceil(i L / g), the first token t with floor(t g / L) = i.
    """
    return tuple(-(-i * length // lag) for i in range(lag + 1))


KV = Literal["keep", "recompute"]
Tensors = Callable[[int], Mapping[str, Tensor]]
"""The weights of a version, by name."""


class Sampled(NamedTuple):
    """A completion, and what it answers."""

    prompt: Prompt
    completion: Completion


class MixedSampler:
    """An engine that samples one policy after another.

    An engine's version never goes back, but the study's do. So the engine is told a number that grows with every update,
    and completions are given the versions that these numbers stand for.
    """

    def __init__(self, model: Any, tensors: Tensors, *, slots: int, prompt_tokens: int, max_tokens: int, kv: KV) -> None:
        """The model is the engine's own from here on. `prompt_tokens` and `max_tokens`: the longest that will come."""
        self._tensors = tensors
        self._slots = slots
        self._versions = [-1]  # of each number; 0 is for what the model came with, which samples nothing
        self._engine = LocalEngine(
            model,
            slots=slots,
            max_length=prompt_tokens + max_tokens,
            # All prompts are processed in the first step: every sequence then samples token s in step s.
            prefill_tokens=slots * prompt_tokens,
            kv_on_update=kv,
        )

    def sample(self, prompts: Sequence[Prompt], stretches: Sequence[Stretch]) -> list[Sampled]:
        """Complete `prompts`, token t by the weights of the stretch that holds t; sequences end at their stop tokens.

        Raises RuntimeError if a token is by other weights than it should be.
        """
        found = []
        for begin in range(0, len(prompts), self._slots):
            found += self._sample_together(prompts[begin : begin + self._slots], stretches)
        return found

    def _sample_together(self, prompts: Sequence[Prompt], stretches: Sequence[Stretch]) -> list[Sampled]:
        for prompt in prompts:
            self._engine.submit(prompt.request)
        switches = {stretch.start: stretch.version for stretch in stretches}
        done: dict[str, Completion] = {}
        token = 0
        while len(done) < len(prompts):
            if token in switches:
                self._update(switches[token])
            done |= {completion.request_id: self._named(completion) for completion in self._engine.step().finished}
            token += 1
        expected = [stretch.version for stretch in stretches for _ in range(stretch.start, stretch.end)]
        for completion in done.values():
            count = len(completion.token_ids)
            if versions_from_spans(completion.weight_versions, count) != expected[:count]:
                raise RuntimeError(
                    f"{completion.request_id} was sampled by {completion.weight_versions}, not by {stretches}"
                )
        return [Sampled(prompt, done[prompt.request.id]) for prompt in prompts]

    def _update(self, version: int) -> None:
        weights = self._tensors(version)
        self._engine.update_weights(WeightUpdate(len(self._versions), checksum(weights), weights))
        self._versions.append(version)

    def _named(self, completion: Completion) -> Completion:
        """With the versions that the engine's numbers stand for."""

        def named(spans: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
            return tuple(VersionSpan(self._versions[span.version], span.start, span.end) for span in spans)

        return msgspec.structs.replace(
            completion,
            weight_versions=named(completion.weight_versions),
            prompt_versions=named(completion.prompt_versions),
        )
