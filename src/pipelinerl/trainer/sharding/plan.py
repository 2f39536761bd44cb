"""Plans an optimizer step over several ranks: which rank computes which samples in which micro-batch. Pure.

              rank 0   rank 1   rank 2
    row 0      bin      bin      bin       the most expensive bins
    row 1      bin      bin      bin
    row 2      bin      bin     (empty)    the cheapest ones

A row is one micro-batch on every rank. Sharded weights are gathered layer by layer, so ranks wait for each other within a
row, not only at the end of the step: the bins of a *row* have to be even. Every rank has a place in every row, and an empty
place is computed as well (with a loss of 0). So all ranks make the same number of collective calls, for any samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any

from pipelinerl.trainer.micro_batch import pack, padded_bins

Grid = list[list[list[int]]]
"""Row -> rank -> indices of samples. Only places in the last row may be empty."""


def attention_cost(model: Any) -> float:
    """The cost of a token's attention to one other token, in units of one token's matrix products."""
    text = model.config.get_text_config()
    heads = getattr(text, "num_attention_heads", 1)
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    matrices = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    return float(text.num_hidden_layers * heads * width / matrices)


def token_cost(lengths: Sequence[int], attention: float) -> float:
    """The cost of sequences of these lengths, in units of one token's matrix products. `attention`: of `attention_cost`."""
    return sum(length + attention * length * length for length in lengths)


def plan(lengths: Sequence[int], costs: Sequence[float], ranks: int, budget: int) -> Grid:
    """Distribute samples of `lengths` (tokens) and positive `costs` over ranks, in bins of at most `budget` tokens.

    There are as few rows as `pack` needs, or a few more if that many even bins don't exist. A sample longer than the budget
    gets a bin of its own. No samples: no rows. Raises ValueError like `pack`.
    """
    rows = -(-len(pack(lengths, budget)) // ranks)
    while (bins := _even_bins(lengths, costs, rows * ranks, budget)) is None:
        rows += 1
    bins.sort(key=lambda indices: (-sum(costs[i] for i in indices), indices))
    grid = [bins[start : start + ranks] for start in range(0, len(bins), ranks)]
    # Every other row is reversed, so that the first rank does not have the most expensive bin of each.
    return [row[::-1] if number % 2 else row for number, row in enumerate(grid)]


def plan_padded(lengths: Sequence[Sequence[int]], ranks: int, budget: int) -> Grid:
    """Like `plan`, for a model that computes a bin as one padded batch: a bin costs its tokens with padding.

    `lengths` has the lengths of each sample's sequences. The bins are the smallest ones that need no more rows than bins of
    `budget` tokens do. Neighbouring bins hold sequences of similar length.
    """
    rows = -(-len(padded_bins(lengths, budget)) // ranks)
    low, high = 0, budget  # the smallest sufficient budget is in low < b <= high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if len(padded_bins(lengths, middle)) <= rows * ranks else (middle, high)
    bins = padded_bins(lengths, high)
    return [bins[start : start + ranks] + [[]] * (start + ranks - len(bins)) for start in range(0, len(bins), ranks)]


def _even_bins(lengths: Sequence[int], costs: Sequence[float], count: int, budget: int) -> list[list[int]] | None:
    """`count` bins of similar cost: the most expensive sample first, each into the cheapest bin with room.

    None if a sample finds no room.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    cheapest = [(0.0, number, 0) for number in range(count)]  # a heap of (cost, bin, tokens)
    for index in sorted(range(len(lengths)), key=lambda i: (-costs[i], i)):
        full = []
        while cheapest:
            cost, number, tokens = heappop(cheapest)
            if not tokens or tokens + lengths[index] <= budget:
                bins[number].append(index)
                heappush(cheapest, (cost + costs[index], number, tokens + lengths[index]))
                break
            full.append((cost, number, tokens))
        else:
            return None
        for entry in full:
            heappush(cheapest, entry)
    return [sorted(indices) for indices in bins]
