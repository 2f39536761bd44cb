"""Heads in chunks give what all logits give, in a fraction of the memory; in float32 trainer and engine agree better."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import common
from torch import Tensor
from transformers import AutoModelForCausalLM, Cohere2Config, GraniteConfig, LlamaConfig

from pipelinerl.config.load import load_config
from pipelinerl.engine import LocalEngine, flat
from pipelinerl.models import head, loading
from pipelinerl.models.head import LogitTransform, logit_transform
from pipelinerl.models.loading import Float32Head, load_model, use_float32_head
from pipelinerl.models.packed import PackedRow, TrainingForward, training_forward, use_packed_attention
from pipelinerl.models.state import checksum, named_weights
from pipelinerl.trainer import logprobs
from pipelinerl.trainer.logprobs import RowLogprobs, token_logprobs
from pipelinerl.types import Segment
from tests.parity import models as parity
from tests.parity.models import CONFIGS, FAMILIES, VOCABULARY
from tests.unit.engine.engine_parts import request, update_of
from tests.unit.models.test_packed import make_segments

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.3,
}
SCALED = {
    "cohere2-scale": Cohere2Config(**SIZES, logit_scale=0.25, pad_token_id=0),
    "granite-division": GraniteConfig(**SIZES, logits_scaling=3.0, pad_token_id=0),
}
LENGTHS = (9, 23, 2, 9, 17, 12)
CHUNK = 7
"""Divides neither the number of positions nor that of a length bucket."""


def make_model(name: str, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    config = copy.deepcopy((CONFIGS | SCALED)[name])
    # Grouped matrix products of experts have no float64.
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    head = model.get_output_embeddings()
    if head.bias is not None:
        head.bias.data.normal_()
    return model.to(dtype).eval()


def row() -> PackedRow:
    return PackedRow.of(make_segments(LENGTHS))


def computed(model: Any, forward: TrainingForward, head_chunk: int, temperature: float = 0.7) -> dict[str, Tensor]:
    """Log-probabilities, entropies, and the gradient of a weighted sum of the former by each parameter."""
    model.zero_grad()
    logprobs_P, entropy_P = RowLogprobs(forward, temperature=temperature, head_chunk=head_chunk)(row())
    slope_P = torch.randn(len(logprobs_P), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert not entropy_P.requires_grad
    (logprobs_P * slope_P).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logprobs": logprobs_P.detach(), "entropy": entropy_P, **gradients}


def require_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Relative to the largest element."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = max(1.0, tensor.abs().max().item())
        torch.testing.assert_close(found[name].to(tensor.dtype), tensor, atol=tolerance * scale, rtol=0, msg=name)


@pytest.mark.parametrize("name", [*FAMILIES, *SCALED])
def test_it_equals_the_logits_of_every_family(name: str) -> None:
    model = make_model(name)
    forward = training_forward(model)
    in_chunks, expected = computed(model, forward, CHUNK), computed(model, forward, 0)
    # Mamba's own code rounds logits to float32.
    require_close(in_chunks, expected, 1e-12 if expected["logprobs"].dtype == torch.float64 else 1e-5)
    assert model.get_output_embeddings().forward.__func__ is type(model.get_output_embeddings()).forward


@pytest.mark.parametrize("head_chunk", [1, CHUNK, 1000])
@pytest.mark.parametrize(
    ("dtype", "wide", "tolerance"),
    [(torch.float32, False, 1e-6), (torch.bfloat16, True, 5e-3), (torch.bfloat16, False, 5e-3)],
    ids=["float32", "bfloat16 with a float32 head", "bfloat16"],
)
def test_it_equals_the_logits_in_each_type(dtype: torch.dtype, wide: bool, tolerance: float, head_chunk: int) -> None:
    """In bfloat16: log-probabilities as in float32, and gradients up to a rounding."""
    model = make_model("gemma2" if dtype == torch.float32 else "llama-untied", dtype)
    if wide:
        use_float32_head(model)
    forward = training_forward(model)
    found, expected = computed(model, forward, head_chunk), computed(model, forward, 0)
    require_close(found, expected, tolerance)
    require_close(*({key: of[key] for key in ("logprobs", "entropy")} for of in (found, expected)), 1e-6)


def test_a_float32_head_without_float32_copies_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama-untied", torch.bfloat16)
    use_float32_head(model)
    forward = training_forward(model)
    expected = computed(model, forward, CHUNK)
    monkeypatch.setattr(head, "multiplies_wide", lambda _: True)
    found = computed(model, forward, CHUNK)
    for name, tensor in expected.items():  # gradients by logits are rounded to bfloat16
        assert (found[name] - tensor).norm() < 0.02 * tensor.norm(), name
    require_close(*({key: of[key] for key in ("logprobs", "entropy")} for of in (found, expected)), 1e-6)


@pytest.mark.parametrize("name", ["llama", "gemma2", "phi", "lfm2-conv"])
def test_under_a_frozen_head_nothing_is_computed_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(name)
    for parameter in (*model.get_input_embeddings().parameters(), *model.get_output_embeddings().parameters()):
        parameter.requires_grad_(False)
    forward = training_forward(model)
    expected = computed(model, forward, 0)
    passes: list[int] = []

    class Counted(head._Chunks):
        def __init__(self, *arguments: Any) -> None:
            passes.append(1)
            super().__init__(*arguments)

    monkeypatch.setattr(head, "_Chunks", Counted)
    require_close(computed(model, forward, CHUNK), expected, 1e-12)
    assert len(passes) == (len(row().buckets) if forward.padded else 1), "in the forward pass only"


def test_the_transform_of_each_family_is_found() -> None:
    found = {name: logit_transform(training_forward(make_model(name))) for name in ("llama", "gemma2", *SCALED)}
    assert found == {
        "llama": LogitTransform(),
        "gemma2": LogitTransform(1.0, 8.0),
        "cohere2-scale": LogitTransform(0.25),
        "granite-division": LogitTransform(1 / 3),
    }


def test_another_transform_keeps_all_logits_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model("llama")
    forward = training_forward(model)
    plain = type(model).forward

    def shifted(*arguments: Any, **options: Any) -> Any:
        output = plain(*arguments, **options)
        output.logits = output.logits - output.logits.square() / 9
        return output

    monkeypatch.setattr(type(model), "forward", shifted)
    require_close(computed(model, forward, CHUNK), computed(model, forward, 0), 0.0)
    assert "all logits of LlamaForCausalLM stay in memory" in caplog.text


@pytest.mark.parametrize("head_chunk", [0, 1])
def test_excluded_tokens_have_no_part_in_entropy_or_gradient(head_chunk: int) -> None:
    model = make_model("phi")
    forward = training_forward(model)
    model.get_output_embeddings().bias.data[5:] = -math.inf
    given = PackedRow.of([Segment(token_ids=(90, 1, 4), sampled=((1, 3),))])
    logprobs_P, entropy_P = RowLogprobs(forward, temperature=1.0, head_chunk=head_chunk)(given)
    logprobs_P.sum().backward()
    assert ((entropy_P > 0) & (entropy_P < math.log(5))).all()
    gradient = model.get_output_embeddings().weight.grad
    assert gradient.isfinite().all()
    assert not gradient[5:].any()
    assert gradient[:5].any()


def test_only_more_logits_than_a_limit_are_computed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    forward = training_forward(model)
    logits = row().target_ids_P.numel() * VOCABULARY
    kept: list[int] = []
    plain = logprobs.token_logprobs
    monkeypatch.setattr(logprobs, "token_logprobs", lambda *arguments: kept.append(1) or plain(*arguments))
    for limit in (logits, logits - 1):
        monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", limit)
        RowLogprobs(forward, temperature=1.0)(row())
        assert kept == [1]


def peak_bytes(model: Any, forward: TrainingForward, positions: int, head_chunk: int) -> int:
    """What is allocated at most, above what was there before, in forward and backward."""
    given = PackedRow.of([Segment(token_ids=tuple(range(positions + 1)), sampled=((1, positions + 1),))])
    of_row = RowLogprobs(forward, temperature=1.0, head_chunk=head_chunk)
    of_row(given)  # finds the transform
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    return common.peak_allocated(lambda: of_row(given)[0].sum().backward())


@pytest.mark.parametrize("frozen", [False, True])
def test_memory_does_not_grow_with_tokens_times_vocabulary(frozen: bool) -> None:
    vocabulary, chunk = 20_000, 8
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES | {"vocab_size": vocabulary})).eval()
    forward = training_forward(model)
    if frozen:
        model.lm_head.requires_grad_(False)
        model.get_input_embeddings().requires_grad_(False)
    short, long = (peak_bytes(model, forward, positions, chunk) for positions in (200, 400))
    whole = peak_bytes(model, forward, 400, 0)
    logits, of_chunk, of_head = 400 * vocabulary * 4, chunk * vocabulary * 4, model.lm_head.weight.nbytes
    assert whole > logits
    assert long - short < 0.02 * logits, "activations of the layers"
    assert long < 3 * of_chunk + (0 if frozen else 2 * of_head) + 0.05 * logits


def model(name: str = "llama", *, head: bool, seed: int = 0) -> Any:
    made = parity.make_model(name, seed).bfloat16()
    made.model.norm.weight.data.mul_(2)  # logits as far apart as those of a model that knows something
    if head:
        use_float32_head(made)
    return made


def generated(engine: LocalEngine, count: int) -> tuple[list[Segment], torch.Tensor]:
    """Sequences and the engine's log-probabilities of their sampled tokens."""
    prompts = [(i + 1, 5, 7) for i in range(count)]
    done = engine.generate([request(f"{i}", prompt, 40) for i, prompt in enumerate(prompts)])
    ids = [(*prompt, *completion.token_ids) for prompt, completion in zip(prompts, done, strict=True)]
    segments = [Segment(token_ids=one, sampled=((3, len(one)),)) for one in ids]
    return segments, torch.tensor([logprob for completion in done for logprob in completion.logprobs])


@torch.no_grad()
def mean_gap(name: str, *, head: bool) -> torch.Tensor:
    """|trainer - engine| of log-probabilities, for what the engine samples."""
    engine, trained = (model(name, head=head) for _ in range(2))
    segments, theirs = generated(LocalEngine(engine, slots=8, max_length=64, flatten=False), 16)
    use_packed_attention(trained)
    row = PackedRow.of(segments)
    ours, _ = token_logprobs(TrainingForward(trained)(row), row.target_ids_P, 1.0)
    return (ours - theirs).abs().mean()


@pytest.mark.parametrize("name", ["llama", pytest.param("llama-untied", marks=pytest.mark.slow)])
def test_trainer_and_engine_agree_better(name: str) -> None:
    assert mean_gap(name, head=True) < mean_gap(name, head=False)


def test_the_narrow_product_gives_the_same_logits_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: bfloat16 in, float32 out. Its gradients are computed in bfloat16."""
    head = torch.nn.Linear(24, 50, bias=False).to(torch.bfloat16)
    exact = Float32Head(head)
    given = torch.randn(2, 7, 24).to(torch.bfloat16).requires_grad_()
    found = []
    for narrow in (False, True):
        monkeypatch.setattr(loading, "multiplies_wide", lambda _, narrow=narrow: narrow)
        logits = exact(given)
        with torch.no_grad():
            assert torch.equal(exact(given), logits)
            assert exact(given[:, :0]).shape == (2, 0, 50), "a chunk of a prompt needs no logits"
        found.append((logits, *torch.autograd.grad(logits.log_softmax(-1)[..., 3].sum(), (given, head.weight))))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    assert found[1][0].dtype == torch.float32


@pytest.mark.parametrize("name", ["llama", "llama-untied"])
def test_names_weights_and_tying_stay(name: str) -> None:
    plain, exact = model(name, head=False), model(name, head=True)
    assert list(named_weights(exact)) == list(named_weights(plain))
    assert checksum(named_weights(exact)) == checksum(named_weights(plain))
    head, embedding = exact.get_output_embeddings(), exact.get_input_embeddings()
    assert isinstance(head, Float32Head)
    assert (head.weight is embedding.weight) == plain.config.tie_word_embeddings


@pytest.mark.slow
def test_a_flat_engine_converts_the_head_once_and_again_after_an_update(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def one_layer(seed: int) -> Any:
        made = AutoModelForCausalLM.from_config(LlamaConfig(**{**CONFIGS["llama"].to_dict(), "num_hidden_layers": 1}))
        named = named_weights(model(head=False, seed=seed))
        made.load_state_dict({name: named[name] for name in made.state_dict()})
        made = made.bfloat16().eval()
        use_float32_head(made)
        return made

    monkeypatch.setattr(flat, "PACK_FROM", 1)
    engine = LocalEngine(one_layer(0), slots=8, max_length=64)
    assert "can't be exported" not in caplog.text
    engine.update_weights(update_of(one_layer(1), version=1))
    plain = LocalEngine(one_layer(1), slots=8, max_length=64, flatten=False)
    (segments, ours), (expected, theirs) = generated(engine, 4), generated(plain, 4)
    assert segments == expected
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_the_run_file_says_so_to_all_who_load_the_model(tmp_path: Path) -> None:
    model(head=False).save_pretrained(tmp_path)
    config = load_config(None, [f"--model.path={tmp_path}", "--model.dtype=bfloat16", "--model.head_dtype=float32"])
    assert isinstance(load_model(config.model).get_output_embeddings(), Float32Head)
    plain = config.model.model_copy(update={"head_dtype": None})
    assert not isinstance(load_model(plain).get_output_embeddings(), Float32Head)
