"""The output head in float32: trainer and engine agree better, and models in float32 are as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from pipelinerl.config.load import load_config
from pipelinerl.engine import LocalEngine, flat
from pipelinerl.models import loading
from pipelinerl.models.loading import Float32Head, load_model, use_float32_head
from pipelinerl.models.packed import PackedRow, TrainingForward, use_packed_attention
from pipelinerl.models.state import checksum, named_weights
from pipelinerl.trainer.logprobs import token_logprobs
from pipelinerl.types import Segment
from tests.parity.models import CONFIGS, make_model
from tests.unit.engine.engine_parts import request, update_of


def model(name: str = "llama", *, head: bool, seed: int = 0) -> Any:
    made = make_model(name, seed).bfloat16()
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
    ours, _ = token_logprobs(TrainingForward(trained)(row), row.sampled_ids_P, 1.0)
    return (ours - theirs).abs().mean()


@pytest.mark.parametrize("name", ["llama", "llama-untied"])
def test_trainer_and_engine_agree_better(name: str) -> None:
    assert mean_gap(name, head=True) < 0.95 * mean_gap(name, head=False)


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
