"""Measures how far the trained policy pi is from the behaviour policy mu that sampled the tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

COLUMNS = 7
"""Numbers per token in `OnPolicyStats`."""


def effective_sample_size(log_ratios_N: torch.Tensor) -> float:
    """(sum w)^2 / (N * sum w^2) of the weights w = pi / mu, given log w. In (0, 1]; 1 if all weights are equal.

    Computed in log space and float64, so that large weights do not overflow.
    """
    logs_N = log_ratios_N.detach().double()
    # Scaling all weights by one factor does not change the result; with the largest at 1, the sums are between 1 and N.
    weights_N = (logs_N - logs_N.max()).exp()
    return float(weights_N.sum().square() / (weights_N.square().sum() * weights_N.numel()))


@dataclass(frozen=True)
class OnPolicyMetrics:
    """Distance between the trained policy and the behaviour policies, over all tokens of one optimizer step."""

    ess: float
    """Normalised effective sample size of the weights pi / mu, without any limit."""
    kl_behaviour_policy: float
    """KL(mu || pi) per token in nats, k1 estimate: mean of log(mu / pi). Unbiased; can be negative."""
    kl_behaviour_policy_k3: float
    """The same, k3 estimate: mean of w - 1 - log w. Unbiased, of lower variance, never negative."""
    lag_mean: float
    lag_max: int
    lag_p50: int
    lag_p99: int
    masked_fraction: float
    """Share of tokens without a gradient from their advantage, because of a mask or the objective's clip."""
    truncated_fraction: float
    """Share of tokens whose gradient has a limit in place of their own weight."""
    entropy_mean: float
    """Mean entropy in nats of pi's distributions at the tokens' positions."""
    weight_mean: float
    """Mean of pi / mu, without any limit. Near 1 at any lag, unless something is wrong."""
    weight_max: float
    on_policy_gap: float | None
    """Largest |log pi - log mu| over tokens of lag 0, which pi itself sampled: the numerical gap between engine and
    trainer. None if there are no such tokens."""
    longest_lag_mean: float
    """Mean lag of the tokens of the longest quarter of the rollouts."""
    longest_limited_fraction: float
    """Share of these tokens that was masked or truncated."""
    log_product_sd: float
    """Standard deviation over rollouts of the log of the product of a rollout's weights pi / mu. It grows with the square
    root of the length, at lag 0 too; above 1, a few rollouts have most of the weight under `sequence: truncate`."""


class OnPolicyStats:
    """Collects the tokens of one optimizer step over its micro-batches.

    Tokens are kept until `result`, so that all metrics (percentiles included) are exact for any packing, and no
    micro-batch waits for the device. This takes 30 bytes per token (float32 inputs) for one step.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[torch.Tensor, ...]] = []

    def add(self, *columns_N: torch.Tensor) -> None:
        """Add the sampled tokens of a micro-batch or of another process: `COLUMNS` tensors of shape (N,), in this order.

        log(pi / mu); whether the token is masked, and whether it is truncated; entropy in nats; lag; number of sampled
        tokens of the token's rollout; and the sum of log(pi / mu) over them. N may be 0.
        """
        self._parts.append(tuple(column_N.detach() for column_N in columns_N))

    def tokens(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """All tokens on the CPU, (COLUMNS, N). The host waits for a device once."""
        if not self._parts:
            return torch.empty(COLUMNS, 0, dtype=dtype)
        return torch.stack([torch.cat(parts).to(dtype) for parts in zip(*self._parts, strict=True)]).cpu()

    def result(self) -> OnPolicyMetrics | None:
        """The metrics of all tokens added; None if there were none.

        Raises ValueError if a log-ratio is not finite, which means that the weights or an input are broken.
        """
        logs_N, masked_N, truncated_N, entropy_N, lags_N, lengths_N, products_N = self.tokens(torch.float64)
        tokens = len(logs_N)
        if tokens == 0:
            return None
        if broken := int((~logs_N.isfinite()).sum()):
            raise ValueError(f"log(pi / mu) is not a finite number at {broken} of {tokens} tokens")
        weights_N = logs_N.exp()
        lags_N = lags_N.long()
        sorted_lags_N = lags_N.sort().values
        on_policy_N = logs_N[lags_N == 0]
        longest_N = in_longest_quarter(lengths_N.long())
        return OnPolicyMetrics(
            ess=effective_sample_size(logs_N),
            kl_behaviour_policy=float(-logs_N.mean()),
            kl_behaviour_policy_k3=float((torch.expm1(logs_N) - logs_N).mean()),
            lag_mean=float(lags_N.double().mean()),
            lag_max=int(sorted_lags_N[-1]),
            lag_p50=_nearest_rank(sorted_lags_N, 0.50),
            lag_p99=_nearest_rank(sorted_lags_N, 0.99),
            masked_fraction=float(masked_N.mean()),
            truncated_fraction=float(truncated_N.mean()),
            entropy_mean=float(entropy_N.mean()),
            weight_mean=float(weights_N.mean()),
            weight_max=float(weights_N.max()),
            on_policy_gap=float(on_policy_N.abs().max()) if on_policy_N.numel() else None,
            longest_lag_mean=float(lags_N[longest_N].double().mean()),
            longest_limited_fraction=float(torch.maximum(masked_N, truncated_N)[longest_N].mean()),
            log_product_sd=_sd_by_rollout(products_N, lengths_N),
        )


def in_longest_quarter(lengths_N: torch.Tensor) -> torch.Tensor:
    """bool (N,): tokens in the longest quarter of the rollouts. Rollouts as long as the shortest of these are included.

    `lengths_N` is the length of each token's rollout. All tokens of a rollout must be present: n tokens of length L are
    n / L rollouts.
    """
    tokens_L = lengths_N.bincount()
    rollouts_L = tokens_L // torch.arange(len(tokens_L)).clamp(min=1)
    longer_L = rollouts_L.flip(0).cumsum(0).flip(0)  # rollouts of at least L tokens
    quarter = math.ceil(int(longer_L[0]) / 4)
    shortest = int((longer_L >= quarter).sum()) - 1
    return lengths_N.ge(shortest)


def _sd_by_rollout(values_N: torch.Tensor, lengths_N: torch.Tensor) -> float:
    """The standard deviation over rollouts of a value that all tokens of a rollout have: each token counts 1 / length."""
    shares_N = 1.0 / lengths_N.double()
    mean = (values_N * shares_N).sum() / shares_N.sum()
    return math.sqrt(float(((values_N - mean).square() * shares_N).sum() / shares_N.sum()))


def _nearest_rank(sorted_N: torch.Tensor, fraction: float) -> int:
    """The nearest-rank quantile: the smallest value that at least `fraction` of the values do not exceed."""
    return int(sorted_N[max(0, math.ceil(fraction * sorted_N.numel()) - 1)])
