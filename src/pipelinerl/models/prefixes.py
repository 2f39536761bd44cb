"""Prefixes that sequences share, and the tree of token runs that holds each shared token once.

    p p p p a a a                 ┌── p a a a
    p p p p b b        p p p ─────┤
    p p p p c          a run      └── p b b, p c

In lexicographic order, sequences with a common prefix are neighbours: a sequence is compared with the one before it only.
Every branch has its own copy of the last common token. So each token of the tree predicts one token, and its logits and
their gradient have one place: a sum over repeated places has no fixed order on several threads.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from pipelinerl.types import Segment

LEAST_SHARED = 0.15
"""A sequence shares a prefix of at least this part of its tokens. Less does not pay on a CPU (docs/benchmarks.md)."""
BLOCK = 256
"""A part of the tree of at most this many tokens is one block in attention: one masked call replaces many short ones."""


@dataclass(slots=True, eq=False)
class TokenRun:
    """The tokens `start` to `end` of `sequence`, and of all sequences that share them. They continue those of `parent`.

    A packed row has them from `row_start` on, and then all that continues them: `tokens` together.
    """

    sequence: int
    end: int
    start: int = 0
    parent: TokenRun | None = None
    children: list[TokenRun] = field(default_factory=list)
    tokens: int = 0
    row_start: int = 0

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def apart(self) -> bool:
        """This is a block, and what continues it are other blocks."""
        return bool(self.children) and self.tokens > BLOCK


def shared_prefixes(segments: Sequence[Segment], least: float) -> tuple[list[int], list[int]]:
    """The lexicographic order of `segments`, and for each in this order the tokens that it shares with the one before it.

    `least`: the least part of a sequence that is shared; 1: none, and the order is unchanged. Prefixes end before a range of
    trained tokens, or further on if that much more is shared. Other segments between two only raise what the second one
    shares. So the sum over a subset of the segments, in this order, is an upper bound of the tokens of their tree.
    """
    if least >= 1.0 or not segments:
        return [*range(len(segments))], [0] * len(segments)
    order = sorted(range(len(segments)), key=lambda i: (segments[i].token_ids, i))
    return order, [0, *(_shared(segments[before].token_ids, segments[i], least) for before, i in pairwise(order))]


def _shared(before: tuple[int, ...], segment: Segment, least: float) -> int:
    ids, needed = segment.token_ids, max(1.0, least * len(segment.token_ids))
    if ids[: int(needed)] != before[: int(needed)]:
        return 0
    lengths = range(1, min(len(ids), len(before)) + 1)
    most = bisect_left(lengths, True, key=lambda length: ids[:length] != before[:length]) - 1
    ends = (start - 1 for start, _ in (*segment.sampled, *segment.supervised))
    shared = max((end for end in ends if end <= most), default=0)
    shared = most if most - shared >= needed else shared
    return shared if shared >= needed else 0


def runs_of(lengths: Sequence[int], order: Sequence[int], shared: Sequence[int]) -> tuple[list[TokenRun], list[TokenRun]]:
    """The runs of the tree in the order of a row, and the last run of each sequence.

    `lengths`: of the sequences; `order`, `shared`: of `shared_prefixes`. What continues a run follows it in the row: first
    what nothing else continues, the longest first, then the other blocks.
    """
    leaves = [TokenRun(sequence, length) for sequence, length in enumerate(lengths)]
    root = TokenRun(-1, 0)
    path = [root]  # to the sequence before
    for leaf, depth in [*zip((leaves[i] for i in order), shared, strict=True), (root, 0)]:
        while path[-1].end > depth:
            run = path.pop()
            if path[-1].end < depth:
                path.append(TokenRun(run.sequence, depth))
            run.start, run.parent = path[-1].end, path[-1] if path[-1] is not root else None
            run.tokens = len(run) + sum(one.tokens for one in run.children)
            path[-1].children.append(run)
        path.append(leaf)
    runs, waiting, place = [], [root], 0
    while waiting:
        runs.append(run := waiting.pop())
        run.row_start, place = place, place + len(run)
        waiting += sorted(run.children, key=lambda one: (one.apart, bool(one.children), -one.tokens, one.sequence))[::-1]
    return runs[1:], leaves
