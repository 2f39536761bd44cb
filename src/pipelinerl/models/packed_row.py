"""How sequences are laid out in a packed row, and cut into small padded batches for attention.

Shapes: T tokens of the row, P sampled tokens, S sequences of a bucket, L their padded length, h heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipelinerl.types import Segment

MAX_PADDING_WASTE = 0.15
"""A bucket takes a shorter sequence only while padding stays below this share of the bucket."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Neighbouring sequences of the row, attended to as one padded batch of `count` x `length`.

    `pad_index` maps each cell of the batch to a token of the bucket (padding repeats the sequence's last token) and
    `cell_index` each token to its cell; both are None where all lengths are equal.
    """

    start: int
    end: int
    count: int
    length: int
    pad_index: Tensor | None
    cell_index: Tensor | None

    def batch(self, x_1hTD: Tensor) -> Tensor:
        part_htD = x_1hTD[0, :, self.start : self.end]
        if self.pad_index is not None:
            part_htD = part_htD.index_select(1, self.pad_index)
        heads, _, size = part_htD.shape
        return part_htD.reshape(heads, self.count, self.length, size).transpose(0, 1)

    def tokens(self, x_ShLD: Tensor) -> Tensor:
        cells = x_ShLD.transpose(1, 2).flatten(0, 1)
        return cells if self.cell_index is None else cells.index_select(0, self.cell_index)


@dataclass(frozen=True, slots=True)
class PackedRow:
    """Sequences laid out in one row, with all that attention needs to keep them apart. Made once per micro-batch.

    `sampled_ids_P` are the sampled tokens of all sequences in the order given, and `predictor_P` the row's positions
    whose logits predict them (the token before each).
    """

    token_ids_1T: Tensor
    position_ids_1T: Tensor
    predictor_P: Tensor
    sampled_ids_P: Tensor
    longest: int
    """Tokens of the longest sequence."""
    buckets: tuple[Bucket, ...]
    _windows: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, segments: Sequence[Segment], device: torch.device | str = "cpu") -> PackedRow:
        """Lay `segments` out. Raises ValueError if there are none, one is empty, or its first token is sampled."""
        if not segments or any(not segment.token_ids for segment in segments):
            raise ValueError("a packed row needs at least one segment, and every segment at least one token")
        by_length = sorted(range(len(segments)), key=lambda i: (-len(segments[i].token_ids), i))
        starts = dict.fromkeys(by_length, 0)
        tokens: list[int] = []
        positions: list[int] = []
        for i in by_length:
            starts[i] = len(tokens)
            tokens.extend(segments[i].token_ids)
            positions.extend(range(len(segments[i].token_ids)))
        sampled = [starts[i] + p for i, segment in enumerate(segments) for p in segment.sampled_positions]
        if any(positions[p] == 0 for p in sampled):
            raise ValueError("the first token of a segment can't be a sampled one: nothing predicts it")
        lengths = [len(segments[i].token_ids) for i in by_length]
        token_ids_T = torch.tensor(tokens, device=device)
        sampled_P = torch.tensor(sampled, dtype=torch.long, device=device)
        return cls(
            token_ids_1T=token_ids_T[None],
            position_ids_1T=torch.tensor([positions], device=device),
            predictor_P=sampled_P - 1,
            sampled_ids_P=token_ids_T[sampled_P],
            longest=lengths[0],
            buckets=tuple(_buckets(lengths, device)),
        )

    @property
    def length(self) -> int:
        """T, tokens of all sequences."""
        return self.token_ids_1T.shape[1]

    @property
    def cells(self) -> int:
        """Tokens including the padding that attention computes with."""
        return sum(bucket.count * bucket.length for bucket in self.buckets)

    def causal_mask(self, length: int, window: int) -> Tensor:
        """[L, L], True where row i may see column j: i - window < j <= i. Kept for the other layers."""
        mask = self._windows.get((length, window))
        if mask is None:
            ones = torch.ones(length, length, dtype=torch.bool, device=self.token_ids_1T.device)
            mask = ones.tril() & ones.triu(1 - window)
            self._windows[(length, window)] = mask
        return mask


def _buckets(lengths: Sequence[int], device: torch.device | str) -> list[Bucket]:
    """Cut descending lengths into runs whose padding is at most MAX_PADDING_WASTE of the padded batch."""
    buckets: list[Bucket] = []
    first = row_start = 0
    total = 0
    for i, length in enumerate([*lengths, 0]):
        cells = (i + 1 - first) * lengths[first]
        if length and cells - total - length <= MAX_PADDING_WASTE * cells:
            total += length
            continue
        buckets.append(_bucket(row_start, lengths[first:i], device))
        first, row_start, total = i, row_start + total, length
    return buckets


def _bucket(start: int, lengths: Sequence[int], device: torch.device | str) -> Bucket:
    count, longest, total = len(lengths), lengths[0], sum(lengths)
    if lengths[-1] == longest:
        return Bucket(start, start + total, count, longest, None, None)
    lengths_S1 = torch.tensor(lengths)[:, None]
    column_L = torch.arange(longest)[None]
    starts_S1 = lengths_S1.cumsum(0) - lengths_S1
    pad_index = (starts_S1 + torch.minimum(column_L, lengths_S1 - 1)).flatten()
    cell_index = (column_L < lengths_S1).flatten().nonzero()[:, 0]
    return Bucket(start, start + total, count, longest, pad_index.to(device), cell_index.to(device))
