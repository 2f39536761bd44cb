"""The tree of shared prefixes, and attention over it, against each sequence alone, token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipelinerl.models import packed, prefixes
from pipelinerl.models.packed import PackedRow
from pipelinerl.models.prefixes import runs_of, shared_prefixes
from pipelinerl.models.shared import ScoreRule, attend_shared
from pipelinerl.models.varlen import attend_row
from pipelinerl.types import Segment

IDS = st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple)
SEQUENCES = st.lists(st.tuples(IDS, st.integers(1, 12)), min_size=1, max_size=12)
LEAST = st.sampled_from([0.0, 0.2, 0.5])


def segments_of(drawn: list[tuple[tuple[int, ...], int]]) -> list[Segment]:
    """Sequences that are trained from some position to the end."""
    return [Segment(token_ids=ids, sampled=((start, len(ids)),) if start < len(ids) else ()) for ids, start in drawn]


def tree_of(segments: list[Segment], least: float) -> tuple[list[prefixes.TokenRun], list[prefixes.TokenRun]]:
    return runs_of([len(segment.token_ids) for segment in segments], *shared_prefixes(segments, least))


def keys_of(segments: list[Segment], least: float) -> list[list[int]]:
    """For each sequence, the places of its tokens in the row."""
    _, leaves = tree_of(segments, least)
    return [[packed._place(leaf, p) for p in range(len(s.token_ids))] for s, leaf in zip(segments, leaves, strict=True)]


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(SEQUENCES, LEAST, st.sampled_from([0, 9, 256]))
@settings(max_examples=150)
def test_a_row_has_every_sequence_and_each_token_predicts_one(drawn: Any, least: float, block: int) -> None:
    segments = segments_of(drawn)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes, "BLOCK", block)
        row, places = PackedRow.of(segments, least_shared=least), keys_of(segments, least)
    ids, positions = row.token_ids_1T[0].tolist(), row.position_ids_1T[0].tolist()
    for segment, of_sequence in zip(segments, places, strict=True):
        assert tuple(ids[place] for place in of_sequence) == segment.token_ids
        assert [positions[place] for place in of_sequence] == [*range(len(of_sequence))]
        for i, place in enumerate(of_sequence):  # intervals: a token sees what continues up to it, and nothing else
            stops = [row.length] * row.length if row.stops_T is None else row.stops_T.tolist()
            if row.stops_T is not None:
                assert of_sequence[: i + 1] == [at for at in range(place + 1) if place < stops[at]]
    predicted: dict[int, int] = {}
    for segment, of_sequence in zip(segments, places, strict=True):
        for p in segment.trained_positions:
            assert predicted.setdefault(of_sequence[p - 1], segment.token_ids[p]) == segment.token_ids[p]
    trained = [(of[p - 1], s.token_ids[p]) for s, of in zip(segments, places, strict=True) for p in s.trained_positions]
    index = [*range(len(trained))] if row.trained_index is None else row.trained_index.tolist()
    found = [*zip(row.predictor_P.tolist(), row.target_ids_P.tolist(), strict=True)]
    assert [found[i] for i in index] == trained
    assert len({predictor for predictor, _ in found}) == len(found)
    assert sum(bucket.end - bucket.start for bucket in row.buckets) == row.length


@given(SEQUENCES)
def test_what_is_shared_is_a_longest_common_prefix_but_its_last_token(drawn: Any) -> None:
    """Where it is long enough: then what sequences have in common, and no more, is there once."""
    segments = segments_of(drawn)
    order, shared = shared_prefixes(segments, 0.0)
    for place, i in enumerate(order[1:], 1):
        ids = segments[i].token_ids
        longest = max(common(ids, segments[before].token_ids) for before in order[:place])
        assert shared[place] == max(0, longest - 1)
    runs, _ = tree_of(segments, 0.0)
    assert sum(map(len, runs)) == sum(len(s.token_ids) for s in segments) - sum(shared)


@given(SEQUENCES, LEAST, st.sets(st.integers(0, 11)))
def test_a_subset_has_at_most_the_tokens_that_its_neighbours_do_not_share(drawn: Any, least: float, more: set[int]) -> None:
    """Packing counts neighbours of the order; other sequences in the same row only lower the number of tokens."""
    segments = segments_of(drawn)
    order, shared = shared_prefixes(segments, least)
    half = order[: -(-len(order) // 2)]
    counted = sum(len(segments[i].token_ids) for i in half) - sum(shared[: len(half)])
    others = [i for i in order[len(half) :] if i in more]
    counted += sum(len(segments[i].token_ids) for i in others)
    runs, _ = tree_of([segments[i] for i in (*half, *others)], least)
    assert sum(map(len, runs)) <= counted


def test_short_and_chance_prefixes_are_not_shared() -> None:
    prompt = tuple(range(10, 50))
    attempts = [Segment(token_ids=(*prompt, 1, 2, n, *range(60)), sampled=((40, 103),)) for n in (3, 4)]
    other = Segment(token_ids=(*prompt[:9], *range(60)), sampled=((9, 69),))
    assert shared_prefixes([*attempts, other], 0.2)[1] == [0, 0, 39], "up to the answers; 8 tokens of 69 are too few"
    same = [Segment(token_ids=attempts[0].token_ids, sampled=((40, 103),)) for _ in range(2)]
    assert shared_prefixes(same, 0.2)[1] == [0, 102]


def literal(projected: list[Tensor], keys: list[list[int]], scores: ScoreRule, sinks: Tensor | None) -> Tensor:
    """[h, T, D] each -> [T, h, D]: one query of one sequence after the other."""
    q, k, v = projected
    groups, found = q.shape[0] // k.shape[0], {}
    for of_sequence in keys:
        for p, place in enumerate(of_sequence):
            seen = of_sequence[: p + 1] if scores.window is None else of_sequence[max(0, p + 1 - scores.window) : p + 1]
            heads = []
            for head in range(q.shape[0]):
                products = k[head // groups, seen] @ q[head, place] * scores.scale
                if scores.softcap is not None:
                    products = scores.softcap * torch.tanh(products / scores.softcap)
                if sinks is not None:
                    products = torch.cat((products, sinks[head : head + 1]))
                heads.append(products.softmax(0)[: len(seen)] @ v[head // groups, seen])
            found[place] = torch.stack(heads)
    return torch.stack([found[place] for place in range(len(found))])


@pytest.mark.parametrize("block", [0, 14, 256])
@pytest.mark.parametrize("kind", ["full", "window", "softcap", "softcap, window", "sinks", "narrow values", "one call"])
def test_attention_and_its_gradients_are_those_of_each_sequence(
    kind: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefixes, "BLOCK", block)
    draw = torch.Generator().manual_seed(2)
    drawn = [((*(0, 1, 2, 0, 1)[: n % 6], *torch.randint(0, 3, (n,), generator=draw).tolist()), 3) for n in range(3, 14)]
    segments = segments_of([*drawn, *drawn[4:6], *drawn[-1:]])
    monkeypatch.setattr(packed, "_in_one_call", lambda _: kind == "one call")
    row = PackedRow.of(segments, least_shared=0.0)
    assert row.length < sum(len(segment.token_ids) for segment in segments)
    assert bool(row.prefixes) == (block < 256)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=draw, dtype=torch.float64).requires_grad_()

    given_ = [normal(4, row.length, 6), normal(2, row.length, 6), normal(2, row.length, 4 if kind == "narrow values" else 6)]
    sinks = normal(4) if kind == "sinks" else None
    scores = ScoreRule(0.7, 3 if "window" in kind else None, 1.5 if "softcap" in kind else None)
    inputs = given_ if sinks is None else [*given_, sinks]
    batch = [x[None] for x in given_]
    if kind == "one call":
        attended = attend_row(row, *batch, scale=0.7, window=None)
        assert attended is not None
    else:
        attended = attend_shared(row, batch, scores, sinks)
    weights = torch.randn(attended.shape, generator=draw, dtype=torch.float64)
    expected = literal(given_, keys_of(segments, 0.0), scores, sinks)
    torch.testing.assert_close(attended[0], expected, atol=1e-10, rtol=0)
    wanted = torch.autograd.grad((expected * weights[0]).sum(), inputs)
    for found, one in zip(torch.autograd.grad((attended * weights).sum(), inputs), wanted, strict=True):
        torch.testing.assert_close(found, one, atol=1e-10, rtol=0)
