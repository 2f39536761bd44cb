"""Log-probabilities of given tokens, and entropies, with a single copy of the logits in memory, or with a part of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipelinerl.models.packed import MAX_PADDING_WASTE, PackedRow, TrainingForward, training_forward
from pipelinerl.trainer.micro_batch import pack_shared
from pipelinerl.types import Segment

if TYPE_CHECKING:
    from pipelinerl.models.head import ChunkedHead
    from pipelinerl.models.lora import LoraModel

CHUNK_ELEMENTS = 1 << 22
"""Rows are processed in chunks of about this many logits, which bounds temporary memory for any vocabulary size."""


def token_logprobs(logits_PV: Tensor, ids_P: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature) at `ids_P`, and the entropy in nats of each distribution; both (P,).

    In float32, or float64 for float64 logits. Gradients flow through the log-probabilities only.

    The backward pass overwrites `logits_PV` with its gradient, so the logits must have no other use. P x V is by far the
    largest tensor of a training step, and a second one would double the step's memory. autograd raises an error if another
    operation still needs the logits.
    """
    logprobs_P, entropy_P = _TokenLogprobs.apply(logits_PV, ids_P, temperature)  # type: ignore[no-untyped-call]
    return logprobs_P, entropy_P


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_PV: Tensor, ids_P: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(logits_PV.dtype, torch.float32)
        log_z_P = logits_PV.new_empty(logits_PV.shape[0], dtype=dtype)
        logprobs_P, entropy_P = torch.empty_like(log_z_P), torch.empty_like(log_z_P)
        for rows, scores_cV, shares_cV in _chunks(logits_PV, dtype):
            scores_cV.copy_(logits_PV[rows]).div_(temperature)
            top_c = scores_cV.amax(-1)
            chosen_c = scores_cV.gather(-1, ids_P[rows, None])[:, 0] - top_c
            torch.exp(scores_cV.sub_(top_c[:, None]), out=shares_cV)
            sum_c = shares_cV.sum(-1)
            log_z_P[rows] = top_c + sum_c.log()
            logprobs_P[rows] = chosen_c - sum_c.log()
            # Excluded tokens (logit -inf) add 0 to the entropy, not 0 * -inf.
            entropy_P[rows] = sum_c.log() - scores_cV.mul_(shares_cV).nansum(-1) / sum_c
        ctx.save_for_backward(logits_PV, ids_P, log_z_P)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy_P)
        return logprobs_P, entropy_P

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """d logprob / d logit_v = (1[v = token] - p_v) / temperature."""
        logits_PV, ids_P, log_z_P = ctx.saved_tensors
        slope_P = grads[0] / ctx.temperature
        for rows, gradient_cV, _ in _chunks(logits_PV, log_z_P.dtype):
            gradient_cV.copy_(logits_PV[rows]).div_(ctx.temperature).sub_(log_z_P[rows, None]).exp_()
            gradient_cV.mul_(-slope_P[rows, None]).scatter_add_(-1, ids_P[rows, None], slope_P[rows, None])
            logits_PV[rows] = gradient_cV
        return logits_PV, None, None


def _chunks(logits_PV: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Some rows at a time, and two tensors (c, V) of unknown contents for them. The next rows get the same memory.

    New memory for each chunk would cost more than its arithmetic: the system clears it first.
    """
    positions, vocabulary = logits_PV.shape
    size = min(positions, max(1, CHUNK_ELEMENTS // vocabulary))
    first_cV, second_cV = logits_PV.new_empty((2, size, vocabulary), dtype=dtype)
    for start in range(0, positions, size or 1):
        rows = slice(start, min(start + size, positions))
        yield rows, first_cV[: rows.stop - start], second_cV[: rows.stop - start]


# ---- log-probabilities of a packed row

LOGITS_AT_ONCE = 1 << 28
"""With `head_chunk: auto`, more logits than this are never in memory at once."""
HEAD_CHUNK = {"cpu": 128, "cuda": 1024}
"""Tokens at a time then."""


class RowLogprobs:
    """Log-probabilities and entropies at `temperature` of the trained tokens of a row's sequences, in their order.

    All logits at once or in chunks: `head_chunk` is the configured value. `several_ranks`: the model is sharded, so all
    ranks have to create this at the same point, which makes a forward pass.
    """

    def __init__(
        self,
        forward: TrainingForward,
        *,
        temperature: float,
        head_chunk: int | Literal["auto"] = "auto",
        several_ranks: bool = False,
    ) -> None:
        self._forward, self._temperature, self._head_chunk = forward, temperature, head_chunk
        if several_ranks and head_chunk:
            _ = self._chunked

    def __call__(self, row: PackedRow) -> tuple[Tensor, Tensor]:
        in_chunks = bool(self._head_chunk)
        if self._head_chunk == "auto":
            head = self._forward.model.get_output_embeddings()
            in_chunks = head is not None and row.target_ids_P.numel() * head.weight.shape[0] > LOGITS_AT_ONCE
        if in_chunks and self._chunked is not None:
            found = self._chunked(row)
        else:
            found = token_logprobs(self._forward(row), row.target_ids_P, self._temperature)
        if (index := row.trained_index) is None:
            return found
        return _repeated(found[0], index), _repeated(found[1], index)

    @cached_property
    def _chunked(self) -> ChunkedHead | None:
        from pipelinerl.models.head import ChunkedHead  # noqa: PLC0415 - small models don't need it

        device = next(self._forward.model.parameters()).device.type
        chunk = HEAD_CHUNK.get(device, HEAD_CHUNK["cpu"]) if self._head_chunk == "auto" else self._head_chunk
        return ChunkedHead.of(self._forward, temperature=self._temperature, chunk=chunk)


def _repeated(values: Tensor, index: Tensor) -> Tensor:
    """Values of a row's trained tokens, for each sequence that shares them. Gradients are summed in a fixed order."""
    return F.embedding(index, values[:, None])[:, 0]


# ---- log-probabilities under the reference model of the KL term


class FrozenModelScorer:
    """Scores sampled tokens under `model`, the initial model or a teacher, which it freezes.

    With `lora`, `model` is the model being trained, and scores are computed without its adapters, so no copy is needed.
    `temperature` is the sampling temperature of the rollouts. Segments run in packed batches of at most `micro_batch_tokens`
    tokens. `several_ranks`: as for `RowLogprobs`. Raises UnsupportedModelError like `training_forward`.
    """

    def __init__(
        self,
        model: Any,
        *,
        temperature: float,
        micro_batch_tokens: int,
        lora: LoraModel | None = None,
        head_chunk: int | Literal["auto"] = "auto",
        several_ranks: bool = False,
    ) -> None:
        forward = training_forward(model)
        self.padded, self._least_shared = forward.padded, forward.least_shared
        self._row_logprobs = RowLogprobs(
            forward, temperature=temperature, head_chunk=head_chunk, several_ranks=several_ranks
        )
        model.eval()
        if lora is None:
            model.requires_grad_(False)
        self._initial = lora.without_adapters if lora else nullcontext
        self._device: torch.device = next(model.parameters()).device
        self._budget = micro_batch_tokens

    def score(self, segments: Sequence[Segment]) -> list[list[float]]:
        """For each segment, the log-probabilities of its sampled tokens in order of position."""
        segments = [replace(segment, supervised=()) for segment in segments]
        scores: list[list[float]] = [[] for _ in segments]
        for indices in pack_shared([[segment] for segment in segments], self._budget, self._least_shared):
            of_row = [segments[i] for i in indices]
            row = PackedRow.of(of_row, self._device, waste=MAX_PADDING_WASTE, least_shared=self._least_shared)
            remaining = iter(self.row_logprobs(row).tolist())
            for i in indices:
                scores[i] = [next(remaining) for _ in segments[i].sampled_positions]
        return scores

    @torch.no_grad()
    def row_logprobs(self, row: PackedRow) -> Tensor:
        """The log-probabilities (P,) of the trained tokens of one packed row."""
        with self._initial():
            return self._row_logprobs(row)[0]
