"""Log-probabilities and entropies from the input of the output head, without the logits of all positions at once.

With a large vocabulary, logits are by far the largest tensor of a training step. Here they exist for a chunk of positions at
a time. The backward pass computes them again. Under a frozen head it does not: the gradient of a position is its slope times
a vector that the forward pass computes already.

Shapes: P positions, c of them in a chunk, V vocabulary, H hidden size.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pipelinerl.models.loading import Float32Head, multiplies_wide, wide_product
from pipelinerl.models.packed import PackedRow, TrainingForward
from pipelinerl.types import Segment

_log = logging.getLogger(__name__)

# ---- What a model does with the logits of its head


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """The logits of a model from the outputs of its head: x * scale or, with a cap, cap * tanh(x * scale / cap)."""

    scale: float = 1.0
    cap: float | None = None

    def apply_(self, logits: Tensor) -> Tensor:
        """In place, in the order of operations that models use."""
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.cap is not None:
            logits.div_(self.cap).tanh_().mul_(self.cap)
        return logits


_HUGE, _LARGEST_CAP = 1e30, 1e6


@torch.no_grad()
def logit_transform(forward: TrainingForward) -> LogitTransform | None:
    """Find the transform by giving known numbers to what the model computes after its head.

    None if it is of another form, or if the model has no linear head that it calls once.
    """
    model = forward.model
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        return None
    dtype = torch.promote_types(head.weight.dtype, torch.float32)
    given_V = torch.linspace(-60.0, 60.0, head.out_features, dtype=dtype, device=head.weight.device)
    given_V[:2] = torch.tensor([_HUGE, 1.0])
    calls = 0

    def give(_: nn.Module, __: object, logits: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return given_V.expand(*logits.shape[:-1], -1)

    hook = head.register_forward_hook(give)
    try:
        found_V = forward(PackedRow.of([Segment(token_ids=(0, 0), sampled=((1, 2),))], head.weight.device))[0]
    finally:
        hook.remove()
    if calls != 1 or found_V.shape != given_V.shape:
        return None
    largest, of_one = found_V[:2].tolist()
    transform = LogitTransform(of_one)
    if 0.0 < abs(of_one) < largest < _LARGEST_CAP:
        transform = LogitTransform(float(f"{largest * math.atanh(of_one / largest):.6g}"), largest)
    return transform if torch.allclose(transform.apply_(given_V.clone()), found_V.to(dtype), 1e-5, 1e-5) else None


# ---- The head


@dataclass(frozen=True, slots=True)
class ChunkedHead:
    """Log-probabilities and entropies of a row's sampled tokens, `chunk` positions at a time."""

    forward: TrainingForward
    temperature: float
    chunk: int
    transform: LogitTransform
    wide: bool
    """The product is computed in float32 also for weights of a narrower type."""

    @classmethod
    def of(cls, forward: TrainingForward, *, temperature: float, chunk: int) -> ChunkedHead | None:
        """None, with a warning, if the model's logits can't be computed in chunks. Makes one forward pass."""
        transform = logit_transform(forward)
        if transform is None:
            _log.warning("all logits of %s stay in memory: its output head is not supported", type(forward.model).__name__)
            return None
        wide = isinstance(forward.model.get_output_embeddings(), Float32Head)
        return cls(forward, temperature, chunk, transform, wide)

    def __call__(self, row: PackedRow) -> tuple[Tensor, Tensor]:
        """What `token_logprobs` gives for the row's logits, up to rounding; both (P,). Gradients flow through the first."""
        ids_P = row.target_ids_P
        if self.forward.padded:  # the head computes one length bucket after the other
            ends = torch.tensor([bucket.end for bucket in row.buckets], device=ids_P.device)
            ids_P = ids_P[torch.bucketize(row.predictor_P, ends, right=True).argsort(stable=True)]
        with self._in_place_of_logits(ids_P):
            found_P2 = self.forward(row)
        return found_P2[:, 0], found_P2[:, 1].detach()

    @contextmanager
    def _in_place_of_logits(self, ids_P: Tensor) -> Iterator[None]:
        """Inside, the model returns log-probability and entropy [..., 2] of the next `ids_P`, not logits [..., V].

        The head itself computes them, since a sharded one has its weights only while it is called. What the model does with
        logits then gets zeros: it is part of what the head has computed.
        """
        head: Any = self.forward.model.get_output_embeddings()
        computed: list[Tensor] = []
        begin = 0

        def compute(hidden: Tensor) -> Tensor:
            nonlocal begin
            hidden_PH = hidden.flatten(0, -2)
            ids_p = ids_P[begin : begin + len(hidden_PH)]
            begin += len(hidden_PH)
            found_P2: Tensor = _Logprobs.apply(hidden_PH, head.weight, head.bias, ids_p, self)  # type: ignore[no-untyped-call]
            return found_P2.view(*hidden.shape[:-1], 2)

        def keep(_: nn.Module, __: object, found: Tensor) -> Tensor:
            computed.append(found)
            return found.new_zeros(*found.shape[:-1], 1)

        def restore(_: nn.Module, __: object, output: Any) -> Any:
            output.logits = computed.pop()
            return output

        # FSDP's own hook has to see what is differentiated: in the head before `keep`, in the model after `restore`.
        hooks = (head.register_forward_hook(keep), self.forward.model.register_forward_hook(restore, prepend=True))
        head.forward = compute
        try:
            yield
        finally:
            del head.forward
            for hook in hooks:
                hook.remove()


class _Logprobs(torch.autograd.Function):
    """(hidden [P, H], weight [V, H], bias [V]) -> log-probabilities of `ids_P` and entropies [P, 2]."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes positional arguments
        ctx: Any, hidden_PH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, ids_P: Tensor, how: ChunkedHead
    ) -> Tensor:
        ctx.how, ctx.ids_P, ctx.hidden_dtype = how, ids_P, hidden_PH.dtype
        chunks = _Chunks(hidden_PH, weight_VH, bias_V, how)
        found_P2 = hidden_PH.new_empty(len(hidden_PH), 2, dtype=chunks.dtype)
        log_z_P = found_P2.new_empty(len(hidden_PH))
        frozen = ctx.needs_input_grad[0] and not any(ctx.needs_input_grad[1:3])
        direction_PH = torch.empty_like(chunks.hidden_PH) if frozen else None
        for rows, scores_cV, capped_cV in chunks:
            ids_c1 = ids_P[rows, None]
            chosen_c, top_c = scores_cV.gather(1, ids_c1)[:, 0], scores_cV.amax(-1)
            shares_cV = scores_cV.sub_(top_c[:, None]).exp()
            sum_c = shares_cV.sum(-1)
            log_z_P[rows] = top_c + sum_c.log()
            found_P2[rows, 0] = chosen_c - log_z_P[rows]
            # Excluded tokens (logit -inf) add 0 to the entropy, not 0 * -inf.
            found_P2[rows, 1] = sum_c.log() - scores_cV.mul_(shares_cV).nansum(-1) / sum_c
            if direction_PH is not None:
                ones_c1 = torch.ones_like(sum_c)[:, None]
                gradient_cV = chunks.gradient(shares_cV.div_(sum_c[:, None]), ids_c1, ones_c1, capped_cV)
                torch.mm(gradient_cV, chunks.weight_VH, out=direction_PH[rows])
        ctx.save_for_backward(*((hidden_PH, weight_VH, bias_V, log_z_P) if direction_PH is None else (direction_PH,)))
        return found_P2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """d logprob / d logit_v = (1[v = token] - p_v) / temperature."""
        slope_P1 = grads[0][:, :1]
        first_PH, *others = ctx.saved_tensors
        if not others:
            return (first_PH * slope_P1).to(ctx.hidden_dtype), None, None, None, None
        hidden_PH, (weight_VH, bias_V, log_z_P) = first_PH, others
        chunks = _Chunks(hidden_PH, weight_VH, bias_V, ctx.how)
        d_hidden_PH = torch.empty_like(chunks.hidden_PH)
        d_weight_VH = torch.zeros_like(weight_VH, dtype=chunks.dtype)  # a sum of chunks loses bits in narrower types
        d_bias_V = d_weight_VH.new_zeros(len(weight_VH))
        for rows, scores_cV, capped_cV in chunks:
            shares_cV = scores_cV.sub_(log_z_P[rows, None]).exp_()
            gradient_cV = chunks.gradient(shares_cV, ctx.ids_P[rows, None], slope_P1[rows], capped_cV)
            torch.mm(gradient_cV, chunks.weight_VH, out=d_hidden_PH[rows])
            if gradient_cV.dtype == d_weight_VH.dtype:
                d_weight_VH.addmm_(gradient_cV.t(), chunks.hidden_PH[rows])
            else:
                d_weight_VH += gradient_cV.t() @ chunks.hidden_PH[rows]
            if bias_V is not None:
                d_bias_V += gradient_cV.sum(0)
        of_bias_V = None if bias_V is None else d_bias_V.to(bias_V.dtype)
        return d_hidden_PH.to(hidden_PH.dtype), d_weight_VH.to(weight_VH.dtype), of_bias_V, None, None


class _Chunks:
    """The chunks of a pass over the head: rows, logits / temperature in `dtype` and, with a cap, the logits before that.

    The next chunk overwrites these tensors.
    """

    def __init__(self, hidden_PH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, how: ChunkedHead) -> None:
        self.dtype = torch.promote_types(weight_VH.dtype, torch.float32)
        self._narrow = how.wide and bias_V is None and multiplies_wide(weight_VH)
        computed = self.dtype if how.wide and not self._narrow else weight_VH.dtype
        self.hidden_PH, self.weight_VH = hidden_PH.to(computed), weight_VH.to(computed)
        self._bias_V = None if bias_V is None else bias_V.to(computed)
        self._how = how
        logits_dtype = self.dtype if how.wide else computed
        self._logits_cV = hidden_PH.new_empty(min(how.chunk, len(hidden_PH)), len(weight_VH), dtype=logits_dtype)

    def __iter__(self) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        for start in range(0, len(self.hidden_PH), self._how.chunk):
            rows = slice(start, min(start + self._how.chunk, len(self.hidden_PH)))
            logits_cV = self._logits_cV[: rows.stop - start]
            if self._narrow:
                wide_product(self.hidden_PH[rows], self.weight_VH.t(), out=logits_cV)
            elif self._bias_V is None:
                torch.mm(self.hidden_PH[rows], self.weight_VH.t(), out=logits_cV)
            else:
                torch.addmm(self._bias_V, self.hidden_PH[rows], self.weight_VH.t(), out=logits_cV)
            self._how.transform.apply_(logits_cV)
            capped_cV = None if self._how.transform.cap is None else logits_cV.clone()
            scores_cV = logits_cV.to(self.dtype)
            yield rows, scores_cV if self._how.temperature == 1.0 else scores_cV.div_(self._how.temperature), capped_cV

    def gradient(self, shares_cV: Tensor, ids_c1: Tensor, slope_c1: Tensor, capped_cV: Tensor | None) -> Tensor:
        """The gradient by the head's logits. `shares_cV`: probabilities (overwritten); `slope_c1`: by log-probabilities."""
        slope_c1, transform = slope_c1 / self._how.temperature, self._how.transform
        gradient_cV = shares_cV.mul_(-slope_c1).scatter_add_(1, ids_c1, slope_c1)
        if transform.cap is not None and capped_cV is not None:  # capped logits are overwritten
            gradient_cV.mul_(capped_cV.to(gradient_cV.dtype).div_(transform.cap).square_().neg_().add_(1.0))
        if transform.scale != 1.0:
            gradient_cV.mul_(transform.scale)
        return gradient_cV.to(self.weight_VH.dtype)
