"""Sampling from a mixed policy with the engine itself: weights change at exact tokens of sequences that start together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from torch import Tensor

from pipelinerl.engine import LocalEngine
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.models.state import checksum
from pipelinerl.study.prompts import Prompt
from pipelinerl.study.switching import Stretch
from pipelinerl.types import Completion, VersionSpan, versions_from_spans

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
