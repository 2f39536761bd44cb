"""Routing: slots are respected, nothing waits while there is room, groups stay together, load stays even."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.serving.client.routing import Router

PROMPTS = [(1,), (2,), (3, 4), (5,)]


def router_of(*slots: int) -> Router:
    router = Router()
    for index, count in enumerate(slots):
        router.set_server(f"s{index}", count)
    return router


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
    router = router_of(*slots)
    open_ = [True] * len(slots)
    placed: dict[str, str] = {}
    for step, (action, number) in enumerate(actions):
        before = dict(router.loads())
        if action == "place":
            server = router.place(f"r{step}", PROMPTS[number])
            free = [i for i, count in enumerate(slots) if open_[i] and before[f"s{i}"] < count]
            assert (server is None) == (not free)
            if server is not None:
                assert int(server[1:]) in free
                placed[f"r{step}"] = server
        elif action == "release" and placed:
            request = sorted(placed)[number % len(placed)]
            router.release(request)
            router.release(request)  # twice is once
            del placed[request]
        elif action == "toggle":
            index = number % len(slots)
            open_[index] = not open_[index]
            router.set_server(f"s{index}", slots[index], open_=open_[index])
        assert router.loads() == {f"s{i}": sum(s == f"s{i}" for s in placed.values()) for i in range(len(slots))}
        assert router.slots == sum(count for i, count in enumerate(slots) if open_[i])


@given(st.lists(st.integers(1, 8), min_size=1, max_size=4), st.integers(1, 30))
def test_different_prompts_go_to_the_least_loaded(slots: list[int], count: int) -> None:
    router = router_of(*slots)
    for number in range(min(count, sum(slots))):
        loads = router.loads()
        least = min(loads[f"s{i}"] / slots[i] for i in range(len(slots)))
        server = router.place(f"r{number}", (number,))
        assert server is not None
        assert loads[server] / slots[int(server[1:])] == least


@given(st.integers(2, 4), st.integers(1, 8))
def test_groups_stay_together_and_are_spread(servers: int, groups: int) -> None:
    """Groups of 4 in servers of 32 slots, submitted one after the other."""
    router = router_of(*[32] * servers)
    homes = []
    for group in range(groups):
        where = {router.place(f"g{group}.{k}", (group,)) for k in range(4)}
        assert len(where) == 1
        homes += where
    counts = [homes.count(f"s{i}") for i in range(servers)]
    assert max(counts) - min(counts) <= 1


@given(st.integers(2, 4), st.integers(0, 100))
def test_one_prompt_alone_can_not_overload_its_server(servers: int, count: int) -> None:
    """With nothing but one prompt, beyond half of the slots nobody gets more than his share, rounded up."""
    slots = 20
    router = router_of(*[slots] * servers)
    count = min(count, servers * slots)
    for number in range(count):
        router.place(f"r{number}", (7,))
    assert max(router.loads().values()) <= max(slots // 2, -(-count // servers))


def test_a_prompt_has_a_home_while_one_of_its_requests_is_in_progress() -> None:
    router = router_of(8, 8)
    home = router.place("a", (1,))
    assert router.place("other", (2,)) != home
    router.place("more", (3,))  # home is now the fuller one
    assert router.place("b", (1,)) == home
    router.release("a")
    assert router.place("c", (1,)) == home
    router.release("b")
    router.release("c")
    assert router.place("filler", (4,)) == home
    assert router.place("d", (1,)) != home


def test_homes_that_nobody_needs_are_forgotten() -> None:
    router = router_of(4)
    for number in range(10):
        router.place(f"r{number}", (number,))
        router.release(f"r{number}")
    assert not router._homes


def test_a_closed_server_gets_nothing_and_a_group_moves() -> None:
    router = router_of(8, 8)
    home = router.place("a", (1,))
    assert home is not None
    router.set_server(home, 8, open_=False)
    other = router.place("b", (1,))
    assert other != home
    router.set_server(home, 8)
    assert router.place("c", (1,)) == other


def test_a_request_for_one_server_goes_there_or_waits() -> None:
    router = router_of(2, 2)
    home = router.place("a", (1,))
    other = "s1" if home == "s0" else "s0"
    assert router.place("b", (1,), only=[other]) == other
    assert router.place("c", (9,), only=[other]) == other
    assert router.place("d", (9,), only=[other]) is None
    assert router.place("e", (1,)) == home  # the group's home is where it was


def test_mistakes_are_refused() -> None:
    router = router_of(4)
    router.place("a", (1,))
    with pytest.raises(ValueError, match="already placed"):
        router.place("a", (1,))
    with pytest.raises(ValueError, match="0 slots"):
        router.set_server("s0", 0)
