"""Log-probabilities under the initial model, for the KL penalty: a frozen copy of it, or what lies under the adapters."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from pipelinerl.models.lora import LoraModel
from pipelinerl.models.packed import sampled_logits, use_packed_attention
from pipelinerl.models.packed_row import PackedRow
from pipelinerl.trainer.logprobs import token_logprobs
from pipelinerl.trainer.micro_batch import Packer
from pipelinerl.types import Segment


class FrozenModelScorer:
    """Scores sampled tokens under `model`, which it freezes: nobody else may train that copy.

    With `lora` it is the model being trained, which scores without its adapters: no copy is needed. `temperature` is that of
    training rollouts, and segments go through the model in packed rows of at most `micro_batch_tokens`. Raises
    UnsupportedModelError like `use_packed_attention`.
    """

    def __init__(
        self, model: Any, *, temperature: float, micro_batch_tokens: int, pack: Packer, lora: LoraModel | None = None
    ) -> None:
        use_packed_attention(model)
        self._model = model.eval() if lora else model.eval().requires_grad_(False)
        self._initial = lora.without_adapters if lora else nullcontext
        self._device: torch.device = next(model.parameters()).device
        self._temperature = temperature
        self._budget = micro_batch_tokens
        self._pack = pack

    @torch.no_grad()
    def score(self, segments: Sequence[Segment]) -> list[list[float]]:
        """For each segment, the log-probability of each of its sampled tokens, in order of position."""
        scores: list[list[float]] = [[] for _ in segments]
        for indices in self._pack([len(segment.token_ids) for segment in segments], self._budget):
            row = PackedRow.of([segments[i] for i in indices], self._device)
            with self._initial():
                logits_PV = sampled_logits(self._model, row)
            logprobs_P, _ = token_logprobs(logits_PV, row.sampled_ids_P, self._temperature)
            remaining = iter(logprobs_P.tolist())
            for i in indices:
                scores[i] = [next(remaining) for _ in segments[i].sampled_positions]
        return scores
