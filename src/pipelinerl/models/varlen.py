"""Attention of sequences of different lengths in one call, without padding: FlashAttention on GPUs.

Elsewhere `varlen_reference` computes the same. It is slow: for tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from pipelinerl.models.packed import PackedRow

Attention = Callable[..., Tensor]

_LARGEST_HEAD, _HEAD_MULTIPLE = 256, 8
_TYPES = (torch.bfloat16, torch.float16)
"""Head sizes and types that the kernel on GPUs has."""


def has_kernel(size: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether heads of `size` numbers have an implementation that is made for `device`."""
    return device.type != "cuda" or (size <= _LARGEST_HEAD and size % _HEAD_MULTIPLE == 0 and dtype in _TYPES)


def attention_of(query: Tensor) -> Attention:
    """The implementation for the device and the type of `query`."""
    return flash_attention if query.is_cuda and query.dtype in _TYPES else varlen_reference


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *sequences: Tensor | int,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    seqused_k: Tensor | None = None,
) -> Tensor:
    """What `varlen_reference` computes, on a GPU, of the same arguments. Single queries are fastest without a window.

    PyTorch's `varlen_attn` calls the same operation, but takes `seqused_k` from version 2.12 on only.
    """
    before, after = window_size
    attended: Tensor = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        *sequences,
        0.0,  # dropout
        window_size == (-1, 0),
        False,
        scale=scale,
        window_size_left=before,
        window_size_right=after,
        seqused_k=seqused_k,
    )[0]
    return attended


def varlen_reference(  # noqa: PLR0917 - the arguments of the operation
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    seqused_k: Tensor | None = None,
) -> Tensor:
    """Attention within sequences, for any device: query [T, Hq, D], key and value [K, Hk, D] -> [T, Hq, D].

    Sequence i has queries `cu_seq_q[i] <= t < cu_seq_q[i + 1]`, at most `max_q`, and `seqused_k[i]` keys, at most `max_k`,
    from `cu_seq_k[i]` on (without `seqused_k`, those up to `cu_seq_k[i + 1]`). Its last query is at the position of its last
    key. A query sees keys from `window_size[0]` positions before its own to `window_size[1]` after it; -1 means no limit.
    The output of a query that sees no key is 0.
    """
    device = query.device
    begin_N, end_N = cu_seq_q[:-1].long(), cu_seq_q[1:].long()
    used_N = (cu_seq_k[1:] - cu_seq_k[:-1] if seqused_k is None else seqused_k).long()
    column_q, column_k = torch.arange(max_q, device=device), torch.arange(max_k, device=device)
    # Every sequence is padded to max_q queries and max_k keys: places beyond its own hold other sequences' tokens.
    query_Nq = (begin_N[:, None] + column_q).clamp(max=query.shape[0] - 1)
    key_Nk = (cu_seq_k[:-1].long()[:, None] + column_k).clamp(max=key.shape[0] - 1)
    position_Nq1 = (column_q + (used_N - (end_N - begin_N))[:, None])[:, :, None]
    visible_Nqk = (column_k < used_N[:, None])[:, None, :].expand(-1, max_q, -1)
    before, after = window_size
    if before >= 0:
        visible_Nqk = visible_Nqk & (column_k >= position_Nq1 - before)
    if after >= 0:
        visible_Nqk = visible_Nqk & (column_k <= position_Nq1 + after)
    groups = query.shape[1] // key.shape[1]
    queries, keys, values = query[query_Nq].transpose(1, 2), key[key_Nk].transpose(1, 2), value[key_Nk].transpose(1, 2)
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    sees_Nq1 = visible_Nqk.any(-1, keepdim=True)
    mask_N1qk = (visible_Nqk | ~sees_Nq1)[:, None]
    attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask_N1qk, scale=scale)
    attended = (attended * sees_Nq1[:, None]).transpose(1, 2)
    token_T = torch.arange(query.shape[0], device=device)
    sequence_T = torch.searchsorted(end_N, token_T, right=True).clamp(max=len(begin_N) - 1)
    return attended[sequence_T, token_T - begin_N[sequence_T]]


def attend_row(
    row: PackedRow, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None
) -> Tensor | None:
    """Attention within each sequence of `row`: shapes as in `packed.packed_attention`. None if it has no implementation.

    Values of fewer numbers than keys (latent attention) are padded. Of shared prefixes, every run that continues one gets a
    copy of keys and values. It is made again for the backward pass, so that only one layer's copies are in memory.
    """
    size, missing = query.shape[-1], query.shape[-1] - value.shape[-1]
    if row.begins is None or missing < 0 or not has_kernel(size, query.device, query.dtype):
        return None
    query, key, value = (projected[0].transpose(0, 1) for projected in (query, key, F.pad(value, (0, missing))))
    sizes: Any = {"scale": scale, "window_size": (-1 if window is None else window - 1, 0)}
    begins, longest_run = row.begins, max(bucket.length for bucket in row.buckets)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if row.prefixed is None:
            return attention_of(query)(query, key, value, begins, begins, longest_run, longest_run, **sizes)
        places, key_begins = row.prefixed
        key, value = key.index_select(0, places), value.index_select(0, places)
        return attention_of(query)(query, key, value, begins, key_begins, longest_run, row.longest, **sizes)

    if row.prefixed is None:
        attended = attend(query, key, value)
    else:
        options: Any = {"use_reentrant": False, "preserve_rng_state": False, "determinism_check": "none"}
        attended = checkpoint(attend, query, key, value, **options)
    return attended[None, ..., : size - missing]
