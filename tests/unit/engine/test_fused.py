"""Graphs with joint products and in compiled pieces compute the same, and layers of one kind are compiled once."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from pipelinerl.engine import varlen
from pipelinerl.engine.static import StaticEngine
from pipelinerl.engine.varlen import VarlenRunner
from pipelinerl.models.state import checksum, named_weights
from pipelinerl.types import GenerationRequest
from tests.parity.models import CONFIGS, make_model
from tests.unit.compiler_parts import NotingCompiler, absent_compiler, nothing_compiled, wrong_compiler  # noqa: F401
from tests.unit.engine.engine_parts import request

LAYERS = 3
OTHERS = {"qwen3", "gemma3", "mistral-window", "phi"}


pytestmark = pytest.mark.usefixtures("nothing_compiled")


def deep_model(family: str) -> Any:
    settings = CONFIGS[family].to_dict() | {"num_hidden_layers": LAYERS, "layer_types": None, "max_window_layers": 2}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(type(CONFIGS[family])(**settings), attn_implementation="eager").eval()


def requests() -> list[GenerationRequest]:
    """Of different lengths, so that steps compute sixteen rows at first, if there are as many, and eight at the end."""
    return [request(f"r{i}", (5, 7, 3 + i), 3 + 2 * i, seed=i) for i in range(12)]


def generated(engine: StaticEngine) -> list[object]:
    return [(done.token_ids, done.logprobs) for done in engine.generate(requests())]


def expected_of(model: Any, slots: int) -> list[object]:
    """What `generated` gives without a compiler."""
    engine = StaticEngine(model, slots=slots, max_length=64)
    return [(done.token_ids, pytest.approx(done.logprobs, abs=1e-4)) for done in engine.generate(requests())]


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen2", marks=pytest.mark.slow)])
def test_products_of_one_input_are_joint_and_follow_what_is_written_to_their_parameters(family: str) -> None:
    model, other = make_model(family), make_model(family, seed=1)
    before = {name: tensor.clone() for name, tensor in named_weights(model).items()}
    runner = VarlenRunner(model, 2, 64)  # compares it with the model's own forward
    assert runner._flat is not None
    products = [node for node in runner._flat.module.graph.nodes if node.target is F.linear]
    assert len(products) == 4 * model.config.num_hidden_layers + 1
    after = named_weights(model)
    assert list(after) == list(before)
    assert checksum(after) == checksum(before)
    for parameter, new in zip(model.parameters(), other.parameters(), strict=True):
        parameter.data.copy_(new)
    runner.weights_changed()
    ids_T = torch.arange(3, 23)
    with torch.inference_mode():
        found_NV, order_N = runner._slot_logits(ids_T)
        torch.testing.assert_close(found_NV, other(input_ids=ids_T[None]).logits[0][order_N], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    ["llama", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in sorted(OTHERS))],
)
def test_layers_of_a_kind_are_compiled_once_for_all_numbers_of_rows(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, noting = expected_of(deep_model(family), slots=16), NotingCompiler()
    monkeypatch.setitem(varlen.COMPILERS, "cpu", noting)
    engine = StaticEngine(deep_model(family), slots=16, max_length=64)
    assert "of 3 compiled pieces" in engine.progress().runner
    assert len(noting.graphs) == 4  # sampling is one
    assert generated(engine) == plain
    assert len(noting.graphs) == 4


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        (absent_compiler, "RuntimeError: No working C++ compiler found"),
        pytest.param(wrong_compiler, "log-probabilities", marks=pytest.mark.slow),
    ],
)
def test_what_can_not_be_compiled_exactly_runs_as_it_is_and_says_why(
    compiler: Any, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = expected_of(make_model("llama"), slots=8)
    monkeypatch.setitem(varlen.COMPILERS, "cpu", compiler)
    engine = StaticEngine(make_model("llama"), slots=8, max_length=64)
    _, _, described = engine.progress().runner.partition("as an exported graph, not compiled: ")
    assert reason in described
    assert reason in caplog.text
    assert "and more" not in described
    assert generated(engine) == plain


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler for CPUs needs g++")
def test_the_real_compiler_samples_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = expected_of(deep_model("gemma3"), slots=8)
    monkeypatch.setitem(varlen.COMPILERS, "cpu", "inductor")
    engine = StaticEngine(deep_model("gemma3"), slots=8, max_length=64)
    assert "of 3 compiled pieces" in engine.progress().runner
    assert "not compiled" not in engine.progress().runner
    assert generated(engine) == plain
