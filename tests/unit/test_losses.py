"""Each loss against a slow reference written as its formula: loops over rollouts and tokens, float64, no autograd."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from pipelinerl.config.schema import TrainerConfig
from pipelinerl.trainer.losses import LossInputs, LossOutput, cispo, gspo, kl_penalty, make_loss, ppo, reinforce

CLAMP, LOW, HIGH = 1.5, 0.2, 0.3
LOSSES = ["reinforce", "ppo", "gspo", "cispo"]


def config(loss: str, **changes: object) -> TrainerConfig:
    return TrainerConfig(loss=loss, clamp=CLAMP, clip_low=LOW, clip_high=HIGH, **changes)


def make_inputs(lengths: list[int], seed: int = 0, spread: float = 0.4) -> LossInputs:
    """Rollouts of the given lengths with advantages of both signs, their tokens interleaved in random order."""
    rng = np.random.default_rng(seed)
    sequence = rng.permutation(np.repeat(np.arange(len(lengths)), lengths))
    behaviour = -rng.exponential(1.5, len(sequence)) - 0.01
    advantages = rng.normal(0, 1, len(lengths))[sequence]
    # A shift common to a rollout's tokens, so that whole-sequence ratios reach the limits too.
    log_ratio = rng.normal(0, spread, len(sequence)) + rng.normal(0, spread, len(lengths))[sequence]
    return LossInputs(
        logprobs_N=torch.tensor(behaviour + log_ratio, dtype=torch.float64, requires_grad=True),
        behaviour_logprobs_N=torch.tensor(behaviour, dtype=torch.float64),
        advantages_N=torch.tensor(advantages, dtype=torch.float64),
        sequence_N=torch.tensor(sequence),
        sequence_count=len(lengths),
        reference_logprobs_N=torch.tensor(behaviour - rng.normal(0, spread, len(sequence)), dtype=torch.float64),
    )


@dataclasses.dataclass
class Token:
    logprob: float
    behaviour: float
    advantage: float

    @property
    def ratio(self) -> float:
        return math.exp(self.logprob) / math.exp(self.behaviour)


def rollouts_of(inputs: LossInputs, logprobs: np.ndarray) -> list[list[tuple[int, Token]]]:
    """The tokens of each rollout with their places in the flat tensors."""
    rollouts: list[list[tuple[int, Token]]] = [[] for _ in range(inputs.sequence_count)]
    for place, sequence in enumerate(inputs.sequence_N.tolist()):
        token = Token(logprobs[place], inputs.behaviour_logprobs_N[place].item(), inputs.advantages_N[place].item())
        rollouts[sequence].append((place, token))
    return rollouts


def slow_surrogate(ratio: float, advantage: float) -> float:
    return -min(ratio * advantage, min(max(ratio, 1 - LOW), 1 + HIGH) * advantage)


def slow_terms(name: str, inputs: LossInputs, logprobs: np.ndarray, frozen: np.ndarray) -> np.ndarray:
    """Every token's term. `frozen` are the log-probs that a stopped gradient sees: equal to `logprobs`, but not varied."""
    terms = np.zeros(len(logprobs))
    constant = rollouts_of(inputs, frozen)
    for i, rollout in enumerate(rollouts_of(inputs, logprobs)):
        for t, (place, token) in enumerate(rollout):
            fixed = constant[i][t][1]
            if name == "reinforce":
                terms[place] = -min(CLAMP, fixed.ratio) * token.advantage * token.logprob
            elif name == "cispo":
                terms[place] = -min(max(fixed.ratio, 1 - LOW), 1 + HIGH) * token.advantage * token.logprob
            elif name == "ppo":
                terms[place] = slow_surrogate(token.ratio, token.advantage)
            elif name == "gspo":
                likelihood_ratio = math.prod(other.ratio for _, other in rollout)
                terms[place] = slow_surrogate(likelihood_ratio ** (1 / len(rollout)), token.advantage)
    return terms


def slow_gradient(name: str, inputs: LossInputs, step: float = 1e-6) -> np.ndarray:
    """d(sum of terms) / d(log-probs) by central differences."""
    at = inputs.logprobs_N.detach().numpy()
    gradient = np.zeros(len(at))
    for place in range(len(at)):
        sums = []
        for sign in (1, -1):
            moved = at.copy()
            moved[place] += sign * step
            sums.append(slow_terms(name, inputs, moved, at).sum())
        gradient[place] = (sums[0] - sums[1]) / (2 * step)
    return gradient


def gradient_of(loss: Callable[[LossInputs], LossOutput], inputs: LossInputs) -> torch.Tensor:
    (gradient_N,) = torch.autograd.grad(loss(inputs).loss_N.sum(), inputs.logprobs_N)
    return gradient_N


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", range(5))
def test_terms_and_gradient_equal_the_slow_reference(name: str, seed: int) -> None:
    inputs = make_inputs([1, 2, 7, 4, 12, 3, 3, 1], seed)
    output = make_loss(config(name))(inputs)
    at = inputs.logprobs_N.detach().numpy()
    np.testing.assert_allclose(output.loss_N.detach().numpy(), slow_terms(name, inputs, at, at), rtol=1e-12, atol=1e-14)
    gradient_N = gradient_of(make_loss(config(name)), inputs).numpy()
    np.testing.assert_allclose(gradient_N, slow_gradient(name, inputs), rtol=1e-6, atol=1e-8)
    assert not output.weight_N.requires_grad


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", range(5))
def test_the_data_of_the_comparison_reach_the_limits(name: str, seed: int) -> None:
    """Guards the test above: with data that never clip it would prove little."""
    clipped_N = make_loss(config(name))(make_inputs([1, 2, 7, 4, 12, 3, 3, 1], seed)).clipped_N
    assert 1 <= clipped_N.sum() < len(clipped_N)


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_every_loss_has_the_gradient_of_plain_reinforce(name: str) -> None:
    inputs = make_inputs([3, 1, 8], spread=0.0)
    output = make_loss(config(name))(inputs)
    torch.testing.assert_close(gradient_of(make_loss(config(name)), inputs), -inputs.advantages_N)
    assert not output.clipped_N.any()
    torch.testing.assert_close(output.weight_N, torch.ones_like(output.weight_N))


@pytest.mark.parametrize("name", LOSSES)
def test_a_step_does_not_depend_on_how_rollouts_are_split_over_micro_batches(name: str) -> None:
    whole = make_inputs([5, 2, 9, 1])
    loss = make_loss(config(name, kl_coefficient=0.3))
    expected_N = gradient_of(loss, whole)
    for rollouts in ([0, 2], [3], [1]):
        mine_N = torch.isin(whole.sequence_N, torch.tensor(rollouts))
        renumbered = torch.zeros(4, dtype=torch.long)
        renumbered[rollouts] = torch.arange(len(rollouts))
        part = LossInputs(
            logprobs_N=whole.logprobs_N[mine_N].detach().requires_grad_(),
            behaviour_logprobs_N=whole.behaviour_logprobs_N[mine_N],
            advantages_N=whole.advantages_N[mine_N],
            sequence_N=renumbered[whole.sequence_N[mine_N]],
            sequence_count=len(rollouts),
            reference_logprobs_N=whole.reference_logprobs_N[mine_N],
        )
        torch.testing.assert_close(gradient_of(loss, part), expected_N[mine_N])


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("log_ratio", [50.0, -50.0, 1000.0, -1000.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_extreme_ratios_stay_finite(name: str, log_ratio: float, advantage: float) -> None:
    logprobs_N = torch.tensor([-1000.0, -1.0], requires_grad=True)
    inputs = LossInputs(
        logprobs_N=logprobs_N,
        behaviour_logprobs_N=torch.tensor([-1000.0 - log_ratio, -1.0]),
        advantages_N=torch.full((2,), advantage),
        sequence_N=torch.tensor([0, 1]),
        sequence_count=2,
        reference_logprobs_N=torch.tensor([-1000.0 + log_ratio, -1.0]),
    )
    loss = make_loss(config(name, kl_coefficient=0.1))
    output = loss(inputs)
    gradient_N = gradient_of(loss, inputs)
    for tensor_N in (output.loss_N, output.weight_N, gradient_N):
        assert tensor_N.isfinite().all()
    # The other rollout of the micro-batch is not touched: on-policy, and equal to the reference.
    assert gradient_N[1].item() == pytest.approx(-advantage)


def token_inputs(ratios: list[float], advantages: list[float]) -> LossInputs:
    behaviour_N = torch.full((len(ratios),), -2.0, dtype=torch.float64)
    return LossInputs(
        logprobs_N=(behaviour_N + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_(),
        behaviour_logprobs_N=behaviour_N,
        advantages_N=torch.tensor(advantages, dtype=torch.float64),
        sequence_N=torch.arange(len(ratios)),
        sequence_count=len(ratios),
    )


def test_what_counts_as_clipped_and_what_keeps_a_gradient() -> None:
    ratios, advantages = [2.0, 2.0, 0.5, 0.5, 1.1, 2.0], [1.0, -1.0, 1.0, -1.0, 1.0, 0.0]
    inputs = token_inputs(ratios, advantages)

    clamped = reinforce(inputs, clamp=1.5)
    assert clamped.clipped_N.tolist() == [True, True, False, False, False, True]
    assert clamped.weight_N.tolist() == pytest.approx([1.5, 1.5, 0.5, 0.5, 1.1, 1.5])

    for surrogate in (ppo, gspo):  # one token per rollout: the two are the same
        output = surrogate(inputs, clip_low=0.2, clip_high=0.3)
        assert output.clipped_N.tolist() == [True, False, False, True, False, False]
        assert output.weight_N.tolist() == pytest.approx([1.3, 2.0, 0.5, 0.8, 1.1, 2.0])
        (gradient_N,) = torch.autograd.grad(output.loss_N.sum(), inputs.logprobs_N)
        assert gradient_N.tolist() == pytest.approx([0.0, 2.0, -0.5, 0.0, -1.1, 0.0])

    bounded = cispo(inputs, clip_low=0.2, clip_high=0.3)
    assert bounded.clipped_N.tolist() == [True, True, True, True, False, True]
    (gradient_N,) = torch.autograd.grad(bounded.loss_N.sum(), inputs.logprobs_N)
    assert gradient_N.tolist() == pytest.approx([-1.3, 1.3, -0.8, 0.8, -1.1, 0.0])


def test_gspo_terms_of_a_rollout_sum_to_its_length_times_the_sequence_objective() -> None:
    inputs = make_inputs([6], seed=3, spread=0.05)
    output = gspo(inputs, clip_low=LOW, clip_high=HIGH)
    s = math.exp(inputs.log_ratio_N.mean().item())
    assert output.loss_N.sum().item() == pytest.approx(6 * slow_surrogate(s, inputs.advantages_N[0].item()))
    assert output.weight_N.tolist() == pytest.approx([s] * 6)


def test_gspo_accepts_a_rollout_without_tokens() -> None:
    inputs = dataclasses.replace(token_inputs([1.1], [1.0]), sequence_N=torch.tensor([2]), sequence_count=4)
    assert gspo(inputs, clip_low=0.2, clip_high=0.2).weight_N.tolist() == pytest.approx([1.1])


def test_no_tokens_give_no_terms() -> None:
    for name in LOSSES:
        output = make_loss(config(name))(make_inputs([]))
        assert output.loss_N.shape == output.weight_N.shape == output.clipped_N.shape == (0,)


def test_kl_penalty_is_k3_and_estimates_the_divergence() -> None:
    rng = np.random.default_rng(0)
    policy, reference = rng.dirichlet(np.ones(50)), rng.dirichlet(np.ones(50))
    terms = kl_penalty(torch.tensor(policy).log(), torch.tensor(reference).log()).numpy()
    for term, pi, ref in zip(terms, policy, reference, strict=True):
        assert term == pytest.approx(ref / pi - 1 - math.log(ref / pi))
    assert (terms >= 0).all()
    # In expectation over pi it is the divergence itself.
    assert (policy * terms).sum() == pytest.approx((policy * np.log(policy / reference)).sum())


def test_gradient_of_the_kl_penalty_in_expectation_is_that_of_the_other_divergence() -> None:
    """What the docstring claims: over tokens from pi, it is the gradient of KL(reference || pi)."""
    rng = np.random.default_rng(1)
    logits_V = torch.tensor(rng.normal(size=20), requires_grad=True)
    reference_V = torch.tensor(rng.dirichlet(np.ones(20)))
    policy_V = logits_V.softmax(0)
    expected = (policy_V.detach() * kl_penalty(policy_V.log(), reference_V.log())).sum()
    (penalty_gradient_V,) = torch.autograd.grad(expected, logits_V, retain_graph=True)
    divergence = (reference_V * (reference_V.log() - policy_V.log())).sum()
    (divergence_gradient_V,) = torch.autograd.grad(divergence, logits_V)
    torch.testing.assert_close(penalty_gradient_V, divergence_gradient_V)


def test_kl_penalty_gradient_against_finite_differences() -> None:
    inputs = make_inputs([4, 5])
    (gradient_N,) = torch.autograd.grad(kl_penalty(inputs.logprobs_N, inputs.reference_logprobs_N).sum(), inputs.logprobs_N)
    h = 1e-6
    for place in range(9):
        reference = inputs.reference_logprobs_N[place].item()
        up, down = (reference - inputs.logprobs_N[place].item() - sign * h for sign in (1, -1))
        slope = ((math.exp(up) - 1 - up) - (math.exp(down) - 1 - down)) / (2 * h)
        assert gradient_N[place].item() == pytest.approx(slope, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("name", LOSSES)
def test_the_kl_penalty_is_added_with_its_coefficient(name: str) -> None:
    inputs = make_inputs([4, 5])
    without, with_penalty = make_loss(config(name))(inputs), make_loss(config(name, kl_coefficient=0.25))(inputs)
    assert without.kl_N is None
    expected_N = kl_penalty(inputs.logprobs_N, inputs.reference_logprobs_N)
    torch.testing.assert_close(with_penalty.kl_N, expected_N.detach())
    torch.testing.assert_close(with_penalty.loss_N, without.loss_N + 0.25 * expected_N)


def test_a_kl_penalty_without_reference_logprobs_is_refused() -> None:
    inputs = dataclasses.replace(make_inputs([4]), reference_logprobs_N=None)
    with pytest.raises(ValueError, match="reference log-probabilities"):
        make_loss(config("ppo", kl_coefficient=0.1))(inputs)


def test_tensors_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="same shape"):
        dataclasses.replace(make_inputs([4]), advantages_N=torch.zeros(3))
