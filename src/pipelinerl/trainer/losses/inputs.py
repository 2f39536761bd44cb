"""Inputs and outputs of a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

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
    """The advantage of each token's rollout."""
    lags_N: torch.Tensor
    """Optimizer steps between the weights that sampled a token and the weights being trained: integers >= 0."""
    sequence_N: torch.Tensor
    """Index of the token's rollout in this micro-batch: int64 in [0, sequence_count)."""
    sequence_count: int
    reference_logprobs_N: torch.Tensor | None = None
    """log-probabilities under the reference model; only the KL penalty reads them."""

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
