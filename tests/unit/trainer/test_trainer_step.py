"""One optimizer step: the same whatever the micro-batches, refused when off-policy, and never on broken numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from pipelinerl.config.schema import CorrectionConfig, TrainerConfig
from pipelinerl.errors import CheckpointError, TrainingDivergedError
from pipelinerl.trainer.logprobs import FrozenModelScorer, token_logprobs
from pipelinerl.trainer.losses import DEFAULT_CORRECTION
from pipelinerl.trainer.step import Learner
from pipelinerl.types import Segment, TrainingSample
from tests.parity.models import tiny_llama

TEMPERATURE = 0.8


def make_model(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: object) -> PreTrainedModel:
    sizes = {"vocab_size": 23, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes["num_key_value_heads"] = 2
    return tiny_llama(seed, **sizes, initializer_range=0.2, tie_word_embeddings=True, **changes).to(dtype)


def own_logprobs(model: PreTrainedModel, segments: Sequence[Segment]) -> torch.Tensor:
    """The slow way: each segment alone, through the model's own attention."""
    logprobs = []
    for segment in segments:
        logits_TV = model(torch.tensor([segment.token_ids])).logits[0].float() / TEMPERATURE
        logprobs += [logits_TV[p - 1].log_softmax(-1)[segment.token_ids[p]] for p in segment.sampled_positions]
    return torch.stack(logprobs)


def make_samples(
    model: PreTrainedModel, count: int = 12, noise: float = 0.2, version: int = 3, prompt: int = 0
) -> list[TrainingSample]:
    """Ragged samples, some of several turns or segments, one in four without advantage, behaviour a bit off `model`.

    The segments of a group begin with the same `prompt` tokens.
    """
    generator = torch.Generator().manual_seed(5)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    samples = []
    for i in range(count):
        segments = []
        for _ in range(1 + (i % 5 == 0)):
            n = integer(6, 40)
            ids = tuple((7 * t + i // 4) % 23 for t in range(prompt)) + tuple(integer(0, 23) for _ in range(n))
            ranges = ((2, 4), (5, n)) if i % 3 == 0 else ((3, n),)
            segments.append(Segment(token_ids=ids, sampled=tuple((prompt + a, prompt + b) for a, b in ranges)))
        with torch.no_grad():
            logprobs_P = own_logprobs(model, segments)
        behaviour_P = logprobs_P + noise * torch.randn(len(logprobs_P), generator=generator)
        samples.append(
            TrainingSample(
                id=f"{i}",
                group_index=i // 4,
                segments=tuple(segments),
                behaviour_logprobs=tuple(behaviour_P.tolist()),
                versions=tuple(version - min(version, t % 3) for t in range(len(logprobs_P))),
                advantage=0.0 if i % 4 == 3 else (-1.0) ** i * (0.3 + 0.1 * i),
                reward=float(i % 2),
            )
        )
    return samples


def learner(
    model: PreTrainedModel, correction: CorrectionConfig = DEFAULT_CORRECTION, *, skip: bool = True, **changes: object
) -> Learner:
    config = TrainerConfig(**({"learning_rate": 1e-3, "max_grad_norm": 1e9} | changes))
    return Learner(model, config, temperature=TEMPERATURE, correction=correction, skip_zero_advantage=skip)


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def weights(model: PreTrainedModel) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def reinforce_gradients(
    model: PreTrainedModel, samples: Sequence[TrainingSample], normalizer: float
) -> dict[str, torch.Tensor]:
    """The objective as it is written down, one sequence at a time."""
    model.zero_grad()
    for sample in samples:
        logprobs_N = own_logprobs(model, sample.segments)
        ratio_N = (logprobs_N.detach() - torch.tensor(sample.behaviour_logprobs)).exp()
        (-(ratio_N.clamp(max=5.0) * sample.advantage * logprobs_N).sum() / normalizer).backward()
    found = gradients(model)
    model.zero_grad()
    return found


@pytest.mark.parametrize("budget", [1, 77, *(pytest.param(budget, marks=pytest.mark.slow) for budget in (30, 10_000))])
@pytest.mark.parametrize("normalization", ["sequences", "tokens"])
def test_a_step_equals_the_sum_over_single_sequences_for_any_micro_batch(budget: int, normalization: str) -> None:
    model = make_model()
    samples = make_samples(model)
    normalizer = len(samples) if normalization == "sequences" else sum(s.sampled_count for s in samples)
    expected = reinforce_gradients(model, samples, normalizer)
    result = learner(model, micro_batch_tokens=budget, loss_normalization=normalization).step(samples, version=3)
    assert result.stepped
    assert result.samples_skipped == 3
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-5 * gradient.abs().max().item(), rtol=1e-5, msg=name)


@pytest.mark.parametrize("changes", [{}, {"head_chunk": 5}, {"gradient_checkpointing": True}])
@pytest.mark.parametrize("budget", [130, 10_000])
def test_a_prompt_that_samples_share_goes_through_the_model_once_and_changes_nothing(
    budget: int, changes: dict[str, object]
) -> None:
    """Two attempts are equal: their sampled tokens are shared, too, with different advantages."""
    model = make_model()
    samples = make_samples(model, prompt=30)
    samples.append(msgspec.structs.replace(samples[1], id="equal", advantage=0.7))
    expected = reinforce_gradients(model, samples, sum(s.sampled_count for s in samples))
    taught = learner(model, micro_batch_tokens=budget, **changes)
    result = taught.step(samples, version=3)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-5 * gradient.abs().max().item(), rtol=1e-5, msg=name)
    used = [sample for sample in samples if sample.advantage]
    assert result.tokens_trained == sum(sample.sampled_count for sample in used)
    assert result.tokens_context == sum(sample.length for sample in used) - result.tokens_trained
    assert result.packing_efficiency is not None
    assert 0.5 < result.packing_efficiency <= 1.0
    separate = learner(make_model(), micro_batch_tokens=budget)
    separate._least_shared = 1.0
    alone = separate.step(samples, version=3)
    assert alone.loss == pytest.approx(result.loss, rel=1e-5)
    assert alone.tokens_forwarded == alone.tokens_context + alone.tokens_trained
    assert result.tokens_forwarded < alone.tokens_forwarded - 29 * (len(used) // 2)
    assert result.micro_batches <= alone.micro_batches


def credit_by_token(samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    """The samples with an advantage for each token, and with supervised tokens where the others have context."""
    generator = torch.Generator().manual_seed(9)
    found = []
    for number, sample in enumerate(samples):
        credit = tuple(torch.randn(sample.sampled_count, generator=generator).tolist()) if number % 2 else sample.advantage
        segments = [
            msgspec.structs.replace(one, supervised=((1, 2), *((a, b) for a, b in [(4, 5)] if number % 3 == 0)))
            for one in sample.segments
        ]
        changes = {"advantage": credit, "segments": tuple(segments), "supervised_weight": 0.1 * number}
        found.append(msgspec.structs.replace(sample, **changes))
    return found


@pytest.mark.parametrize(("budget", "head_chunk", "prompt"), [(1, 0, 0), (77, 0, 0), (77, 5, 0), (200, 5, 25)])
def test_tokens_with_own_advantages_and_given_tokens_have_the_gradient_of_their_formula(
    budget: int, head_chunk: int, prompt: int
) -> None:
    model = make_model()
    samples = credit_by_token(make_samples(model, prompt=prompt))
    normalizer = sum(sample.sampled_count for sample in samples)
    for sample in samples:
        logprobs_N = own_logprobs(model, sample.segments)
        credit_N = torch.tensor(sample.advantage).expand(len(logprobs_N))
        ratio_N = (logprobs_N.detach() - torch.tensor(sample.behaviour_logprobs)).exp()
        given = [msgspec.structs.replace(one, sampled=one.supervised) for one in sample.segments]
        loss = -(ratio_N.clamp(max=5.0) * credit_N * logprobs_N).sum()
        ((loss - sample.supervised_weight * own_logprobs(model, given).sum()) / normalizer).backward()
    expected = gradients(model)
    model.zero_grad()
    result = learner(model, micro_batch_tokens=budget, head_chunk=head_chunk).step(samples, version=3)
    assert result.samples_skipped == 0  # the one without credit has given tokens with a weight
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-5 * gradient.abs().max().item(), rtol=1e-5, msg=name)


@pytest.mark.parametrize(
    "changes",
    [{}, {"kl_coefficient": 0.1}, {"kl_coefficient": 0.1, "kl_estimator": "k1"}, {"loss": "gspo"}, {"loss": "decoupled"}],
)
def test_a_step_on_given_tokens_alone_is_cross_entropy(changes: dict[str, object]) -> None:
    model = make_model()
    ids = [(1, 5, 9, 2, 7, 7), (3, 3, 8)]
    samples = [
        TrainingSample(
            id=str(number),
            group_index=number,
            segments=(Segment(token_ids=one, sampled=(), supervised=((2, len(one)),)),),
            behaviour_logprobs=(),
            versions=(),
            advantage=0.0,
            reward=0.0,
        )
        for number, one in enumerate(ids)
    ]
    given = [Segment(token_ids=one, sampled=((2, len(one)),)) for one in ids]
    expected = -own_logprobs(model, given).mean()
    result = learner(model, **changes).step(samples, version=0)
    assert result.loss == pytest.approx(expected.item(), rel=1e-6)
    assert (result.tokens_trained, result.tokens_context, result.metrics) == (5, 4, None)
    assert result.stepped


def test_recomputing_activations_changes_nothing_and_drops_nothing_out() -> None:
    plain, recomputing = make_model(), make_model(attention_dropout=0.5)
    samples = make_samples(plain)
    learner(plain).step(samples, version=3)
    learner(recomputing, gradient_checkpointing=True).step(samples, version=3)
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradient, gradients(recomputing)[name], atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "correction"),
    [
        ("reinforce", CorrectionConfig()),
        ("reinforce", CorrectionConfig(sequence="truncate", sequence_high=1.1)),
        ("reinforce", CorrectionConfig(token="none", sequence="geo_mask", sequence_low=0.97, sequence_high=1.03)),
        ("reinforce", CorrectionConfig(token="tv", token_low=0.01, token_high=0.01, drift=0.1)),
        ("ppo", CorrectionConfig()),
        ("gspo", CorrectionConfig()),
        ("cispo", CorrectionConfig()),
        ("decoupled", CorrectionConfig()),
    ],
)
def test_metrics_and_weights_do_not_depend_on_micro_batches(loss: str, correction: CorrectionConfig) -> None:
    results, models = [], []
    for budget in (1, 50, 10_000):
        model = make_model()
        samples = make_samples(model)
        results.append(learner(model, correction, micro_batch_tokens=budget, loss=loss).step(samples, version=3))
        models.append(weights(model))
    assert [r.micro_batches for r in results] == sorted((r.micro_batches for r in results), reverse=True)
    for result, other in zip(results[1:], models[1:], strict=True):
        for a, b in zip(models[0], other, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
        assert result.metrics is not None
        assert results[0].metrics is not None
        fractions = ("masked_fraction", "truncated_fraction")
        for field in ("ess", "kl_behaviour_policy", "entropy_mean", "weight_max", "lag_mean", *fractions):
            assert result.metrics[field] == pytest.approx(results[0].metrics[field], abs=1e-5), field
        assert result.loss == pytest.approx(results[0].loss, abs=1e-5)


def test_skipping_rollouts_without_advantage_changes_nothing() -> None:
    """A step that has no others still moves by its momentum."""
    results = []
    for skip in (True, False):
        model = make_model()
        samples = make_samples(model)
        taught = learner(model, skip=skip)
        first = taught.step(samples, version=3)
        before = weights(model)
        last = taught.step([msgspec.structs.replace(sample, advantage=0.0) for sample in samples], version=4)
        assert (first.samples_skipped, last.samples_skipped) == ((3, 12) if skip else (0, 0))
        assert last.stepped
        assert (last.metrics is None) == skip
        assert not torch.equal(before[0], weights(model)[0])
        results.append(before + weights(model))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_with_a_penalty_rollouts_without_advantage_count() -> None:
    model = make_model()
    samples = make_samples(model, count=4)
    scorer = FrozenModelScorer(make_model(seed=1), temperature=TEMPERATURE, micro_batch_tokens=50)
    scored = [
        msgspec.structs.replace(
            sample, advantage=0.0, reference_logprobs=tuple(lp for part in scorer.score(sample.segments) for lp in part)
        )
        for sample in samples
    ]
    for penalized in (learner(model, kl_coefficient=0.1), learner(model, CorrectionConfig(drift=0.1))):
        result = penalized.step(scored, version=3)
        assert result.samples_skipped == 0
        assert result.grad_norm is not None
        assert result.grad_norm > 0


@pytest.mark.parametrize(("budget", "prompt"), [(1, 0), (60, 0), (1000, 0), (150, 30), (1000, 30)])
def test_reference_scores_are_those_of_each_segment_alone(budget: int, prompt: int) -> None:
    model = make_model(seed=2)
    samples = make_samples(model, noise=0.0, prompt=prompt)
    scorer = FrozenModelScorer(model, temperature=TEMPERATURE, micro_batch_tokens=budget)
    scores = scorer.score([segment for sample in samples for segment in sample.segments])
    flat = [lp for part in scores for lp in part]
    assert flat == pytest.approx([lp for sample in samples for lp in sample.behaviour_logprobs], abs=1e-4)
    assert [len(part) for part in scores] == [len(s.sampled_positions) for sample in samples for s in sample.segments]


def test_the_ess_guard_refuses_a_batch_and_leaves_no_trace() -> None:
    guarded, plain = make_model(), make_model()
    far, near = make_samples(guarded, noise=3.0), make_samples(guarded, noise=0.01)
    before = weights(guarded)
    taught = learner(guarded, ess_threshold=0.5)
    refused = taught.step(far, version=3)
    assert not refused.stepped
    assert refused.metrics is not None
    assert refused.metrics["ess"] < 0.5
    assert refused.grad_norm is None
    for a, b in zip(before, weights(guarded), strict=True):
        assert torch.equal(a, b)
    assert taught.step(near, version=3).stepped
    learner(plain, ess_threshold=0.5).step(near, version=3)
    for a, b in zip(weights(guarded), weights(plain), strict=True):
        assert torch.equal(a, b), "the refused batch's gradient must not leak into the next step"


@pytest.mark.parametrize("what", ["weights", "behaviour", "advantage"])
def test_broken_numbers_stop_training_and_leave_the_weights_alone(what: str) -> None:
    model = make_model()
    samples = make_samples(model)
    taught = learner(model)
    if what == "weights":
        next(model.parameters()).data[:, 0] = math.nan
    elif what == "behaviour":
        sample = samples[0]
        samples[0] = msgspec.structs.replace(sample, behaviour_logprobs=(-math.inf, *sample.behaviour_logprobs[1:]))
    else:
        samples[0] = msgspec.structs.replace(samples[0], advantage=math.inf)
    before = weights(model)
    with pytest.raises(TrainingDivergedError):
        taught.step(samples, version=3)
    for a, b in zip(before, weights(model), strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


def test_weights_that_overflow_stop_training() -> None:
    model = make_model()
    samples = make_samples(model)
    taught = learner(model, learning_rate=3e38, weight_decay=10.0)
    with pytest.raises(TrainingDivergedError, match=r"weights are not finite after a step with learning rate 3e\+38"):
        taught.step(samples, version=3)


def test_gradients_are_clipped_to_the_norm_and_the_rate_follows_the_schedule() -> None:
    model = make_model()
    samples = make_samples(model)
    taught = learner(model, max_grad_norm=1e-3, warmup_steps=4, steps=10)
    results = [taught.step(samples, version=version) for version in range(2)]
    assert [result.learning_rate for result in results] == pytest.approx([2e-4, 4e-4])
    assert results[-1].grad_norm is not None
    assert results[-1].grad_norm > 1e-3
    clipped = math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters()))
    assert clipped == pytest.approx(1e-3, rel=1e-3)


def test_the_learning_rate_is_scaled_by_the_root_of_the_effective_sample_size() -> None:
    plain, scaled, slower = make_model(), make_model(), make_model()
    samples = make_samples(plain)
    full = learner(plain).step(samples, version=3)
    assert full.metrics is not None
    assert full.metrics["ess"] < 0.999
    result = learner(scaled, ess_lr="sqrt").step(samples, version=3)
    assert result.learning_rate == pytest.approx(1e-3 * math.sqrt(full.metrics["ess"]), rel=1e-12)
    # The rate that is recorded is the rate of the step.
    learner(slower, learning_rate=result.learning_rate).step(samples, version=3)
    for a, b in zip(weights(scaled), weights(slower), strict=True):
        assert torch.equal(a, b)


def test_an_optimizer_state_of_another_model_is_refused() -> None:
    model = make_model()
    samples = make_samples(model)
    taught = learner(model)
    taught.step(samples, version=0)
    state = taught.optimizer.state()
    del state["model.norm.weight.exp_avg"]
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        learner(make_model()).optimizer.load_state(state)


def test_low_precision_weights_learn_from_steps_below_their_rounding() -> None:
    model = make_model(dtype=torch.bfloat16)
    samples = make_samples(make_model())
    taught = learner(model, learning_rate=1e-5)
    before = weights(model)
    for version in range(15):
        taught.step(samples, version=version)
    masters = {name: t for name, t in taught.optimizer.state().items() if name.endswith(".master")}
    assert {t.dtype for t in masters.values()} == {torch.float32}
    norm_before, norm_after = before[-1].float(), masters["model.norm.weight.master"]
    assert (norm_before - norm_after).abs().max() > 1e-4, "bfloat16 around 1 can't move by 1e-5 a step"
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, masters[f"{name}.master"].bfloat16())


@given(
    positions=st.integers(1, 9),
    vocabulary=st.integers(1, 40),
    temperature=st.floats(0.3, 3),
    chunk=st.sampled_from([1, 64, 1 << 22]),
)
@settings(max_examples=40)
def test_logprobs_entropy_and_gradient_equal_plain_torch(
    positions: int, vocabulary: int, temperature: float, chunk: int
) -> None:
    generator = torch.Generator().manual_seed(positions * 100 + vocabulary)
    logits_PV = (5 * torch.randn(positions, vocabulary, generator=generator, dtype=torch.float64)).requires_grad_()
    ids_P = torch.randint(0, vocabulary, (positions,), generator=generator)
    slope_P = torch.randn(positions, generator=generator, dtype=torch.float64)
    log_p_PV = (logits_PV / temperature).log_softmax(-1)
    expected_P = log_p_PV.gather(-1, ids_P[:, None])[:, 0]
    (expected,) = torch.autograd.grad((expected_P * slope_P).sum(), logits_PV)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipelinerl.trainer.logprobs.CHUNK_ELEMENTS", chunk)
        actual_P, entropy_P = token_logprobs(logits_PV * 1.0, ids_P, temperature)
        (actual,) = torch.autograd.grad((actual_P * slope_P).sum(), logits_PV)
    torch.testing.assert_close(actual_P, expected_P)
    torch.testing.assert_close(entropy_P, -(log_p_PV.exp() * log_p_PV).sum(-1).detach())
    torch.testing.assert_close(actual, expected)


def test_the_cosine_of_successive_gradients() -> None:
    model = make_model()
    samples, before = make_samples(model), None
    training = learner(model, gradient_cosine=True)
    for version in range(3, 6):
        result = training.step(samples[version:], version=version)
        now = torch.cat([gradient.flatten() for gradient in gradients(model).values()])
        if before is None:
            assert result.gradient_cosine is None
        else:  # clipping scales a gradient, and leaves its direction
            expected = torch.nn.functional.cosine_similarity(before, now, dim=0)
            assert result.gradient_cosine == pytest.approx(expected.item(), abs=1e-5)
        before = now
    training.reset_optimizer()
    assert training.optimizer.state() == {}
    assert training.step(samples, version=6).gradient_cosine is None
    assert learner(make_model()).step(samples, version=3).gradient_cosine is None
