"""The policy-gradient losses: pure tensor maths.

Every loss maps `LossInputs`, the concatenated sampled tokens of one micro-batch, to one term per token. Nothing is averaged
here. The caller divides by a number of the whole optimizer step, not of the micro-batch,

    step loss = 1/Z * sum over micro-batches, over tokens n, of loss_N[n]
    Z = rollouts of the step (`sequences`)   or   sampled tokens of the step, or given ones if there are none (`tokens`)

so that the gradient of a step does not depend on packing. A rollout is never split over micro-batches: `gspo` and the
sequence corrections need all of its tokens at once.

mu sampled a token, pi is trained, r = pi / mu is the token's ratio, A its advantage, sg stops the gradient. At pi = mu all
objectives have the gradient of plain REINFORCE, -A * grad log pi for each token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from pipelinerl.config.correction import SEQUENCE_WEIGHTS, Correction, clip_range, resolve
from pipelinerl.config.schema import CorrectionConfig, TrainerConfig, is_function
from pipelinerl.errors import UserError

DEFAULT_CORRECTION = CorrectionConfig()
MAX_LOG_RATIO = 20.0
"""Ratios saturate at e^20, so that one token can't overflow the gradient of the step. Healthy runs stay far below."""


@dataclass(frozen=True)
class LossInputs:
    """The N sampled tokens of one micro-batch, concatenated, without context tokens.

    Log-probabilities are natural logarithms, at the temperature the tokens were sampled at. They should be float32 or
    wider: a ratio is the exponential of a difference between them.
    """

    logprobs_N: torch.Tensor
    """log pi(token) under the weights being trained. Carries the gradient."""
    behaviour_logprobs_N: torch.Tensor
    """log mu(token), as the engine recorded it when it sampled the token."""
    advantages_N: torch.Tensor
    """The advantage of each token: mostly one number for all tokens of a rollout."""
    lags_N: torch.Tensor
    """Optimizer steps between the weights that sampled a token and the weights being trained: integers >= 0."""
    sequence_N: torch.Tensor
    """Index of the token's rollout in this micro-batch: int64 in [0, sequence_count)."""
    sequence_count: int
    reference_logprobs_N: torch.Tensor | None = None
    """log-probabilities under the reference model or teacher; only the KL term reads them."""

    @property
    def log_ratio_N(self) -> torch.Tensor:
        """log(pi / mu) of each token; carries the gradient."""
        return self.logprobs_N - self.behaviour_logprobs_N

    def sums_by_sequence(self, values_N: torch.Tensor) -> torch.Tensor:
        """The sum of each rollout's values, shape (sequence_count,); 0 for a rollout without tokens."""
        return values_N.new_zeros(self.sequence_count).index_add(0, self.sequence_N, values_N)

    def means_by_sequence(self, values_N: torch.Tensor) -> torch.Tensor:
        """The mean of each rollout's values, shape (sequence_count,); 0 for a rollout without tokens."""
        counts_S = self.sums_by_sequence(torch.ones_like(values_N))
        return self.sums_by_sequence(values_N) / counts_S.clamp(min=1)


@dataclass(frozen=True)
class LossOutput:
    """The loss of each token, with what a mask or limit did to it."""

    loss_N: torch.Tensor
    """One term per token, to be summed and divided by the caller. Carries the gradient."""
    masked_N: torch.Tensor
    """bool: the token has no gradient from its advantage, because of a mask or the objective's clip."""
    truncated_N: torch.Tensor
    """bool: the token has such a gradient, but a limit replaced its weight."""


Loss = Callable[[LossInputs], LossOutput]


def make_loss(trainer: TrainerConfig, correction: CorrectionConfig = DEFAULT_CORRECTION) -> Loss:
    """The loss of a run file: the objective, its correction, and the weighted penalties (drift, KL).

    Raises EnvironmentSetupError if `trainer.loss` names a function that can't be loaded.
    """
    resolved, dual_clip = resolve(trainer, correction), trainer.dual_clip
    objective: Loss
    if trainer.loss == "reinforce":
        objective = partial(reinforce, correction=resolved)
    elif is_function(trainer.loss):
        from pipelinerl.user_code import find_function  # noqa: PLC0415 - few runs have one

        objective = partial(_users, function=find_function(trainer.loss), name=trainer.loss)
    else:
        low, high = clip_range(trainer)
        objective = {
            "ppo": partial(ppo, clip_low=low, clip_high=high, dual_clip=dual_clip),
            "gspo": partial(gspo, clip_low=low, clip_high=high),
            "cispo": partial(cispo, clip_low=low, clip_high=high),
            "decoupled": partial(decoupled, correction=resolved, clip_low=low, clip_high=high, dual_clip=dual_clip),
        }[trainer.loss]
    return partial(_loss, objective=objective, correction=resolved, trainer=trainer)


def _loss(inputs: LossInputs, *, objective: Loss, correction: Correction, trainer: TrainerConfig) -> LossOutput:
    """Raises ValueError for a KL term without reference log-probabilities."""
    if not len(inputs.logprobs_N):  # of given tokens alone
        none_N = torch.zeros_like(inputs.logprobs_N, dtype=torch.bool)
        return LossOutput(inputs.logprobs_N, none_N, none_N)
    coefficient = trainer.kl_coefficient
    reference_N = inputs.reference_logprobs_N if coefficient > 0 else None
    if coefficient > 0 and reference_N is None:
        raise ValueError(f"a KL coefficient of {coefficient} needs reference log-probabilities, and the samples have none")
    if reference_N is not None and trainer.kl_estimator == "k1":
        kl_N = kl_estimate(inputs.logprobs_N.detach(), reference_N)
        inputs = replace(inputs, advantages_N=inputs.advantages_N - coefficient * kl_N)
    output = objective(inputs)
    loss_N, masked_N, truncated_N = output.loss_N, output.masked_N, output.truncated_N
    kept_N = kept_tokens(inputs, correction)
    if kept_N is not None:
        loss_N, masked_N, truncated_N = torch.where(kept_N, loss_N, 0.0), masked_N | ~kept_N, truncated_N & kept_N
    if correction.drift > 0:  # the gradient, 2 log r * grad log pi, pulls pi back to mu
        loss_N = loss_N + correction.drift * inputs.log_ratio_N.square()
    if reference_N is not None and trainer.kl_estimator == "k3":
        loss_N = loss_N + coefficient * kl_penalty(inputs.logprobs_N, reference_N)
    return LossOutput(loss_N, masked_N, truncated_N)


# ---- The objectives


def reinforce(inputs: LossInputs, *, correction: Correction) -> LossOutput:
    """-sg(w) * A * log pi for each token, where the importance weight w is r, limited as `correction` says.

    With `token: truncate` and token_high 5, w = min(5, r): the method of the PipelineRL paper (arXiv 2509.19128). w is a
    constant, so a token with a truncated weight still has a gradient.
    """
    weight_N, truncated_N = importance_weights(inputs.log_ratio_N, inputs, correction)
    loss_N = -weight_N * inputs.advantages_N * inputs.logprobs_N
    return LossOutput(loss_N, torch.zeros_like(truncated_N), truncated_N)


def ppo(inputs: LossInputs, *, clip_low: float, clip_high: float, dual_clip: float | None) -> LossOutput:
    """-min(r * A, clip(r, 1 - low, 1 + high) * A), for A < 0 at most -dual_clip * A (PPO, arXiv 1707.06347).

    With group advantages this is GRPO's objective (arXiv 2402.03300).
    """
    return clipped_surrogate(inputs.log_ratio_N, inputs, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


def decoupled(
    inputs: LossInputs, *, correction: Correction, clip_low: float, clip_high: float, dual_clip: float | None
) -> LossOutput:
    """Decoupled PPO: sg(w) times the clipped surrogate of pi / prox, where w is prox / mu, limited as `correction` says.

        log prox = log mu / d + (1 - 1 / d) * sg(log pi),    d = max(1, lag of the token)

    The proximal policy prox precedes the last optimizer step. Computing it would cost a forward pass; A-3PO (arXiv
    2512.06547) interpolates it from the token's lag instead. Hence w = r^(1 - 1/d), and pi / prox has the value r^(1/d). At
    lag 1, prox is mu. At lag 0, where mu equals pi up to numerical error, prox is also mu, as in the authors' code.
    Decoupling the two policies is from AReaL (arXiv 2505.24298).
    """
    log_ratio_N = inputs.log_ratio_N
    share_N = 1.0 - 1.0 / inputs.lags_N.clamp(min=1).to(log_ratio_N.dtype)
    log_weight_N = share_N * log_ratio_N.detach()
    weight_N, truncated_N = importance_weights(log_weight_N, inputs, correction)
    ratio_N = log_ratio_N - log_weight_N
    surrogate = clipped_surrogate(ratio_N, inputs, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    return LossOutput(weight_N * surrogate.loss_N, surrogate.masked_N, truncated_N & ~surrogate.masked_N)


def gspo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> LossOutput:
    """PPO's surrogate with the length-normalised ratio of the sequence, s = exp(mean_t log r_t) (arXiv 2507.18071).

    The sequence is a rollout: all of its sampled tokens, over all turns and segments. A token's term is

        l_t = -min(s_t * A, clip(s_t, 1 - low, 1 + high) * A),   s_t = sg(s) * pi_t / sg(pi_t)

    (the paper's token-level form): the value of s, with the gradient of the token's own log-probability. Over a rollout y,

        sum_t l_t = -|y| * min(s * A, clip(s) * A),   with gradient   -s * A * sum_t grad log pi_t   where not clipped,

    that is, |y| times the paper's term for the sequence, with its exact gradient. The factor |y| puts the terms on the scale
    of the other losses, so that both of the caller's divisors keep their meaning: at pi = mu the gradient is REINFORCE's,
    a sum over tokens per rollout (`sequences`) or a mean over tokens (`tokens`). In both cases a rollout's weight is
    proportional to its length; the paper's factor 1 / |y| is omitted. As in the paper, there is no dual clip.
    """
    mean_S = inputs.means_by_sequence(inputs.log_ratio_N.detach())
    own_N = inputs.logprobs_N - inputs.logprobs_N.detach()
    return clipped_surrogate(mean_S[inputs.sequence_N] + own_N, inputs, clip_low=clip_low, clip_high=clip_high)


def cispo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> LossOutput:
    """-sg(clip(r, 1 - low, 1 + high)) * A * log pi for each token (CISPO: MiniMax-M1, arXiv 2506.13585).

    Unlike in `ppo`, a clipped token keeps its gradient; only its weight is bounded. `clip_low` >= 1 means no lower bound, as
    in the first use of the algorithm.
    """
    ratio_N = inputs.log_ratio_N.detach().exp()
    weight_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    loss_N = -weight_N * inputs.advantages_N * inputs.logprobs_N
    truncated_N = weight_N != ratio_N
    return LossOutput(loss_N, torch.zeros_like(truncated_N), truncated_N)


def clipped_surrogate(
    log_ratio_N: torch.Tensor, inputs: LossInputs, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> LossOutput:
    """-min(r * A, clip(r, 1 - low, 1 + high) * A) for r = exp(log_ratio_N), which carries the gradient.

    The minimum selects the clipped term exactly where moving further would still improve the surrogate: above 1 + high for
    A > 0, below 1 - low for A < 0. For A < 0 and large r, r * A is unbounded; `dual_clip` (c > 1; Ye et al., arXiv
    1912.09729) then limits the term to at most -c * A. Without it, r saturates at e^`MAX_LOG_RATIO`. A token beyond any of
    these limits has no gradient and counts as masked.
    """
    advantages_N = inputs.advantages_N
    ratio_N = log_ratio_N.clamp(max=MAX_LOG_RATIO).exp()
    limit_N = ratio_N.detach().clamp(1 - clip_low, 1 + clip_high)
    masked_N = ((advantages_N > 0) & (ratio_N > 1 + clip_high)) | ((advantages_N < 0) & (ratio_N < 1 - clip_low))
    weight_N = torch.where(masked_N, limit_N, ratio_N)
    if dual_clip is not None:
        bounded_N = (advantages_N < 0) & (ratio_N > dual_clip)
        weight_N = torch.where(bounded_N, dual_clip, weight_N)
        masked_N = masked_N | bounded_N
    masked_N = masked_N | (log_ratio_N > MAX_LOG_RATIO)
    return LossOutput(-weight_N * advantages_N, masked_N, torch.zeros_like(masked_N))


def try_loss(trainer: TrainerConfig, correction: CorrectionConfig) -> None:
    """Raises UserError if `trainer.loss`, a function, fails for five tokens of two rollouts, three of them stale.

    Without penalties, whose gradient would hide that it has none.
    """
    logprobs_N = torch.linspace(-3.0, -0.1, 5, requires_grad=True)
    inputs = LossInputs(
        logprobs_N=logprobs_N,
        behaviour_logprobs_N=torch.linspace(-2.8, -0.2, 5),
        advantages_N=torch.tensor([0.5, 0.5, 0.5, -0.5, -0.5]),
        lags_N=torch.tensor([0, 1, 2, 0, 3]),
        sequence_N=torch.tensor([0, 0, 0, 1, 1]),
        sequence_count=2,
        reference_logprobs_N=torch.linspace(-2.9, -0.3, 5) if trainer.kl_coefficient else None,
    )
    alone = trainer.model_copy(update={"kl_coefficient": 0.0})
    loss = make_loss(alone, correction.model_copy(update={"drift": 0.0}))(inputs).loss_N.sum()
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
    gradient_N = logprobs_N.grad
    if gradient_N is None or not gradient_N.isfinite().all() or not gradient_N.any() or not loss.isfinite():
        raise UserError(f"trainer.loss: {trainer.loss}, tried with five tokens, has no finite loss, or no gradient")


def _users(inputs: LossInputs, *, function: Callable[[LossInputs], LossOutput | torch.Tensor], name: str) -> LossOutput:
    """What a function of the user returns: the terms (N,), or a `LossOutput`.

    Raises UserError for anything else, and for what the function raises.
    """
    try:
        output = function(inputs)
    except Exception as error:
        from pipelinerl.user_code import describe  # noqa: PLC0415 - only for an error

        raise UserError(f"trainer.loss: {describe(error, name)}") from error
    if isinstance(output, torch.Tensor):
        none_N = torch.zeros_like(inputs.advantages_N, dtype=torch.bool)
        output = LossOutput(output, none_N, none_N)
    wanted = inputs.logprobs_N.shape
    shapes = [getattr(part, "shape", None) for part in vars(output).values()] if isinstance(output, LossOutput) else [None]
    if shapes != [wanted] * len(shapes):
        found = f"shape {tuple(shapes[0])}" if shapes[0] is not None else type(output).__name__
        raise UserError(f"trainer.loss: {name} returned {found}, not one term per token, a tensor {tuple(wanted)}")
    return output


def kl_estimate(logprobs_N: torch.Tensor, reference_logprobs_N: torch.Tensor) -> torch.Tensor:
    """The k1 estimate of KL(pi || reference) at each token, log pi - log reference, within +-`MAX_LOG_RATIO`.

    As a part of the advantage, its policy gradient is that of KL(pi || reference) at the contexts that were sampled: the
    expectation over pi of (log pi - log reference) * grad log pi. Of a teacher, this is on-policy distillation (Agarwal et
    al., arXiv 2306.13649; as an advantage per token: Thinking Machines, "On-Policy Distillation", 2025). log pi is that of
    the weights being trained, so an old token is compared with the policy of now; its importance weight corrects the rest.
    """
    return (logprobs_N - reference_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def kl_penalty(logprobs_N: torch.Tensor, reference_logprobs_N: torch.Tensor) -> torch.Tensor:
    """The k3 estimate of KL(pi || reference) at each token: q - 1 - log q with q = reference / pi (Schulman 2020).

    It is never negative, 0 where the two agree, and unbiased if the tokens are sampled from pi. As a loss, its gradient
    (1 - q) * grad log pi is then in expectation the gradient of KL(reference || pi), which has the same minimum. No
    importance weight is applied, as in GRPO (arXiv 2402.03300). q saturates at e^`MAX_LOG_RATIO`; its gradient is then 0.
    """
    log_q_N = (reference_logprobs_N - logprobs_N).clamp(max=MAX_LOG_RATIO)
    return torch.expm1(log_q_N) - log_q_N


# ---- Off-policy corrections: importance weights and masks, through which no gradient flows
# Settings and defaults are in `config/correction.py`; `docs/corrections.md` compares the corrections.
#
#   correction             what it does                                                           source
#   token: truncate        weight min(high, r)                                                    TIS; PipelineRL: high = 5
#   token: mask            no gradient where r > high                                             masked importance sampling
#   token: band            no gradient where r < low or r > high                                  IcePop
#   token: tv              none where A > 0 and pi - mu > high, or A < 0 and mu - pi > low        DPPO, binary TV
#   sequence: truncate     weight min(high, product of r) for all tokens of a rollout             sequence-level TIS
#   sequence: geo_truncate weight min(high, exp(mean log r)) for all tokens of a rollout          geometric-mean weight
#   sequence: geo_mask     no gradient from a rollout with exp(mean log r) outside [low, high]    geometric-mean mask
#   drift                  + drift * (log r)^2 for every token, masked or not                     prime-rl, Kimi K2.5
#
# A token that a mask keeps has its full weight r, limited only by e^`MAX_LOG_RATIO`. A masked token still counts in the
# divisor Z of the step. Sequence masks and weights need whole rollouts, which a micro-batch never splits.


def importance_weights(
    log_weights_N: torch.Tensor, inputs: LossInputs, correction: Correction
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, whether a limit replaced the weight): exp(log_weights_N), limited as `correction` says.

    `log_weights_N` is log r, or for a decoupled objective log(prox / mu). Both results have shape (N,) and no gradient.
    """
    logs_N = log_weights_N.detach()
    if correction.sequence in SEQUENCE_WEIGHTS:
        by_sequence = inputs.sums_by_sequence if correction.sequence == "truncate" else inputs.means_by_sequence
        logs_N = by_sequence(logs_N)[inputs.sequence_N]
        limit = correction.sequence_high
    else:
        limit = correction.token_high if correction.token == "truncate" else float("inf")
    weights_N = logs_N.clamp(max=MAX_LOG_RATIO).exp()
    limited_N = weights_N.clamp(max=limit)
    return limited_N, (weights_N > limit) | (logs_N > MAX_LOG_RATIO)


def kept_tokens(inputs: LossInputs, correction: Correction) -> torch.Tensor | None:
    """bool (N,): tokens that keep their gradient under the masks of `correction`; None if it has no masks."""
    log_ratio_N, kept_N = inputs.log_ratio_N.detach(), None
    match correction.token:
        case "mask":
            kept_N = log_ratio_N.exp() <= correction.token_high
        case "band":
            ratio_N = log_ratio_N.exp()
            kept_N = (ratio_N >= correction.token_low) & (ratio_N <= correction.token_high)
        case "tv":
            rise_N = inputs.logprobs_N.detach().exp() - inputs.behaviour_logprobs_N.exp()
            too_high_N = (inputs.advantages_N > 0) & (rise_N > correction.token_high)
            too_low_N = (inputs.advantages_N < 0) & (-rise_N > correction.token_low)
            kept_N = ~(too_high_N | too_low_N)
    if correction.sequence == "geo_mask":
        means_S = inputs.means_by_sequence(log_ratio_N).exp()
        kept_S = (means_S >= correction.sequence_low) & (means_S <= correction.sequence_high)
        by_sequence_N = kept_S[inputs.sequence_N]
        kept_N = by_sequence_N if kept_N is None else kept_N & by_sequence_N
    return kept_N
