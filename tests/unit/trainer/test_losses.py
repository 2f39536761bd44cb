"""Each objective and correction against a slow reference written as its formula: loops over rollouts and tokens, float64."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from pipelinerl.config.schema import CorrectionConfig, TrainerConfig
from pipelinerl.errors import EnvironmentSetupError, UserError
from pipelinerl.trainer.losses import Loss, LossInputs, LossOutput, kl_penalty, make_loss, try_loss

LOW, HIGH, DUAL = 0.2, 0.3, 1.4

RECIPES: dict[str, tuple[str, CorrectionConfig]] = {
    "reinforce": ("reinforce", CorrectionConfig(token_high=1.5)),
    "weighted": ("reinforce", CorrectionConfig(token="none")),
    "mask": ("reinforce", CorrectionConfig(token="mask", token_high=1.3)),
    "band": ("reinforce", CorrectionConfig(token="band", token_low=0.7, token_high=1.3)),
    "tv": ("reinforce", CorrectionConfig(token="tv", token_low=0.04, token_high=0.06)),
    "tv, drift": ("reinforce", CorrectionConfig(token="tv", token_low=0.04, token_high=0.06, drift=0.2)),
    "sequence truncate": ("reinforce", CorrectionConfig(sequence="truncate", sequence_high=1.2)),
    "geo_truncate": ("reinforce", CorrectionConfig(sequence="geo_truncate", sequence_high=1.05)),
    "decoupled, geo_truncate": ("decoupled", CorrectionConfig(sequence="geo_truncate", sequence_high=1.05)),
    "sequence truncate, mask": ("reinforce", CorrectionConfig(token="mask", sequence="truncate", sequence_high=1.2)),
    "geo mask": ("reinforce", CorrectionConfig(token_high=1.5, sequence="geo_mask", sequence_low=0.8, sequence_high=1.2)),
    "ppo": ("ppo", CorrectionConfig()),
    "ppo, band": ("ppo", CorrectionConfig(token="band", token_low=0.5, token_high=1.25, drift=0.1)),
    "gspo": ("gspo", CorrectionConfig()),
    "gspo, geo mask": ("gspo", CorrectionConfig(sequence="geo_mask", sequence_low=0.8, sequence_high=1.2)),
    "cispo": ("cispo", CorrectionConfig()),
    "decoupled": ("decoupled", CorrectionConfig(token_high=1.2)),
    "decoupled, tv": ("decoupled", CorrectionConfig(token="tv", token_low=0.04, token_high=0.06)),
    "decoupled, sequence truncate": ("decoupled", CorrectionConfig(sequence="truncate", sequence_high=1.1)),
}


def config(loss: str, **changes: object) -> TrainerConfig:
    return TrainerConfig(loss=loss, **({"clip_low": LOW, "clip_high": HIGH, "dual_clip": DUAL} | changes))


def loss_of(recipe: str, **changes: object) -> Loss:
    loss, correction = RECIPES[recipe]
    return make_loss(config(loss, **changes), correction)


def make_inputs(lengths: list[int], seed: int = 0, spread: float = 0.4) -> LossInputs:
    """Rollouts of the given lengths with advantages of both signs, their tokens interleaved in random order."""
    rng = np.random.default_rng(seed)
    sequence = rng.permutation(np.repeat(np.arange(len(lengths)), lengths))
    behaviour = -rng.exponential(1.5, len(sequence)) - 0.01
    advantages = rng.normal(0, 1, len(lengths))[sequence]
    # A shift common to a rollout's tokens, so that whole-sequence ratios reach the limits too.
    log_ratio = rng.normal(0, spread, len(sequence)) + rng.normal(0, spread, len(lengths))[sequence]
    reference = behaviour - rng.normal(0, spread, len(sequence))
    return LossInputs(
        logprobs_N=torch.tensor(behaviour + log_ratio, dtype=torch.float64, requires_grad=True),
        behaviour_logprobs_N=torch.tensor(behaviour, dtype=torch.float64),
        advantages_N=torch.tensor(advantages, dtype=torch.float64),
        lags_N=torch.tensor(rng.integers(0, 5, len(sequence))),
        sequence_N=torch.tensor(sequence),
        sequence_count=len(lengths),
        reference_logprobs_N=torch.tensor(reference, dtype=torch.float64),
    )


@dataclasses.dataclass
class Token:
    logprob: float
    behaviour: float
    advantage: float
    lag: int

    @property
    def ratio(self) -> float:
        return math.exp(self.logprob) / math.exp(self.behaviour)

    @property
    def prox(self) -> float:
        """The probability under the proximal policy: a geometric mean of mu and pi."""
        alpha = 1.0 if self.lag == 0 else 1 / self.lag
        return math.exp(self.behaviour) ** alpha * math.exp(self.logprob) ** (1 - alpha)


def rollouts_of(inputs: LossInputs, logprobs: np.ndarray) -> list[list[tuple[int, Token]]]:
    """The tokens of each rollout with their places in the flat tensors."""
    rollouts: list[list[tuple[int, Token]]] = [[] for _ in range(inputs.sequence_count)]
    columns = (inputs.behaviour_logprobs_N, inputs.advantages_N, inputs.lags_N)
    for place, sequence in enumerate(inputs.sequence_N.tolist()):
        token = Token(logprobs[place], *(column[place].item() for column in columns))
        rollouts[sequence].append((place, token))
    return rollouts


def slow_surrogate(ratio: float, advantage: float, dual: float | None = None) -> float:
    objective = min(ratio * advantage, min(max(ratio, 1 - LOW), 1 + HIGH) * advantage)
    if dual is not None and advantage < 0:
        objective = max(objective, dual * advantage)
    return -objective


def slow_kept(correction: CorrectionConfig, token: Token, rollout: list[Token]) -> bool:
    kept = True
    low, high = correction.token_low, correction.token_high
    if correction.token == "mask":
        kept = token.ratio <= (high or 2.0)
    elif correction.token == "band":
        kept = low <= token.ratio <= high
    elif correction.token == "tv":
        pi, mu = math.exp(token.logprob), math.exp(token.behaviour)
        kept = not ((token.advantage > 0 and pi - mu > high) or (token.advantage < 0 and mu - pi > low))
    if correction.sequence == "geo_mask":
        geometric_mean = math.prod(other.ratio for other in rollout) ** (1 / len(rollout))
        kept = kept and correction.sequence_low <= geometric_mean <= correction.sequence_high
    return kept


def slow_weight(correction: CorrectionConfig, own: Callable[[Token], float], token: Token, rollout: list[Token]) -> float:
    if correction.sequence == "truncate":
        return min(correction.sequence_high, math.prod(own(other) for other in rollout))
    if correction.sequence == "geo_truncate":
        return min(correction.sequence_high, math.prod(own(other) for other in rollout) ** (1 / len(rollout)))
    if correction.token in (None, "truncate"):
        return min(correction.token_high or 5.0, own(token))
    return own(token)


def slow_term(recipe: str, token: Token, rollout: list[Token], fixed: Token, fixed_rollout: list[Token]) -> float:
    loss, correction = RECIPES[recipe]
    term = 0.0
    if slow_kept(correction, fixed, fixed_rollout):
        if loss == "reinforce":
            term = -slow_weight(correction, lambda t: t.ratio, fixed, fixed_rollout) * token.advantage * token.logprob
        elif loss == "cispo":
            term = -min(max(fixed.ratio, 1 - LOW), 1 + HIGH) * token.advantage * token.logprob
        elif loss == "ppo":
            term = slow_surrogate(token.ratio, token.advantage, DUAL)
        elif loss == "gspo":
            likelihood_ratio = math.prod(other.ratio for other in rollout)
            term = slow_surrogate(likelihood_ratio ** (1 / len(rollout)), token.advantage)
        elif loss == "decoupled":
            weight = slow_weight(correction, lambda t: t.prox / math.exp(t.behaviour), fixed, fixed_rollout)
            term = weight * slow_surrogate(math.exp(token.logprob) / fixed.prox, token.advantage, DUAL)
    return term + correction.drift * math.log(token.ratio) ** 2


def slow_terms(recipe: str, inputs: LossInputs, logprobs: np.ndarray, frozen: np.ndarray) -> np.ndarray:
    """Every token's term. `frozen` are the log-probs that a stopped gradient sees: equal to `logprobs`, but not varied."""
    terms = np.zeros(len(logprobs))
    constant = rollouts_of(inputs, frozen)
    for i, rollout in enumerate(rollouts_of(inputs, logprobs)):
        tokens, fixed = [token for _, token in rollout], [token for _, token in constant[i]]
        for t, (place, token) in enumerate(rollout):
            terms[place] = slow_term(recipe, token, tokens, fixed[t], fixed)
    return terms


def slow_gradient(recipe: str, inputs: LossInputs, step: float = 1e-6) -> np.ndarray:
    """d(sum of terms) / d(log-probs) by central differences."""
    at = inputs.logprobs_N.detach().numpy()
    gradient = np.zeros(len(at))
    for place in range(len(at)):
        sums = []
        for sign in (1, -1):
            moved = at.copy()
            moved[place] += sign * step
            sums.append(slow_terms(recipe, inputs, moved, at).sum())
        gradient[place] = (sums[0] - sums[1]) / (2 * step)
    return gradient


def gradient_of(loss: Callable[[LossInputs], LossOutput], inputs: LossInputs) -> torch.Tensor:
    (gradient_N,) = torch.autograd.grad(loss(inputs).loss_N.sum(), inputs.logprobs_N)
    return gradient_N


LENGTHS = [1, 2, 7, 0, 4, 12, 3, 3, 1]
"""Of rollouts, one of which has no token in the micro-batch."""


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_terms_and_gradient_equal_the_slow_reference(recipe: str, seed: int) -> None:
    inputs = make_inputs(LENGTHS, seed)
    output = loss_of(recipe)(inputs)
    at = inputs.logprobs_N.detach().numpy()
    np.testing.assert_allclose(output.loss_N.detach().numpy(), slow_terms(recipe, inputs, at, at), rtol=1e-11, atol=1e-13)
    gradient_N = gradient_of(loss_of(recipe), inputs).numpy()
    np.testing.assert_allclose(gradient_N, slow_gradient(recipe, inputs), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe != "weighted"])
@pytest.mark.parametrize("seed", range(3))
def test_the_data_of_the_comparison_reach_the_limits(recipe: str, seed: int) -> None:
    """Guards the test above: with data that no limit concerns it would prove little."""
    output = loss_of(recipe)(make_inputs(LENGTHS, seed))
    assert not (output.masked_N & output.truncated_N).any()
    assert 1 <= (output.masked_N | output.truncated_N).sum() < len(output.masked_N)


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_called_masked_is_what_has_no_gradient(recipe: str) -> None:
    inputs = make_inputs(LENGTHS)
    loss, correction = RECIPES[recipe]
    output = loss_of(recipe)(inputs)
    without_drift = make_loss(config(loss), correction.model_copy(update={"drift": 0.0}))
    assert output.masked_N.tolist() == (gradient_of(without_drift, inputs) == 0).tolist()


@pytest.mark.parametrize("recipe", RECIPES)
def test_on_policy_every_loss_has_the_gradient_of_plain_reinforce(recipe: str) -> None:
    inputs = make_inputs([3, 1, 8], spread=0.0)
    output = loss_of(recipe)(inputs)
    torch.testing.assert_close(gradient_of(loss_of(recipe), inputs), -inputs.advantages_N)
    assert not (output.masked_N | output.truncated_N).any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_extreme_ratios_stay_finite(recipe: str) -> None:
    loss = loss_of(recipe, kl_coefficient=0.1, dual_clip=None)
    for case in product([50.0, -50.0, 1000.0, -1000.0], [1.0, -1.0, 0.0], [0, 10**9]):
        log_ratio, advantage, lag = case
        logprobs_N = torch.tensor([-1000.0, -1.0], requires_grad=True)
        inputs = LossInputs(
            logprobs_N=logprobs_N,
            behaviour_logprobs_N=torch.tensor([-1000.0 - log_ratio, -1.0]),
            advantages_N=torch.full((2,), advantage),
            lags_N=torch.tensor([lag, lag]),
            sequence_N=torch.tensor([0, 1]),
            sequence_count=2,
            reference_logprobs_N=torch.tensor([-1000.0 + log_ratio, -1.0]),
        )
        output = loss(inputs)
        gradient_N = gradient_of(loss, inputs)
        assert output.loss_N.isfinite().all(), case
        assert gradient_N.isfinite().all(), case
        # The other rollout of the micro-batch is not touched: on-policy, and equal to the reference.
        assert gradient_N[1].item() == pytest.approx(-advantage), case


def test_a_limited_weight_is_truncated_and_keeps_a_gradient() -> None:
    inputs = make_inputs(LENGTHS)
    ratio_N = (inputs.logprobs_N - inputs.behaviour_logprobs_N).exp()
    for recipe, expected_N in (
        ("reinforce", ratio_N > 1.5),
        ("cispo", (ratio_N < 1 - LOW) | (ratio_N > 1 + HIGH)),
    ):
        output = loss_of(recipe)(inputs)
        assert torch.equal(output.truncated_N, expected_N)
        assert not output.masked_N.any()


def test_no_tokens_give_no_terms() -> None:
    for recipe in RECIPES:
        output = loss_of(recipe)(make_inputs([]))
        assert output.loss_N.shape == output.masked_N.shape == output.truncated_N.shape == (0,)


def test_kl_penalty_is_k3_and_estimates_the_divergence() -> None:
    rng = np.random.default_rng(0)
    policy, reference = rng.dirichlet(np.ones(50)), rng.dirichlet(np.ones(50))
    terms = kl_penalty(torch.tensor(policy).log(), torch.tensor(reference).log()).numpy()
    for term, pi, ref in zip(terms, policy, reference, strict=True):
        assert term == pytest.approx(ref / pi - 1 - math.log(ref / pi))
    assert (terms >= 0).all()
    # In expectation over pi it is the divergence itself.
    assert (policy * terms).sum() == pytest.approx((policy * np.log(policy / reference)).sum())


@pytest.mark.parametrize("recipe", ["tv, drift", "gspo"])
def test_the_kl_penalty_is_added_with_its_coefficient(recipe: str) -> None:
    inputs = make_inputs([4, 5])
    without, with_penalty = loss_of(recipe)(inputs), loss_of(recipe, kl_coefficient=0.25)(inputs)
    expected_N = kl_penalty(inputs.logprobs_N, inputs.reference_logprobs_N)
    torch.testing.assert_close(with_penalty.loss_N, without.loss_N + 0.25 * expected_N)
    with pytest.raises(ValueError, match="reference log-probabilities"):
        loss_of(recipe, kl_coefficient=0.25)(dataclasses.replace(inputs, reference_logprobs_N=None))


@pytest.mark.parametrize("recipe", RECIPES)
def test_k1_takes_its_share_of_each_tokens_advantage(recipe: str) -> None:
    inputs = make_inputs(LENGTHS)
    pairs = zip(inputs.logprobs_N.tolist(), inputs.reference_logprobs_N.tolist(), strict=True)
    credit = [a - 0.3 * (pi - ref) for a, (pi, ref) in zip(inputs.advantages_N.tolist(), pairs, strict=True)]
    changed = dataclasses.replace(inputs, advantages_N=torch.tensor(credit, dtype=torch.float64))
    with_kl = loss_of(recipe, kl_coefficient=0.3, kl_estimator="k1")
    torch.testing.assert_close(with_kl(inputs).loss_N, loss_of(recipe)(changed).loss_N, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient_of(with_kl, inputs), gradient_of(loss_of(recipe), changed), rtol=1e-12, atol=1e-12)


def test_in_expectation_k1_has_the_gradient_of_the_divergence_of_the_policy_and_k3_of_the_reference() -> None:
    """One token of each kind, sampled from a policy mu of the past, with the weights pi / mu."""
    rng = np.random.default_rng(0)
    logits_V = torch.tensor(rng.normal(size=20), requires_grad=True)
    reference_V, past_V = (torch.tensor(rng.dirichlet(np.ones(20))).log() for _ in range(2))

    def found(estimator: str, samples_V: torch.Tensor) -> torch.Tensor:
        """The expected gradient of the loss, over samples from this distribution (its logarithms)."""
        inputs = LossInputs(
            logprobs_N=logits_V.log_softmax(0),
            behaviour_logprobs_N=samples_V,
            advantages_N=torch.zeros(20),
            lags_N=torch.ones(20, dtype=torch.int64),
            sequence_N=torch.arange(20),
            sequence_count=20,
            reference_logprobs_N=reference_V,
        )
        loss = make_loss(config("reinforce", kl_coefficient=1.0, kl_estimator=estimator), CorrectionConfig(token="none"))
        return torch.autograd.grad((samples_V.exp() * loss(inputs).loss_N).sum(), logits_V)[0]

    policy_V = logits_V.log_softmax(0)
    reverse = (policy_V.exp() * (policy_V - reference_V)).sum()
    forward = (reference_V.exp() * (reference_V - policy_V)).sum()
    expected = {"k1": torch.autograd.grad(reverse, logits_V, retain_graph=True)[0]}
    expected["k3"] = torch.autograd.grad(forward, logits_V)[0]
    torch.testing.assert_close(found("k1", past_V), expected["k1"], rtol=1e-12, atol=1e-12)
    for estimator, gradient in expected.items():
        torch.testing.assert_close(found(estimator, policy_V.detach()), gradient, rtol=1e-12, atol=1e-12)


USERS = """
import torch
def plain(inputs):
    return -inputs.advantages_N * inputs.log_ratio_N.exp()
def summed(inputs):
    return plain(inputs).sum()
def flat(inputs):
    return inputs.advantages_N
def broken(inputs):
    return plain(inputs) / 0
def odd(inputs):
    return inputs.rewards_N
def nothing(inputs):
    return None
def half(inputs):
    from pipelinerl.trainer.losses import LossOutput
    return LossOutput(plain(inputs), None, None)
def largest(inputs):
    return plain(inputs) * 0 + plain(inputs).max()
"""


@pytest.fixture
def users(tmp_path: Path) -> str:
    file = tmp_path / "losses.py"
    file.write_text(USERS)
    return str(file)


def test_a_function_of_the_user_is_an_objective_like_any_other(users: str) -> None:
    inputs, correction = make_inputs(LENGTHS), CorrectionConfig(token="mask", token_high=1.3, drift=0.1)
    own = make_loss(config(f"{users}:plain", kl_coefficient=0.2), correction)
    built_in = make_loss(config("reinforce", kl_coefficient=0.2), correction)
    torch.testing.assert_close(gradient_of(own, inputs), gradient_of(built_in, inputs))
    assert own(inputs).masked_N.equal(built_in(inputs).masked_N)
    try_loss(config(f"{users}:plain", kl_coefficient=0.2), correction)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("summed", r"returned shape \(\).*a tensor \(5,\)"),
        ("flat", "no finite loss, or no gradient"),
        ("half", "returned shape .*|returned LossOutput"),
        ("broken", "no finite loss"),
        ("odd", r"losses.py, line \d+: AttributeError.*rewards_N"),
        ("nothing", "returned NoneType"),
        ("missing", "no function 'missing'"),
    ],
)
def test_a_wrong_function_is_refused_before_the_run(users: str, name: str, message: str) -> None:
    for penalties, drift in (({}, 0.0), ({"kl_coefficient": 0.1}, 0.1)):  # which have a gradient of their own
        with pytest.raises((UserError, EnvironmentSetupError), match=message):
            try_loss(config(f"{users}:{name}", **penalties), CorrectionConfig(drift=drift))


def test_a_function_of_the_user_gets_no_empty_batch(users: str) -> None:
    assert make_loss(config(f"{users}:largest"))(make_inputs([])).loss_N.shape == (0,)
