"""Splits the samples of an optimizer step into micro-batches by a token budget, and builds their tensors."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipelinerl.models.packed import MAX_PADDING_WASTE, PackedRow, uploaded
from pipelinerl.models.prefixes import shared_prefixes
from pipelinerl.types import Segment, TrainingSample


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


Ordered = Sequence[tuple[int, float, float]]
"""Samples in the lexicographic order of their first sequence: index, cost, and the cost of what the one before has, too."""


def in_order(sequences: Sequence[Sequence[Segment]], least: float, attention: float = 0.0) -> Ordered:
    """`sequences`: of each sample; `least`: see `shared_prefixes`. A cost is in tokens, with `attention` as in `plan`."""
    order, shared = shared_prefixes([of_sample[0] for of_sample in sequences], least)

    def cost(tokens: int) -> float:
        return tokens + attention * tokens * tokens

    costs = [sum(cost(len(segment.token_ids)) for segment in of_sample) for of_sample in sequences]
    return [(index, costs[index], cost(tokens)) for index, tokens in zip(order, shared, strict=True)]


def cut(ordered: Ordered, budget: int, *, join: bool = True) -> list[tuple[list[int], float]]:
    """Neighbours in parts that cost at most `budget`, and their costs. Without `join`, all of a part share a prefix.

    What samples share costs once in a part. A sample that costs more gets a part of its own.
    """
    parts: list[tuple[list[int], float]] = []
    for index, alone, shared in ordered:
        if parts and (shared or join) and parts[-1][1] + alone - shared <= budget:
            indices, cost = parts[-1]
            indices.append(index)
            parts[-1] = (indices, cost + alone - shared)
        else:
            parts.append(([index], alone))
    return parts


def pack_shared(sequences: Sequence[Sequence[Segment]], budget: int, least: float) -> list[list[int]]:
    """Bins like those of `pack`, of indices into `sequences` (of each sample). What a bin's samples share counts once.

    Samples that share a prefix (`shared_prefixes`, also for `least`) are kept together as far as the budget allows. Only
    their first sequences are compared: a bin's `PackedRow` may have fewer tokens than are counted here, and never more.
    """
    units = sorted(cut(in_order(sequences, least), budget, join=False), key=lambda unit: min(unit[0]))
    bins = pack([int(tokens) for _, tokens in units], budget)
    return sorted(sorted(index for unit in bin_ for index in units[unit][0]) for bin_ in bins)


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
    """The N sampled tokens of the samples, in order. `row` computes the logits of all trained tokens.

    P trained tokens of the samples, of which the row may have fewer: those that samples share are there once.
    """

    row: PackedRow
    behaviour_logprobs_N: Tensor
    advantages_N: Tensor
    lags_N: Tensor
    sequence_N: Tensor
    """Index in the micro-batch of the sample that a token belongs to."""
    sequence_count: int
    reference_logprobs_N: Tensor | None
    sampled_N: Tensor | None = None
    """Index of each sampled token among the trained ones. None: all are sampled."""
    supervised: tuple[Tensor, Tensor] | None = None
    """The indices of the C supervised tokens among the trained ones, and the weights of their cross-entropy."""

    def of_sampled(self, values_P: Tensor) -> Tensor:
        return values_P if self.sampled_N is None else values_P[self.sampled_N]

    @classmethod
    def of(
        cls,
        samples: Sequence[TrainingSample],
        *,
        version: int,
        device: torch.device,
        waste: float = MAX_PADDING_WASTE,
        least_shared: float = 1.0,
    ) -> MicroBatch:
        """Build the tensors for a step that starts from `version`. `waste`, `least_shared`: as for `PackedRow.of`.

        Reference log-probabilities are set if all samples have them.
        """
        reference = [sample.reference_logprobs for sample in samples]
        segments = [one for sample in samples for one in sample.segments]
        counts_S = torch.tensor([sample.sampled_count for sample in samples])
        batch = cls(
            row=PackedRow.on_host(segments, device, waste, least_shared),
            behaviour_logprobs_N=torch.tensor([lp for sample in samples for lp in sample.behaviour_logprobs]),
            advantages_N=_advantages(samples, counts_S),
            lags_N=torch.tensor([version - one for sample in samples for one in sample.versions], dtype=torch.long),
            sequence_N=torch.arange(len(samples)).repeat_interleave(counts_S),
            sequence_count=len(samples),
            reference_logprobs_N=None if None in reference else torch.tensor([lp for lps in reference if lps for lp in lps]),
        )
        if any(one.supervised for one in segments):
            sampled_P = torch.tensor(
                [at in places for one in segments for places in [{*one.sampled_positions}] for at in one.trained_positions]
            )
            weights_C = torch.tensor([s.supervised_weight for s in samples for _ in range(s.supervised_count)])
            batch = replace(batch, sampled_N=sampled_P.nonzero()[:, 0], supervised=((~sampled_P).nonzero()[:, 0], weights_C))
        return uploaded(batch, device)


def _advantages(samples: Sequence[TrainingSample], counts_S: Tensor) -> Tensor:
    """The advantage of each sampled token (N,)."""
    if not any(isinstance(sample.advantage, tuple) for sample in samples):
        return torch.tensor([sample.advantage for sample in samples]).repeat_interleave(counts_S)
    streams = (s.advantage if isinstance(s.advantage, tuple) else [s.advantage] * s.sampled_count for s in samples)
    return torch.tensor([advantage for stream in streams for advantage in stream])
