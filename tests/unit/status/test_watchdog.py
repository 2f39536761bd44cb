"""The watchdog's verdicts: what counts as movement, and what a stall says."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.interfaces import PipelineState
from pipelinerl.schedule import AsyncSchedule, ConventionalSchedule, PipelineSchedule, Schedule
from pipelinerl.status.watchdog import Stall, Watchdog, find_cycle, waits_on
from pipelinerl.types import ActorProgress, EngineProgress, StageState, StageStatus, TrainerProgress

Statuses = dict[str, StageStatus]


def stuck(now: float) -> Statuses:
    """A run in which everyone reports and nobody moves."""
    engine, trainer = EngineProgress(tokens_generated=9, busy_s=now), TrainerProgress(version=3)
    statuses = (
        status("engine", "waiting", "a prompt", engine, now, waits_for=("actor",)),
        status("actor", "waiting", "64 rollouts are outstanding", ActorProgress(), now, waits_for=("trainer",)),
        status("trainer", "waiting", "3 of 64 samples are here", trainer, now, waits_for=("actor",)),
    )
    return {one.stage: one for one in statuses}


def status(
    stage: str,
    state: StageState,
    detail: str,
    progress: EngineProgress | ActorProgress | TrainerProgress | None = None,
    written_s: float = 0.0,
    *,
    waits_for: tuple[str, ...] = (),
) -> StageStatus:
    times = {"since_s": 5.0, "written_s": written_s}
    return StageStatus(stage=stage, pid=7, state=state, detail=detail, waits_for=waits_for, progress=progress, **times)


def watch(watchdog: Watchdog, statuses: Callable[[float], Statuses], seconds: range) -> tuple[float, Stall] | None:
    """The first stall and when it was seen."""
    for now in seconds:
        if stall := watchdog.observe(statuses(now), now):
            return now, stall
    return None


def test_nothing_moves_for_the_timeout() -> None:
    found = watch(Watchdog(30.0), stuck, range(0, 100))
    assert found is not None
    now, stall = found
    assert now == 30
    assert stall.quiet_s == 30
    assert stall.suspects == ()
    lines = stall.message.splitlines()
    assert lines[0] == "nothing has moved for 30 s (launch.watchdog_s is 30):"
    assert lines[1] == "  engine (pid 7): waiting for 25 s: a prompt [waits on: actor]"
    assert lines[3] == "  trainer (pid 7): waiting for 25 s: 3 of 64 samples are here [waits on: actor]"
    assert lines[4].startswith("  circular wait: ")


@pytest.mark.parametrize(
    "moved",
    [
        lambda n: {"engine": EngineProgress(tokens_generated=n)},
        lambda n: {"actor": ActorProgress(rollouts_dropped={"timeout": n})},
        lambda n: {"actor": ActorProgress(evaluated=n)},
        lambda n: {"trainer": TrainerProgress(micro_batches=n)},
    ],
)
def test_any_counter_of_any_stage_is_progress(moved: Callable[[int], dict]) -> None:
    def moving(now: float) -> Statuses:
        statuses = stuck(now)
        for stage, progress in moved(int(now) // 20).items():
            statuses[stage] = msgspec.structs.replace(statuses[stage], progress=progress)
        return statuses

    assert watch(Watchdog(30.0), moving, range(0, 200)) is None


def spent(now: float) -> TrainerProgress:
    return TrainerProgress(version=3, latest={"loss": now}, busy_s=now, ready_s=now)


STALLS: dict[str, tuple[Callable[[float], Statuses], int | None]] = {
    "time spent is no progress": (
        lambda now: stuck(now) | {"trainer": status("trainer", "working", "", spent(now), now)},
        30,
    ),
    "going from waiting to working and back is no progress": (
        lambda now: (
            stuck(now) | {"engine": status("engine", "working" if now % 2 else "waiting", "", EngineProgress(), now)}
        ),
        30,
    ),
    "a stage that starts late has its own bound": (
        lambda now: stuck(now) | {"trainer": status("trainer", "starting" if now < 300 else "waiting", "")},
        330,
    ),
    "a finished run": (lambda now: {"trainer": status("trainer", "done", "", TrainerProgress(version=9))}, None),
    "an empty board": (lambda now: {}, None),
    "the trainer is done and the engine never ends": (
        lambda now: stuck(now) | {"trainer": status("trainer", "done", "", TrainerProgress(version=9), now)},
        30,
    ),
    "a waiting stage need not report": (
        lambda now: {
            "engine": status("engine", "working", "", EngineProgress(tokens_generated=int(now)), now),
            "trainer": status("trainer", "waiting", "samples from the actor", TrainerProgress()),
        },
        None,
    ),
}


@pytest.mark.parametrize("name", STALLS)
def test_when_a_run_is_stalled(name: str) -> None:
    statuses, stalled_s = STALLS[name]
    found = watch(Watchdog(30.0), statuses, range(0, 400))
    assert (found and found[0]) == stalled_s


def test_a_working_stage_that_stops_reporting_is_the_suspect_while_others_go_on() -> None:
    def hung(now: float) -> Statuses:
        return {
            "engine": status("engine", "working", "64 in progress", EngineProgress(tokens_generated=int(now)), now),
            "trainer": status("trainer", "working", "micro-batch 3 of 8", TrainerProgress(version=3), min(now, 50.0)),
        }

    found = watch(Watchdog(30.0), hung, range(0, 200))
    assert found is not None
    now, stall = found
    assert now == 80
    assert stall.suspects == ("trainer",)
    assert "trainer hung" in stall.message
    assert "SUSPECT: it has not reported since, 30 s ago" in stall.message.splitlines()[2]
    assert "SUSPECT" not in stall.message.splitlines()[1]


def test_a_waiting_stage_that_stops_reporting_is_a_suspect_once_nothing_moves() -> None:
    """A process may be stopped while it waits, and hold up all others."""

    def stopped(now: float) -> Statuses:
        progress = TrainerProgress(version=int(min(now, 20.0)))
        trainer = status("trainer", "waiting", "samples", progress, now, waits_for=("actor",))
        return stuck(now) | {"engine": stuck(min(now, 7.0))["engine"], "trainer": trainer}

    found = watch(Watchdog(30.0), stopped, range(0, 100))
    assert found is not None
    now, stall = found
    assert now == 50
    assert stall.suspects == ("engine",)
    assert "SUSPECT: it has not reported since, 43 s ago" in stall.message.splitlines()[1]


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
    watchdog.observe({"engine": status("engine", "waiting", "", EngineProgress())}, now)
    for elapsed_s, moved in looks:
        now += elapsed_s
        tokens += moved
        quiet_s = 0.0 if moved else quiet_s + elapsed_s
        seen = watchdog.observe({"engine": status("engine", "waiting", "", EngineProgress(tokens_generated=tokens))}, now)
        if abs(quiet_s - timeout_s) > 1e-6:
            assert (seen is not None) == (quiet_s > timeout_s)


def test_only_a_waiting_stage_waits_on_others_never_on_itself_and_an_actor_stands_for_all() -> None:
    stages = {"engine-1": 0, "actor-0": 0, "actor-1": 0, "actor-10": 0, "trainer": 0}
    waiting = status("trainer", "waiting", "the engine", waits_for=("actor", "trainer", "nobody"))
    assert waits_on(waiting, stages) == ("actor-0", "actor-1", "actor-10")
    assert waits_on(msgspec.structs.replace(waiting, state="working"), stages) == ()
    assert waits_on(status("engine-1", "waiting", "", waits_for=("actor-1",)), stages) == ("actor-1",)


def test_find_cycle() -> None:
    def waits(stage: str, on: str) -> StageStatus:
        return status(stage, "waiting", "", waits_for=(on,))

    a, b, c = waits("a", "b"), waits("b", "c"), waits("c", "d")
    assert find_cycle({"a": a, "b": b, "c": c}) == ()
    cycle = find_cycle({"a": a, "b": b, "c": c, "d": waits("d", "b")})
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
