"""Training forward over many sequences packed in one row, without padding and without attention between them.

A Hugging Face model computes everything but attention token by token, so a row `[1, T]` of concatenated sequences is
right as it is once two things are taken care of: positions restart in each sequence (we pass them), and attention stays
within a sequence (we are the model's attention function). The sequences are laid out by length; similar lengths are
padded to a small batch inside attention only, where causality makes right padding harmless.

Shapes: T tokens of the row, P sampled tokens, V vocabulary, S sequences of a bucket, L their padded length,
h heads (query heads Hq, key/value heads Hk), D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pipelinerl.errors import UnsupportedModelError
from pipelinerl.models.attention import attend, refuse_unknown_features, replace_attention, rope_limit
from pipelinerl.models.packed_row import PackedRow
from pipelinerl.types import Segment

ATTENTION_NAME = "pipelinerl_packed"


def use_packed_attention(model: Any) -> None:
    """Make `model` (a Hugging Face causal LM in eval mode) attend within the sequences of a `PackedRow`.

    Raises UnsupportedModelError if its attention can't be replaced, or if a short packed row does not give the logits
    that its own attention gives for each sequence alone.
    """
    replace_attention(model, ATTENTION_NAME, packed_attention)
    _verify(model)


def sampled_logits(model: nn.Module, row: PackedRow) -> Tensor:
    """Logits [P, V], in the type of the model's head, of the positions that predict the row's sampled tokens.

    Call `use_packed_attention(model)` once before. Raises UnsupportedModelError if a layer asks for attention that is not
    honoured here.
    """
    limit = rope_limit(model)
    if limit is not None and row.longest > limit:
        raise UnsupportedModelError(
            f"{type(model).__name__} changes its position encoding beyond {limit} tokens, which packed training can't "
            f"follow (a sequence has {row.longest}); set engine.max_length to {limit}"
        )
    logits: Tensor = model(
        input_ids=row.token_ids_1T,
        position_ids=row.position_ids_1T,
        use_cache=False,
        logits_to_keep=row.predictor_P,
        packed_row=row,
    ).logits
    return logits[0]


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    *,
    packed_row: PackedRow | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer: query [1, Hq, T, D], key and value [1, Hk, T, D] -> output [1, T, Hq, D].

    Raises UnsupportedModelError for anything that would not be honoured.
    """
    if packed_row is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} was called without a packed row: either it does not hand keyword arguments on to its "
            "attention (it can't be trained packed then), or it is a model in training, to be called through sampled_logits"
        )
    refuse_unknown_features(module, attention_mask, sliding_window=sliding_window, longest=packed_row.longest, other=other)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    parts = []
    for bucket in packed_row.buckets:
        windowed = sliding_window is not None and sliding_window < bucket.length
        mask = packed_row.causal_mask(bucket.length, sliding_window) if sliding_window is not None and windowed else None
        if softcap is not None and mask is None:
            mask = packed_row.causal_mask(bucket.length, bucket.length)
        out_ShLD = attend(bucket.batch(query), bucket.batch(key), bucket.batch(value), mask, scale=scale, softcap=softcap)
        parts.append(bucket.tokens(out_ShLD))
    return torch.cat(parts)[None], None


@torch.no_grad()
def _verify(model: Any) -> None:
    """Compare a small packed row with each sequence alone under the model's own attention; refuse the model if they differ.

    Catches what no list of features can: recurrent layers that carry state over, learned positions, position biases.
    """
    vocabulary = model.get_input_embeddings().weight.shape[0]
    device = next(model.parameters()).device
    segments = [
        Segment(token_ids=tuple((17 * i + 7 * n) % vocabulary for i in range(n)), sampled=((1, n),)) for n in (5, 11, 2, 12)
    ]
    packed_PV = sampled_logits(model, PackedRow.of(segments, device)).float()
    model.set_attn_implementation("eager")
    alone = [model(torch.tensor([s.token_ids], device=device), use_cache=False).logits[0, :-1].float() for s in segments]
    model.set_attn_implementation(ATTENTION_NAME)
    alone_PV = torch.cat(alone)
    error = (packed_PV - alone_PV).abs().max() / alone_PV.abs().max().clamp_min(1e-6)
    tolerance = 1e-4 if next(model.parameters()).dtype in (torch.float32, torch.float64) else 0.05
    if not error <= tolerance:
        raise UnsupportedModelError(
            f"{type(model).__name__} can't be trained packed: its logits differ from those of single sequences "
            f"(relative error {error:.1g})"
        )
