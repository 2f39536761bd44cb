"""Measures how far the trained policy pi is from the behaviour policy mu that sampled the tokens."""

from __future__ import annotations

import math
from typing import Any

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


class OnPolicyStats:
    """Collects the tokens of one optimizer step over its micro-batches.

    Tokens are stored until `result`, so that all metrics (percentiles included) are exact for any packing, and no
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

    def result(self) -> dict[str, Any] | None:
        """The metrics of all tokens added, by their names in `metrics.records.StepRecord`; None without tokens.

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
        shares_N = 1.0 / lengths_N  # of a rollout: all of its tokens have the same product
        mean = (products_N * shares_N).sum() / shares_N.sum()
        return {
            "ess": effective_sample_size(logs_N),
            "kl_behaviour_policy": float(-logs_N.mean()),
            "kl_behaviour_policy_k3": float((torch.expm1(logs_N) - logs_N).mean()),
            "lag_mean": float(lags_N.double().mean()),
            "lag_max": int(sorted_lags_N[-1]),
            "lag_p50": _nearest_rank(sorted_lags_N, 0.50),
            "lag_p99": _nearest_rank(sorted_lags_N, 0.99),
            "masked_fraction": float(masked_N.mean()),
            "truncated_fraction": float(truncated_N.mean()),
            "entropy_mean": float(entropy_N.mean()),
            "weight_mean": float(weights_N.mean()),
            "weight_max": float(weights_N.max()),
            "on_policy_gap": float(on_policy_N.abs().max()) if on_policy_N.numel() else None,
            "log_product_sd": math.sqrt(float(((products_N - mean).square() * shares_N).sum() / shares_N.sum())),
        }


def _nearest_rank(sorted_N: torch.Tensor, fraction: float) -> int:
    """The nearest-rank quantile: the smallest value that at least `fraction` of the values do not exceed."""
    return int(sorted_N[max(0, math.ceil(fraction * sorted_N.numel()) - 1)])
