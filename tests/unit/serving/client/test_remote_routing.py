"""Routing: slots are respected, nothing waits while there is room, groups stay together, load stays even."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.serving.client.adapter import Bounds, ServerBusyError, ServerUnreachableError
from pipelinerl.serving.client.fleet import Fleet, Replica
from tests.unit.fake_engine_servers import FAST, FakeServer

PROMPTS = [(1,), (2,) * 70, (2,) * 40, (5,) * 33]


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def pool_of(*slots: int, bounds: Bounds = FAST, clock: Clock | None = None) -> Fleet:
    """A pool whose servers have answered once."""
    servers = [FakeServer(f"s{index}", slots=count) for index, count in enumerate(slots)]
    replicas = [Replica(server, bounds, clock or Clock()) for server in servers]

    async def start() -> None:
        for replica in replicas:
            await replica.first_answer()

    asyncio.run(start())
    return Fleet(replicas)


def place(pool: Fleet, prompt: tuple[int, ...], *only: int) -> int | None:
    """The index of the server that gets the request."""
    allowed = [pool.replicas[index] for index in only] or pool.replicas
    chosen = pool.choose(prompt, allowed)
    return None if chosen is None else pool.replicas.index(chosen)


@given(
    slots=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    actions=st.lists(
        st.one_of(
            st.tuples(st.just("place"), st.integers(0, 3)),
            st.tuples(st.just("release"), st.integers(0, 200)),
            st.tuples(st.just("toggle"), st.integers(0, 3)),
        ),
        max_size=120,
    ),
)
def test_whatever_happens_slots_are_respected_and_room_is_used(slots: list[int], actions: list[tuple[str, int]]) -> None:
    pool = pool_of(*slots)
    open_ = [True] * len(slots)
    placed: list[tuple[int, tuple[int, ...]]] = []
    for action, number in actions:
        before = [replica.load for replica in pool.replicas]
        if action == "place":
            server = place(pool, PROMPTS[number])
            free = [index for index, count in enumerate(slots) if open_[index] and before[index] < count]
            assert (server is None) == (not free)
            if server is not None:
                assert server in free
                placed.append((server, PROMPTS[number]))
        elif action == "release" and placed:
            server, _ = placed.pop(number % len(placed))
            pool.replicas[server].load -= 1
        elif action == "toggle":
            index = number % len(slots)
            open_[index] = not open_[index]
            if open_[index]:
                pool.replicas[index].recovered()
            else:
                pool.replicas[index].record_failure(ServerBusyError("s", "is busy"))
        assert [replica.load for replica in pool.replicas] == [sum(s == i for s, _ in placed) for i in range(len(slots))]
        assert pool.slots == sum(count for count, is_open in zip(slots, open_, strict=True) if is_open)


@given(st.integers(2, 4), st.integers(1, 8))
def test_groups_stay_together_and_are_spread(servers: int, groups: int) -> None:
    """Groups of 4 in servers of 32 slots, submitted one after the other."""
    pool = pool_of(*[32] * servers)
    homes = []
    for group in range(groups):
        where = {place(pool, (group,) * 32) for _ in range(4)}
        assert len(where) == 1
        homes += where
    counts = [homes.count(index) for index in range(servers)]
    assert max(counts) - min(counts) <= 1


def test_the_next_turn_goes_to_the_server_of_the_turns_before() -> None:
    """As long as that server is the same process, and may still hold them."""
    pool = pool_of(8, 8, 8)
    first, last = (1,) * 40, (1,) * 60 + (2,) * 40
    for replica in pool.replicas:
        replica.hold(first)  # all have the system prompt
    pool.replicas[2].hold(last)
    assert [place(pool, (*last, 3)) for _ in range(3)] == [2, 2, 2]
    assert place(pool, first) == 0
    pool.replicas[2].hold(range(10_000_000, 10_040_000))
    assert place(pool, (*last, 3)) == 1


@given(st.integers(2, 4), st.integers(0, 100))
def test_one_prompt_alone_can_not_overload_its_server(servers: int, count: int) -> None:
    """With nothing but one prompt, beyond half of the slots no server gets more than its share, rounded up."""
    slots = 20
    pool = pool_of(*[slots] * servers)
    count = min(count, servers * slots)
    for _ in range(count):
        place(pool, (7,) * 50)
    assert max(replica.load for replica in pool.replicas) <= max(slots // 2, -(-count // servers))


@pytest.mark.parametrize(("refused", "bound_s"), [(True, 3.0), (False, 30.0)])
def test_a_server_has_one_failure_clock_and_an_answer_stops_it(refused: bool, bound_s: float) -> None:
    clock = Clock()
    pool = pool_of(2, bounds=Bounds(refused_s=3.0, silent_s=30.0), clock=clock)
    (replica,) = pool.replicas
    error = ServerUnreachableError("s0", "does not answer", refused=refused)
    for _ in range(2):
        replica.record_failure(error)
        clock.now_s += bound_s - 0.5
        replica.record_failure(error)
        assert not replica.gone
        replica.recovered()
    replica.record_failure(ServerUnreachableError("s0", "is silent"))
    clock.now_s += bound_s
    replica.record_failure(error)
    assert replica.gone
    assert "s0 does not answer" in str(pool.unavailable())
    replica.recovered()
    assert pool.unavailable() is None
