"""Splits the samples of an optimizer step into micro-batches by a token budget, and builds their tensors."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipelinerl.models.packed import MAX_PADDING_WASTE, PackedRow, uploaded
from pipelinerl.types import TrainingSample


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Bins of indices into `lengths` (tokens), each with at most `budget` tokens; every index is in exactly one bin.

    A sample longer than the budget gets a bin of its own. Best-fit decreasing: the longest sample first, each into the
    fullest bin that has room, the earliest such bin among equals. Any two bins hold more than one budget between them, so
    there are never twice as many bins as the tokens need; O(n log n) comparisons. The result depends only on the
    arguments. Indices ascend within a bin, bins are ordered by their first index.

    Raises ValueError for a length or budget below 1.
    """
    if budget < 1 or min(lengths, default=1) < 1:
        raise ValueError(f"can't pack: lengths must be at least 1, and so must the budget ({budget})")
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, bin), ascending
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        at = bisect_left(room, (length, 0))
        if at < len(room):
            free, chosen = room.pop(at)
        else:
            free, chosen = budget, len(bins)
            bins.append([])
        bins[chosen].append(index)
        if free > length:
            insort(room, (free - length, chosen))
    return sorted(sorted(indices) for indices in bins)


def segment_lengths(samples: Sequence[TrainingSample]) -> list[list[int]]:
    """The lengths of each sample's sequences, in tokens."""
    return [[len(segment.token_ids) for segment in sample.segments] for sample in samples]


def padded_bins(lengths: Sequence[Sequence[int]], budget: int) -> list[list[int]]:
    """Bins of indices into `lengths` (of a sample's sequences), for a model that computes a bin as one padded batch.

    Samples of similar length share a bin, of at most `budget` tokens with padding. A longer sample gets its own bin.
    """
    bins: list[list[int]] = []
    longest = sequences = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-max(lengths[i]), i)):
        if bins and (sequences + len(lengths[index])) * longest <= budget:
            bins[-1].append(index)
            sequences += len(lengths[index])
        else:
            bins.append([index])
            longest, sequences = max(lengths[index]), len(lengths[index])
    return bins


@dataclass(frozen=True)
class MicroBatch:
    """The P sampled tokens of the samples, in order, and `row`, the packed batch that computes their logits."""

    row: PackedRow
    behaviour_logprobs_P: Tensor
    advantages_P: Tensor
    lags_P: Tensor
    sequence_P: Tensor
    """Index in the micro-batch of the sample that a token belongs to."""
    sequence_count: int
    reference_logprobs_P: Tensor | None

    @classmethod
    def of(
        cls, samples: Sequence[TrainingSample], *, version: int, device: torch.device, waste: float = MAX_PADDING_WASTE
    ) -> MicroBatch:
        """Build the tensors for a step that starts from `version`. `waste`: as for `PackedRow.of`.

        Reference log-probabilities are set if all samples have them.
        """
        reference = [sample.reference_logprobs for sample in samples]
        counts_S = torch.tensor([sample.sampled_count for sample in samples])
        batch = cls(
            row=PackedRow.on_host([one for sample in samples for one in sample.segments], device, waste),
            behaviour_logprobs_P=torch.tensor([lp for sample in samples for lp in sample.behaviour_logprobs]),
            advantages_P=torch.tensor([sample.advantage for sample in samples]).repeat_interleave(counts_S),
            lags_P=torch.tensor([version - token for sample in samples for token in sample.versions]),
            sequence_P=torch.arange(len(samples)).repeat_interleave(counts_S),
            sequence_count=len(samples),
            reference_logprobs_P=None if None in reference else torch.tensor([lp for lps in reference if lps for lp in lps]),
        )
        return uploaded(batch, device)
