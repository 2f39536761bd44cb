"""The seam to the reference model of the KL penalty."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pipelinerl.types import Segment


class ReferenceScorer(Protocol):
    """Knows the log-probabilities of a frozen reference model, usually the initial weights."""

    def score(self, segments: Sequence[Segment]) -> Sequence[Sequence[float]]:
        """For each segment, the log-probability of each of its sampled tokens, in order of position.

        At the temperature of training rollouts, so that it compares with `behaviour_logprobs`. All segments of a group come
        in one call; the scorer batches them as it likes.
        """
        ...
