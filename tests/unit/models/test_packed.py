"""Packed forward and backward against the model's own eager attention on each sequence alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    GPTNeoXConfig,
    Llama4TextConfig,
    LlamaConfig,
    PreTrainedModel,
)

from pipelinerl.errors import UnsupportedModelError
from pipelinerl.models import packed, prefixes
from pipelinerl.models.attention import attend
from pipelinerl.models.own_forward import padded_logits
from pipelinerl.models.packed import (
    MAX_PADDING_WASTE,
    PackedRow,
    packed_attention,
    training_forward,
    use_packed_attention,
)
from pipelinerl.types import Segment
from tests.parity.models import CONFIGS, FAMILIES, THROUGH_CACHE, VOCABULARY
from tests.parity.models import make_model as make_family_model

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
# Single tokens of context, equal lengths, several sampled ranges, and sequences longer than the sliding windows.
LENGTHS = (9, 23, 2, 9, 17, 30, 8, 3)


def make_segments(lengths: tuple[int, ...]) -> list[Segment]:
    generator = torch.Generator().manual_seed(7)
    segments = []
    for n in lengths:
        ids = torch.randint(0, VOCABULARY, (n,), generator=generator).tolist()
        sampled = ((1, 3), (5, n)) if n > 6 else ((1, n),)
        segments.append(Segment(token_ids=tuple(ids), sampled=sampled, supervised=((4, 5),) if n > 9 else ()))
    return segments


def make_model(name: str) -> Any:
    """Grouped matrix products of experts have no float64."""
    model = make_family_model(name).double()
    model.set_experts_implementation("eager")
    return model


def weighted_sum(logits_PV: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return (logits_PV * torch.randn(logits_PV.shape, generator=generator, dtype=logits_PV.dtype)).sum()


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_of_a_row_equal_those_of_each_sequence_alone(name: str) -> None:
    model, segments = make_model(name), make_segments(LENGTHS)
    alone = []
    for segment in segments:
        logits_TV = model(torch.tensor([segment.token_ids])).logits[0]
        alone.append(logits_TV[[p - 1 for p in segment.trained_positions]])
    alone_PV = torch.cat(alone)
    weighted_sum(alone_PV).backward()
    expected = gradients(model)

    forward = training_forward(model)
    assert forward.padded == (name in THROUGH_CACHE)
    row = PackedRow.of(segments)
    packed_PV = forward(row)
    weighted_sum(packed_PV).backward()
    actual = gradients(model)

    assert row.target_ids_P.tolist() == [s.token_ids[p] for s in segments for p in s.trained_positions]
    torch.testing.assert_close(packed_PV, alone_PV, atol=1e-5, rtol=0)
    assert actual.keys() == expected.keys()
    # The model's own attention takes its softmax in float32, so both agree to float32 rounding of the largest gradient.
    scale = max(gradient.abs().max().item() for gradient in expected.values())
    for parameter, gradient in expected.items():
        torch.testing.assert_close(actual[parameter], gradient, atol=1e-6 * scale, rtol=1e-6, msg=parameter)


def make_attempts() -> list[Segment]:
    """Two groups with a common system prompt, turns that attempts share, equal attempts, one that another one continues."""
    draw = torch.Generator().manual_seed(3)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, VOCABULARY, (count,), generator=draw).tolist())

    system, turn, reply = ids(9), ids(4), ids(3)
    attempts = []
    for prompt in (system + ids(5), system + ids(2)):
        for count in (11, 3, 6, 17, 1):
            end = len(prompt) + count
            attempts.append(Segment(token_ids=prompt + ids(count), sampled=((len(prompt), end),)))
        begin, again = len(prompt), len(prompt) + len(turn) + len(reply)
        for count in (6, 2, 9):
            sampled = ((begin, begin + len(turn)), (again, again + count))
            attempts.append(Segment(token_ids=prompt + turn + reply + ids(count), sampled=sampled, supervised=((3, 5),)))
        attempts += [attempts[-2], Segment(token_ids=attempts[0].token_ids[:begin], sampled=((begin - 2, begin),))]
    return [*attempts, Segment(token_ids=ids(14), sampled=((8, 14),))]


@pytest.mark.parametrize(("least", "block"), [(0.2, 256), (0.0, 30), (0.0, 0)])
@pytest.mark.parametrize("once", [False, True], ids=["parts", "one call"])
@pytest.mark.parametrize("name", FAMILIES)
def test_shared_prefixes_change_neither_logits_nor_gradients(
    name: str, once: bool, least: float, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in THROUGH_CACHE:
        pytest.skip("trained on padded batches")
    monkeypatch.setattr(packed, "_in_one_call", lambda _: once)
    monkeypatch.setattr(prefixes, "BLOCK", block)
    model, segments, found = make_model(name), make_attempts(), []
    forward = training_forward(model)
    for shared in (1.0, least):
        row = PackedRow.of(segments, least_shared=shared)
        logits_PV = forward(row)
        logits_PV = logits_PV if row.trained_index is None else logits_PV[row.trained_index]
        weighted_sum(logits_PV).backward()
        found.append({"logits": logits_PV.detach()} | gradients(model))
        assert (row.stops_T is not None) == (shared < 1.0)
    for parameter, expected in found[0].items():
        scale = expected.abs().max().item() or 1.0  # norms and routers compute in float32
        torch.testing.assert_close(found[1][parameter], expected, atol=1e-6 * scale, rtol=0, msg=parameter)


@pytest.mark.parametrize("name", ["llama", "mistral-window", "deepseek-v3-latents", "gemma2"])
def test_one_call_for_all_sequences_gives_the_logits_and_gradients_of_buckets(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: shared heads, a window, values narrower than keys; a soft cap, for which there is no such call."""
    segments, found = make_segments(LENGTHS), []
    for once in (False, True):
        monkeypatch.setattr(packed, "_in_one_call", lambda _, once=once: once)
        model, calls = make_model(name), []
        forward = training_forward(model)
        monkeypatch.setattr(packed, "attend", lambda *a, calls=calls, **o: calls.append(1) or attend(*a, **o))
        logits_PV = forward(PackedRow.of(segments))
        weighted_sum(logits_PV).backward()
        assert bool(calls) == (not once or name == "gemma2")
        found.append({"logits": logits_PV.detach()} | gradients(model))
    assert found[0].keys() == found[1].keys()
    for parameter, expected in found[0].items():
        torch.testing.assert_close(found[1][parameter], expected, atol=1e-9, rtol=1e-6, msg=parameter)


def test_an_auxiliary_loss_of_the_router_is_refused() -> None:
    model = make_model("gpt-oss-sinks")
    model.config.output_router_logits = True
    with pytest.raises(UnsupportedModelError, match=r"auxiliary loss of its router .* set it to false"):
        training_forward(model)


@pytest.mark.parametrize("name", ["gpt-oss-sinks", "deepseek-v3-latents"])
def test_rounding_in_bfloat16_may_change_the_experts_of_some_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake, which changes most tokens, is still found."""

    def mistaken(*arguments: Any, **options: Any) -> tuple[torch.Tensor, None]:
        return packed_attention(*arguments, **options)[0].flip(1), None

    assert not training_forward(make_model(name).bfloat16()).padded
    monkeypatch.setattr(packed, "packed_attention", mistaken)
    with pytest.raises(UnsupportedModelError, match="its logits differ"):
        use_packed_attention(make_model(name).bfloat16())


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40))
@settings(max_examples=60)
def test_buckets_cover_every_token_once_with_little_padding(lengths: list[int]) -> None:
    row = PackedRow.of([Segment(token_ids=tuple(range(n)), sampled=()) for n in lengths])
    assert sum(bucket.end - bucket.start for bucket in row.buckets) == sum(lengths)
    tokens_11T1 = row.token_ids_1T.double()[:, None, :, None]
    for bucket in row.buckets:
        cells = bucket.count * bucket.length
        assert cells - (bucket.end - bucket.start) <= MAX_PADDING_WASTE * cells
        batch = bucket.batch(tokens_11T1[0, :, bucket.start : bucket.end])
        assert (batch[:, 0, 0, 0] == 0).all(), "every row of the batch starts with a sequence's first token"
        assert torch.equal(bucket.tokens(batch)[:, 0, 0], tokens_11T1[0, 0, bucket.start : bucket.end, 0])


@pytest.mark.parametrize(
    "segments",
    [[], [Segment(token_ids=(), sampled=())], [Segment(token_ids=(1, 2), sampled=((0, 1),))]],
    ids=["none", "empty", "first token sampled"],
)
def test_impossible_segments_are_refused(segments: list[Segment]) -> None:
    with pytest.raises(ValueError, match="segment"):
        PackedRow.of(segments)


CHUNKED = {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2, "num_hidden_layers": 4, "pad_token_id": 0}
REFUSED: list[tuple[Any, str]] = [
    (Llama4TextConfig(**SIZES | CHUNKED, intermediate_size_mlp=32, attention_chunk_size=8), r"local mask \(8\)"),
    (CONFIGS["lfm2-conv"], "other states than keys and values"),
    (GPTNeoXConfig(**SIZES, attention_dropout=0.1, hidden_dropout=0.1), "dropout"),
]


@pytest.mark.parametrize(("config", "reason"), REFUSED)
def test_a_model_that_can_not_be_trained_packed_is_refused_with_the_reason(config: Any, reason: str) -> None:
    """The last one is in training mode."""
    with pytest.raises(UnsupportedModelError, match=reason):
        use_packed_attention(AutoModelForCausalLM.from_config(config).train("dropout" in reason))


def test_a_model_that_is_not_causal_is_refused() -> None:
    """Padding changes the logits of a model whose tokens see what comes after them."""
    config = BertConfig(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    with pytest.raises(UnsupportedModelError, match=r"trained on padded batches: its logits differ.*; and not packed"):
        training_forward(BertLMHeadModel(config).eval())


def test_an_error_of_the_models_own_code_refuses_it_by_its_first_line() -> None:
    model = make_model("bloom-alibi")
    model.transformer.h[0].mlp = nn.Linear(3, 3)
    with pytest.raises(UnsupportedModelError, match=r"can't be trained on padded batches \(TypeError: ") as caught:
        training_forward(model)
    assert "\n" not in str(caught.value)


def test_the_head_computes_only_the_logits_that_are_asked_for() -> None:
    model, segments = make_model("qwen3.5-delta-rule"), make_segments(LENGTHS)
    seen: list[int] = []
    model.get_output_embeddings().register_forward_hook(lambda _, inputs, __: seen.append(inputs[0][..., 0].numel()))
    row = PackedRow.of(segments)
    padded_logits(model, row)
    assert sum(seen) == len(row.target_ids_P)
    assert len(seen) == len(row.buckets)


def test_sequences_beyond_a_length_dependent_rope_are_refused() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = LlamaConfig(**(SIZES | {"max_position_embeddings": 16}), rope_parameters=rope)
    forward = training_forward(AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval())
    forward(PackedRow.of(make_segments((16, 4))))
    with pytest.raises(UnsupportedModelError, match="16 tokens"):
        forward(PackedRow.of(make_segments((17, 4))))
