"""KL(mu || pi) of sampled tokens: exact over the vocabulary, and the estimators k1 and k3. Pure maths.

Shapes: N tokens, V vocabulary, U problems.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from torch import Tensor

from pipelinerl.experiments.statistics import Floats, Ints


def exact_kl(behaviour_NV: Tensor, target_NV: Tensor) -> Tensor:
    """sum_v mu_v (log mu_v - log pi_v) in nats, [N] in float64, given log-probabilities. Tokens with mu = 0 add nothing."""
    mu_NV = behaviour_NV.double().exp()
    terms_NV = mu_NV * (behaviour_NV.double() - target_NV.double())
    return terms_NV.masked_fill(mu_NV == 0, 0.0).sum(-1)


def log_probabilities(logits_NV: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature), in float64: the divergences can be as small as float32 rounding errors."""
    return (logits_NV.double() / temperature).log_softmax(-1)


@dataclass(frozen=True, kw_only=True)
class TokenDivergences:
    """One entry per sampled token.

    `exact_N` is the KL between the two distributions at the token's position, given the sampled prefix. k1 and k3 estimate
    it from the sampled token alone.
    """

    problem_N: Ints
    position_N: Ints
    version_N: Ints
    exact_N: Floats
    log_ratio_N: Floats
    """log pi - log mu of the sampled token, mu as the engine returned it."""

    @property
    def k1_N(self) -> Floats:
        """-log w for w = pi / mu: unbiased, but negative about half of the time."""
        return -self.log_ratio_N

    @property
    def k3_N(self) -> Floats:
        """w - 1 - log w: unbiased, never negative (Schulman, Approximating KL divergence, 2020)."""
        return np.expm1(self.log_ratio_N) - self.log_ratio_N

    def sums(self, values_N: Floats, problems: int, start: int = 0, end: int | None = None) -> tuple[Floats, Floats]:
        """Sum of `values_N` and number of tokens by problem, both [U], over positions start <= p < end."""
        inside_N = (self.position_N >= start) & (self.position_N < (np.inf if end is None else end))
        problem_n = self.problem_N[inside_N]
        sums_U: Floats = np.bincount(problem_n, weights=values_N[inside_N], minlength=problems).astype(np.float64)
        tokens_U: Floats = np.bincount(problem_n, minlength=problems).astype(np.float64)
        return sums_U, tokens_U


def joined(parts: list[TokenDivergences]) -> TokenDivergences:
    """All tokens of `parts`, in order."""
    return TokenDivergences(
        **{
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in ("problem_N", "position_N", "version_N", "exact_N", "log_ratio_N")
        }
    )


def equivalent_lag(kl: float, kl_by_lag: Sequence[float]) -> float | None:
    """The lag k at which `kl_by_lag[k]` first reaches `kl`, interpolated linearly; None if it never does."""
    for lag, (below, above) in enumerate(pairwise(kl_by_lag)):
        if above >= kl:
            return lag + (max(0.0, kl - below) / (above - below) if above > below else 0.0)
    return None
