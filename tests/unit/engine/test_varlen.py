"""A model in a narrow type is checked as strictly as in float32; the reference of attention with variable lengths."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.engine import LocalEngine
from pipelinerl.engine.attention import LayerCall
from pipelinerl.engine.static import StaticEngine
from pipelinerl.engine.varlen import VarlenBatch, row_buckets
from pipelinerl.errors import UnsupportedModelError
from pipelinerl.models.layers import in_float32
from pipelinerl.models.varlen import varlen_reference
from tests.parity.models import CONFIGS, make_model

IDS = torch.arange(1, 30)[None]


@pytest.mark.parametrize("family", sorted(CONFIGS))
@torch.no_grad()
def test_inside_a_narrow_model_computes_what_a_float32_copy_does(family: str) -> None:
    model = make_model(family).bfloat16()
    wide = copy.deepcopy(model).float()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with in_float32(model):
        logits = model(input_ids=IDS, use_cache=False).logits
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, wide(input_ids=IDS, use_cache=False).logits, atol=1e-5, rtol=1e-5)
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor, before[name])


def loud(family: str) -> Any:
    """A model with logits as large as those of trained models, where bfloat16 is coarse."""
    model = make_model(family)
    with torch.no_grad():
        model.get_output_embeddings().weight *= 6
    return model.bfloat16()


@pytest.mark.parametrize("engine", [LocalEngine, StaticEngine])
def test_large_logits_in_bfloat16_are_no_reason_to_refuse(engine: type[LocalEngine]) -> None:
    made = engine(loud("llama"), slots=2, max_length=64, flatten=False)
    assert "over packed batches" in made.progress().runner
    assert {parameter.dtype for parameter in made._runner.model.parameters()} == {torch.bfloat16}


def test_a_small_mistake_is_found_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale that is off by a hundredth changes less than bfloat16 rounds."""
    own = VarlenBatch.attend

    def scaled(batch: VarlenBatch, call: LayerCall, query: Any, key: Any, value: Any) -> Any:
        return own(batch, call, query * 1.01, key, value)

    monkeypatch.setattr(VarlenBatch, "attend", scaled)
    with pytest.raises(UnsupportedModelError, match="off by"):
        StaticEngine(loud("llama"), slots=2, max_length=64, flatten=False)


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
