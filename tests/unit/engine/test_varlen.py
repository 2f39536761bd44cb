"""The reference of attention with variable lengths: every sequence gets what fused attention gives it alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.engine.varlen import row_buckets
from pipelinerl.models.varlen import varlen_reference

SLOT = 12
ROWS = 5


def alone(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None) -> torch.Tensor:
    """One sequence [q, Hq, D] over its keys [k, Hk, D]; its last query is at its last key."""
    queries, keys = query.shape[0], key.shape[0]
    position, column = torch.arange(keys - queries, keys)[:, None], torch.arange(keys)
    visible = (column <= position) & (column > position - (window or keys + 1))
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    heads_first = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    return F.scaled_dot_product_attention(*heads_first, attn_mask=visible, scale=0.3)[0].transpose(0, 1)


@settings(max_examples=60)
@given(data=st.data())
def test_every_sequence_gets_what_it_gets_alone(data: st.DataObject) -> None:
    rows = data.draw(st.permutations(range(ROWS)).map(lambda order: order[: data.draw(st.integers(1, ROWS))]))
    used = [data.draw(st.integers(1, SLOT)) for _ in rows]
    counts = [data.draw(st.sampled_from([1, keys, min(2, keys)])) for keys in used]
    window = data.draw(st.sampled_from([None, 1, 3]))
    kv_heads, groups = data.draw(st.sampled_from([(1, 1), (2, 2), (1, 3)]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    key, value = torch.randn(2, ROWS * SLOT + 1, kv_heads, 4, generator=generator)
    query = torch.randn(sum(counts), kv_heads * groups, 4, generator=generator)
    begins = torch.tensor([0, *counts]).cumsum(0)
    found = varlen_reference(
        query,
        key,
        value,
        begins.int(),
        torch.tensor([row * SLOT for row in [*rows, rows[-1] + 1]], dtype=torch.int32),
        max(counts),
        SLOT,
        scale=0.3,
        window_size=(-1 if window is None else window - 1, 0),
        seqused_k=torch.tensor(used, dtype=torch.int32),
    )
    for i, (row, keys) in enumerate(zip(rows, used, strict=True)):
        own = slice(row * SLOT, row * SLOT + keys)
        tokens = slice(int(begins[i]), int(begins[i + 1]))
        torch.testing.assert_close(found[tokens], alone(query[tokens], key[own], value[own], window), atol=1e-5, rtol=1e-5)


def test_a_step_computes_at_most_twice_the_rows_in_use() -> None:
    assert row_buckets(256) == (8, 16, 32, 64, 128, 256)
    assert row_buckets(50) == (8, 13, 25, 50)
    assert row_buckets(3) == (3,)
