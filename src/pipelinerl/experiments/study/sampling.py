"""Sampling from a mixed policy with the engine: weights change at exact tokens of sequences that start together."""

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

# ---- which weights sample which token


class Stretch(NamedTuple):
    """Tokens `start <= t < end` of every completion, sampled by one `version`."""

    start: int
    end: int
    version: int


def mixed_version(token: int, first: int, lag: int, length: int) -> int:
    """The version that samples token t = `token` of a mixed policy: C + max(0, floor(t g / L) - 1) (see `mixed_policy`)."""
    return first + max(0, token * lag // length - 1)


def mixed_policy(first: int, lag: int, length: int) -> tuple[Stretch, ...]:
    """The stretches of a mixed policy. Raises ValueError unless 1 <= lag <= length.

    A sequence of up to L = `length` tokens is sampled while the trainer takes g = `lag` optimizer steps, from C = `first`
    to C+g. One step takes as long as an interval of L/g tokens. The first weight update arrives after two intervals, and
    one more at the end of each further interval:

        token       0 ... 2L/g ... 3L/g ...      (g-1)L/g ... L
        weights     |   C   |  C+1  |  C+2  ...      |  C+g-2 |      trained on by C+g: lags g, g-1, ..., 2

    So there are g - 2 switches, and the lowest lag is 2. If L/g is not an integer, a switch takes place at the first token
    at or after its point. Source: PipelineRL, arXiv 2509.19128, section 5.1.
    """
    if not 1 <= lag <= length:
        raise ValueError(f"a lag of {lag} steps over {length} tokens: each step needs at least one token")
    edges = interval_edges(lag, length)
    starts = [0, *edges[2:-1]]
    return tuple(
        Stretch(start, end, mixed_version(start, first, lag, length)) for start, end in pairwise([*starts, edges[-1]])
    )


def lagged_policy(version: int, length: int) -> tuple[Stretch, ...]:
    """Conventional RL: one version samples all tokens."""
    return (Stretch(0, length, version),)


def interval_edges(lag: int, length: int) -> tuple[int, ...]:
    """The `lag` + 1 edges, from 0 to `length`, of the intervals that correspond to one optimizer step each.

    Edge i is ceil(i L / g), the first token t with floor(t g / L) = i.
    """
    return tuple(-(-i * length // lag) for i in range(lag + 1))


KV = Literal["keep", "recompute"]
Tensors = Callable[[int], Mapping[str, Tensor]]
"""Function from a version to its weights by name."""


class Sampled(NamedTuple):
    """A prompt and its completion."""

    prompt: Prompt
    completion: Completion


class MixedSampler:
    """Samples from one policy after another with one engine.

    An engine's version can't decrease, but the study's versions do. So the engine gets an update number that increases
    with every update, and the numbers in its completions are replaced by the versions they stand for.
    """

    def __init__(self, model: Any, tensors: Tensors, *, slots: int, prompt_tokens: int, max_tokens: int, kv: KV) -> None:
        """Takes ownership of the model. `prompt_tokens` and `max_tokens` are the longest prompt and completion to expect."""
        self._tensors = tensors
        self._slots = slots
        self._versions = [-1]  # by update number; 0: the initial weights, never used
        self._engine = LocalEngine(
            model,
            slots=slots,
            max_length=prompt_tokens + max_tokens,
            # All prompts are processed in the first step: every sequence then samples token s in step s.
            prefill_tokens=slots * prompt_tokens,
            kv_on_update=kv,
        )

    def sample(self, prompts: Sequence[Prompt], stretches: Sequence[Stretch]) -> list[Sampled]:
        """Complete `prompts`; token t is sampled by the version of the stretch that contains t. Stop tokens end a sequence.

        Raises RuntimeError if a token was sampled by another version.
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
            done |= {completion.request_id: self._with_versions(completion) for completion in self._engine.step().finished}
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

    def _with_versions(self, completion: Completion) -> Completion:
        """Replace the engine's update numbers by versions."""

        def replaced(spans: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
            return tuple(VersionSpan(self._versions[span.version], span.start, span.end) for span in spans)

        return msgspec.structs.replace(
            completion,
            weight_versions=replaced(completion.weight_versions),
            prompt_versions=replaced(completion.prompt_versions),
        )
