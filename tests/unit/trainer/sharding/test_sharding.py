"""Ranks: how they find each other, errors of their operations, and the plan of a step: complete, within the budget, even."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed

from pipelinerl.channel import listen
from pipelinerl.config.schema import TrainerConfig
from pipelinerl.errors import RankLostError
from pipelinerl.models.packed import PackedRow
from pipelinerl.trainer.micro_batch import in_order, pack, pack_shared, padded_bins
from pipelinerl.trainer.sharding import ranks
from pipelinerl.trainer.sharding.learner import plan, plan_padded, plan_shared
from pipelinerl.trainer.sharding.ranks import Team, join
from pipelinerl.types import Segment

ATTENTION = 0.01
LENGTHS = st.lists(st.lists(st.integers(1, 150), min_size=1, max_size=3), max_size=40)


def cost(lengths: list[int]) -> float:
    return sum(length + ATTENTION * length**2 for length in lengths)


@given(LENGTHS, st.integers(1, 9), st.integers(1, 400), st.booleans())
def test_every_sample_has_one_place_and_rows_are_full_few_and_descend_in_cost(
    lengths: list[list[int]], ranks: int, budget: int, padded: bool
) -> None:
    grid = plan_padded(lengths, ranks, budget) if padded else plan(lengths, ATTENTION, ranks, budget)
    places = [place for row in grid for place in row]
    assert all(len(row) == ranks for row in grid)
    assert sorted(index for place in places for index in place) == list(range(len(lengths)))
    assert all(all(row) for row in grid[:-1]), "only the last row has empty places"
    assert all(any(row) for row in grid)
    if padded:
        longest = [max((max(lengths[index]) for index in place), default=0) for place in places]
        cells = [sum(len(lengths[index]) for index in place) * most for place, most in zip(places, longest, strict=True)]
        assert all(len(place) <= 1 or size <= budget for place, size in zip(places, cells, strict=True))
        assert len(grid) == -(-len(padded_bins(lengths, budget)) // ranks)
        return
    tokens = [sum(of_sample) for of_sample in lengths]
    assert all(len(place) <= 1 or sum(tokens[index] for index in place) <= budget for place in places)
    assert all(places) or all(len(place) <= 1 for place in places), "one is empty only if every other has one sample"
    # Any two bins of `pack` exceed the budget; even bins waste at most about half of it, too.
    assert len(grid) <= 2 * -(-len(pack(tokens, budget)) // ranks) + 1
    rows = [[sum(cost(lengths[index]) for index in place) for place in row] for row in grid]
    assert all(min(above) >= max(below) - 1e-6 for above, below in pairwise(rows))


@given(LENGTHS.filter(bool), st.integers(2, 9))
def test_a_row_is_even(lengths: list[list[int]], ranks: int) -> None:
    """Greedy distribution: two places differ by at most one sample."""
    (row,) = plan(lengths, ATTENTION, ranks, sum(map(sum, lengths)))
    sums = [sum(cost(lengths[index]) for index in place) for place in row]
    assert max(sums) - min(sums) <= max(map(cost, lengths)) * (1 + 1e-9)


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), max_size=20), st.integers(1, 4), st.integers(1, 60))
def test_samples_that_share_prefixes_have_one_place_and_rows_are_few_and_even(
    drawn: list[list[int]], ranks: int, budget: int
) -> None:
    samples = [[Segment(token_ids=tuple(ids), sampled=((len(ids) // 2 + 1, len(ids)),))] for ids in drawn]
    ordered = in_order(samples, 0.2, ATTENTION)
    grid = plan_shared(ordered, ranks, budget)
    places = [place for row in grid for place in row]
    assert sorted(index for place in places for index in place) == list(range(len(samples)))
    assert all(len(row) == ranks for row in grid)
    assert all(all(row) for row in grid[:-1])
    for place in filter(None, places):
        row = PackedRow.of([segment for index in place for segment in samples[index]], least_shared=0.2)
        assert row.length <= budget or len(place) == 1
    assert len(grid) <= 2 * -(-len(pack_shared(samples, budget, 0.2)) // ranks) + 1


@pytest.mark.parametrize(
    ("grid", "expected"),
    [
        (plan([[8], [7], [6], [5]], 0.0, 2, 8), [[[0], [1]], [[3], [2]]]),
        (plan([[50, 50], [100]], 0.01, 2, 100), [[[1], [0]]]),
        (plan_padded([[40], [10], [38], [12]], 2, 200), [[[0, 2], [3, 1]]]),
        (plan_shared([(2, 60, 0), (0, 60, 50), (1, 60, 0), (3, 60, 50)], 2, 200), [[[2, 0], [1, 3]]]),
        (plan_shared([(2, 60, 0), (0, 60, 50), (1, 60, 50), (3, 60, 50)], 2, 200), [[[2, 0], [1, 3]]]),
    ],
    ids=[
        "every other row is reversed",
        "a long sequence costs more than two short ones",
        "padded: similar lengths",
        "groups stay together",
        "ranks wait for each other: each gets half of a group",
    ],
)
def test_examples(grid: list[list[list[int]]], expected: list[list[list[int]]]) -> None:
    assert grid == expected


KEY, LONG_S = "key", 60.0


def meet(rank: int, size: int, listener: socket.socket, key: str = KEY, start_s: float = LONG_S) -> str:
    """Why the rank does not meet the others; "" if it does."""
    meeting = listener if rank == 0 else listener.getsockname()[:2]
    try:
        with ranks._broken_operations_explained():
            ranks._meet(TrainerConfig(ranks=size), rank, meeting, key, start_s).close()
    except RankLostError as error:
        return str(error)
    return ""


def test_ranks_that_do_not_start_are_named_and_one_with_another_key_is_no_rank() -> None:
    listener = listen()
    with ThreadPoolExecutor(2) as pool:
        rank_0, _ = (pool.submit(meet, rank, 4, listener, start_s=1.0) for rank in (0, 2))
        assert "does not have the key of this run" in meet(1, 4, listener, key="another")
    assert rank_0.result() == "rank 1, rank 3 of the trainer did not start within 1 s"


def test_a_rank_0_that_is_gone_is_reported() -> None:
    listener = listen()
    listener.close()
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    with pytest.raises(RankLostError, match="rank 0 of the trainer can't be reached"):
        ranks._meet(TrainerConfig(ranks=2), 1, address, KEY, 1.0)


def alone() -> AbstractContextManager[Team]:
    return join(TrainerConfig(ranks=1), 0, listen(), KEY, start_s=LONG_S, stall_s=LONG_S)


def test_the_group_listens_at_the_address_of_rank_0_only() -> None:
    """Gloo itself has no key: on the loopback address it is out of reach of other machines."""
    before = listening()
    with alone() as team:
        assert (team.rank, team.size) == (0, 1)
        found = listening() - before
    assert {address.partition(":")[0] for address in found} == {"0100007F"}
    assert not distributed.is_initialized()


def listening() -> set[str]:
    """ADDRESS:PORT, in hexadecimal, of the sockets at which this process listens."""
    own = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists()}
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return {fields[1] for fields in lines if fields[3] == "0A" and f"socket:[{fields[9]}]" in own}


LEFT = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:7. This is\nC++"


@pytest.mark.parametrize(
    ("message", "error", "expected"),
    [
        (LEFT, RankLostError, r"exchange tensors any more: Connection closed by peer \[127\.0\.0\.1\]:7$"),
        ("out of memory", RuntimeError, "^out of memory$"),
    ],
)
def test_the_error_of_an_operation_that_a_rank_has_left_is_one_line_and_others_stay(
    message: str, error: type[Exception], expected: str
) -> None:
    with pytest.raises(error, match=expected), alone():
        raise_after_leaving(message)


def raise_after_leaving(message: str) -> None:
    distributed.destroy_process_group()
    raise RuntimeError(message)


def test_gpus_are_counted_from_the_configured_one_on() -> None:
    assert [TrainerConfig(ranks=2, device="cuda:2").rank_device(rank) for rank in (0, 1)] == ["cuda:2", "cuda:3"]
    assert TrainerConfig(ranks=2).rank_device(1) == "cpu"
