"""The watchdog's verdicts: what counts as movement, what a stall says; and the board from which it reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pipelinerl.interfaces import PipelineState
from pipelinerl.schedule import AsyncSchedule, ConventionalSchedule, PipelineSchedule, Schedule
from pipelinerl.status.board import REFRESH_S, MemoryBoard, StatusReporter, last_statuses, read_statuses, write_statuses
from pipelinerl.status.watchdog import Watchdog, find_cycle, waits_on
from pipelinerl.types import ActorProgress, EngineProgress, Progress, StageStatus, TrainerProgress
from tests.limits import small_files
from tests.unit.record_parts import status, statuses_of

Statuses = dict[str, StageStatus]


def stuck(now: float, **changed: Progress) -> Statuses:
    """A run in which everyone reports and nobody moves, except for what is `changed`."""
    progress = {"engine": EngineProgress(tokens_generated=9, busy_s=now), "actor": ActorProgress()}
    progress |= {"trainer": TrainerProgress(version=3)} | changed
    waits = {
        "engine": ("actor", "a prompt"),
        "actor": ("trainer", "64 rollouts are outstanding"),
        "trainer": ("actor", "3 of 64 samples are here"),
    }
    times = {"since_s": 5.0, "written_s": now}
    return statuses_of(
        *(status(one, "waiting", why, progress[one], waits_for=(on,), **times) for one, (on, why) in waits.items())
    )


def watch(statuses: Callable[[float], Statuses], seconds: int = 400) -> tuple[float, list[str]] | None:
    """The first stall of a watchdog of 30 s: when it was seen, and its lines."""
    watchdog = Watchdog(30.0)
    for now in range(seconds):
        if stall := watchdog.observe(statuses(now), now):
            return now, stall.splitlines()
    return None


def test_nothing_moves_for_the_timeout() -> None:
    assert watch(stuck, 30) is None
    found = watch(stuck)
    assert found is not None
    now, lines = found
    assert now == 30
    assert lines[0] == "nothing has moved for 30 s (launch.watchdog_s is 30):"
    assert lines[1] == "  engine (pid 7): waiting for 25 s: a prompt [waits on: actor]"
    assert lines[3] == "  trainer (pid 7): waiting for 25 s: 3 of 64 samples are here [waits on: actor]"
    assert lines[4].startswith("  circular wait: ")


def alone(stage: str, state: str, progress: Any = None, written_s: float = 0.0) -> Statuses:
    return statuses_of(status(stage, state, "", progress, written_s=written_s))


STALLS: dict[str, tuple[Callable[[float], Statuses], int | None]] = {
    "tokens": (lambda now: stuck(now, engine=EngineProgress(tokens_generated=now // 20)), None),
    "rollouts that are dropped": (lambda now: stuck(now, actor=ActorProgress(rollouts_dropped={"x": now // 20})), None),
    "an evaluation": (lambda now: stuck(now, actor=ActorProgress(evaluated=now // 20)), None),
    "micro-batches": (lambda now: stuck(now, trainer=TrainerProgress(micro_batches=now // 20)), None),
    "time spent is no progress": (
        lambda now: stuck(now, trainer=TrainerProgress(version=3, latest={"loss": now}, busy_s=now, ready_s=now)),
        30,
    ),
    "going from waiting to working and back is no progress": (
        lambda now: stuck(now) | alone("engine", "working" if now % 2 else "waiting", EngineProgress(), now),
        30,
    ),
    "a stage that starts late has its own bound": (
        lambda now: stuck(now) | alone("trainer", "starting" if now < 300 else "waiting"),
        330,
    ),
    "a finished run": (lambda now: alone("trainer", "done", TrainerProgress(version=9)), None),
    "an empty board": (lambda now: {}, None),
    "the trainer is done and the engine never ends": (
        lambda now: stuck(now) | alone("trainer", "done", TrainerProgress(version=9), now),
        30,
    ),
    "a waiting stage need not report": (
        lambda now: (
            alone("engine", "working", EngineProgress(tokens_generated=int(now)), now)
            | alone("trainer", "waiting", TrainerProgress())
        ),
        None,
    ),
}


@pytest.mark.parametrize("name", STALLS)
def test_when_a_run_is_stalled(name: str) -> None:
    statuses, stalled_s = STALLS[name]
    found = watch(statuses)
    assert (found and found[0]) == stalled_s


def hung(now: float) -> Statuses:
    """The trainer works and stops reporting; the engine goes on."""
    trainer = alone("trainer", "working", TrainerProgress(version=3), min(now, 50.0))
    return alone("engine", "working", EngineProgress(tokens_generated=int(now)), now) | trainer


def stopped(now: float) -> Statuses:
    """The engine's process was stopped while it waited, and holds up all others: a suspect once nothing moves."""
    moving = stuck(now, trainer=TrainerProgress(version=int(min(now, 20.0))))
    return moving | {"engine": stuck(min(now, 7.0))["engine"]}


@pytest.mark.parametrize(
    ("statuses", "seen_s", "first", "suspects"),
    [(hung, 80, "trainer hung", {"trainer": 30}), (stopped, 50, "nothing has moved", {"engine": 43})],
)
def test_a_stage_that_stops_reporting_is_the_suspect(
    statuses: Callable[[float], Statuses], seen_s: int, first: str, suspects: dict[str, int]
) -> None:
    now, (head, *lines) = watch(statuses) or (0, [""])
    assert (now, first in head) == (seen_s, True)
    found = {line.split()[0]: line for line in lines if "SUSPECT" in line}
    assert found.keys() == suspects.keys()
    assert all(f"SUSPECT: it has not reported since, {suspects[stage]} s ago" in found[stage] for stage in suspects)


def test_time_in_which_nobody_looked_does_not_make_a_stall() -> None:
    watchdog = Watchdog(60.0)
    assert watchdog.observe(stuck(0), 0) is None
    assert watchdog.observe(stuck(5000), 5000) is None  # the whole run was suspended
    for now in range(5001, 5045):
        assert watchdog.observe(stuck(now), now) is None
    assert watchdog.observe(stuck(5045), 5045) is not None


@given(st.lists(st.tuples(st.floats(0.1, 9.0), st.booleans()), min_size=1, max_size=80))
def test_a_stall_is_exactly_a_timeout_without_movement(looks: list[tuple[float, bool]]) -> None:
    watchdog, timeout_s = Watchdog(40.0), 40.0
    now, tokens, quiet_s = 0.0, 0, 0.0
    watchdog.observe(alone("engine", "waiting", EngineProgress()), now)
    for elapsed_s, moved in looks:
        now += elapsed_s
        tokens += moved
        quiet_s = 0.0 if moved else quiet_s + elapsed_s
        seen = watchdog.observe(alone("engine", "waiting", EngineProgress(tokens_generated=tokens)), now)
        if abs(quiet_s - timeout_s) > 1e-6:
            assert (seen is not None) == (quiet_s > timeout_s)


def test_only_a_waiting_stage_waits_on_others_never_on_itself_and_an_actor_stands_for_all() -> None:
    stages = {"engine-1": 0, "actor-0": 0, "actor-1": 0, "actor-10": 0, "trainer": 0}
    waiting = status("trainer", "waiting", "the engine", waits_for=("actor", "trainer", "nobody"))
    assert waits_on(waiting, stages) == ("actor-0", "actor-1", "actor-10")
    assert waits_on(replace(waiting, state="working"), stages) == ()
    assert waits_on(status("engine-1", "waiting", waits_for=("actor-1",)), stages) == ("actor-1",)
    a, b, c, d = (status(one, "waiting", waits_for=(on,)) for one, on in ("ab", "bc", "cd", "db"))
    assert find_cycle(statuses_of(a, b, c)) == ()
    cycle = find_cycle(statuses_of(a, b, c, d))
    assert [*cycle, *cycle][(at := [*cycle].index("b")) : at + 3] == ["b", "c", "d"]


SCHEDULES = [
    PipelineSchedule(4, max_lag=1),
    PipelineSchedule(4, stock=4),
    ConventionalSchedule(4, 2),
    AsyncSchedule(4, 1),
]


@given(
    schedule=st.sampled_from(SCHEDULES),
    trainer=st.integers(0, 6),
    behind=st.integers(0, 3),
    outstanding=st.integers(0, 40),
    processes=st.integers(1, 2),
)
def test_every_wait_of_a_schedule_names_the_stage_that_can_end_it(
    schedule: Schedule, trainer: int, behind: int, outstanding: int, processes: int
) -> None:
    version = max(0, trainer - behind)
    state = PipelineState(
        engine_version=version,
        trainer_version=trainer,
        oldest_in_progress=version,
        outstanding=outstanding,
        handed_over=outstanding // 2,
        latency=0.5,
        newest_version=version,
        own=outstanding // 2,
        processes=processes,
    )
    admission, training = schedule.may_start(state, 2), schedule.may_train(trainer, outstanding)
    assert admission.allowed or admission.waits_for in {("trainer",), ("actor",)}
    assert training.allowed or training.waits_for == ("actor",)


STATUSES = statuses_of(
    status("actor", "waiting", "waiting", ActorProgress(rollouts_dropped={"timeout": 2}), machine="b"),
    status("engine", "working", "decoding", EngineProgress(version=2, pauses_s=(0.1, 0.2))),
    status("launcher", waits_for=("actor",)),
    status("trainer", "working", "step 1", TrainerProgress(version=3, latest={"ess": 0.97})),
)


def test_other_programs_read_all_statuses_or_those_before(tmp_path: Path) -> None:
    board, path = MemoryBoard(), tmp_path / "statuses.json"
    assert (last_statuses(board), read_statuses(path)) == ({}, {})
    for one in STATUSES.values():
        board.publish(status(one.stage, "starting"))
        board.publish(one)
    write_statuses(path, last_statuses(board))
    assert read_statuses(path) == STATUSES
    with small_files(10):
        write_statuses(path, {"engine": status("engine", detail="x" * 100)})
    assert read_statuses(path) == STATUSES, "a full disk leaves what was there"
    path.write_bytes(b"{")
    assert read_statuses(path) == {}


def test_status_is_published_on_change_and_refreshed_in_between() -> None:
    board, now_s, calls = MemoryBoard(), [100.0], [0]
    reporter = StatusReporter(board, "trainer", lambda: now_s[0])

    def progress() -> TrainerProgress:
        calls[0] += 1
        return TrainerProgress(version=calls[0])

    def seen() -> tuple[str, str, float, float]:
        found = last_statuses(board)["trainer"]
        return found.state, found.detail, found.since_s, found.written_s

    reporter.report("working", "a", progress)
    assert seen() == ("working", "a", 100.0, 100.0)
    now_s[0] = 100.0 + REFRESH_S / 2
    reporter.report("working", "b", progress)
    assert seen()[1] == "a", "too soon"
    now_s[0] = 100.0 + 2 * REFRESH_S
    reporter.report("working", "b", progress)
    assert seen() == ("working", "b", 100.0, now_s[0]), "working since 100"
    reporter.report("waiting", "c", progress)
    assert seen() == ("waiting", "c", now_s[0], now_s[0]), "a change of state is published at once"
    reporter.report("waiting", "d", progress, now=True)
    assert seen()[1] == "d"
    assert calls[0] == 4, "progress is put together only when it is published"
