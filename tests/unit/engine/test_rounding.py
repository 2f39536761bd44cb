"""A model in a narrow type is checked as strictly as in float32, and its own rounding is no reason to refuse it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from pipelinerl.engine import LocalEngine
from pipelinerl.engine.attention import LayerCall
from pipelinerl.engine.static import StaticEngine
from pipelinerl.engine.varlen import VarlenBatch
from pipelinerl.errors import UnsupportedModelError
from pipelinerl.models.layers import in_float32
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
