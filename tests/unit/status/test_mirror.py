"""Boards of several machines are kept equal: each in the time of its own clock, and what stops is noticed by all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
import pytest

from pipelinerl.redis_connection import RedisConnection, exceptions
from pipelinerl.status.board import MmapBoard, last_statuses
from pipelinerl.status.mirror import Heartbeats, Mirror, RedisBoard
from pipelinerl.status.watchdog import Watchdog, describe
from pipelinerl.types import ActorProgress, StageStatus, TrainerProgress
from tests.unit.stream.streams import redis_for_tests

pytestmark = pytest.mark.needs_redis
NAMES = (f"run-{number}-" for number in itertools.count())


@pytest.fixture(scope="module")
def connection(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisConnection]:
    with (
        redis_for_tests(tmp_path_factory.mktemp("redis")) as server,
        closing(RedisConnection(server.url, "tests")) as connection,
    ):
        yield connection


class Machine:
    """A machine whose clock is ahead of the launcher's, with a mirror and the stages `own`."""

    def __init__(self, connection: RedisConnection, prefix: str, folder: Path, own: list[str], ahead_s: float) -> None:
        self.board, self.ahead_s = MmapBoard(folder), ahead_s
        shared = RedisBoard(connection, prefix)
        self.mirror = Mirror(shared, self.board, own, machine=folder.name, ahead_s=ahead_s)

    def publish(self, stage: str, time_s: float, **values: object) -> None:
        """A status at a time of the launcher's clock, as the stage's own clock shows it."""
        here_s = time_s + self.ahead_s
        known = {"stage": stage, "pid": 7, "state": "working", "detail": "", "since_s": here_s, "written_s": here_s}
        self.board.publish(msgspec.convert({**known, **values}, StageStatus))


@pytest.fixture
def machines(connection: RedisConnection, tmp_path: Path) -> Iterator[tuple[Machine, Machine, RedisBoard]]:
    """One with the trainer, one with an actor, both with the same process id; and the launcher's board."""
    prefix = next(NAMES)
    with ExitStack() as stack:
        one = Machine(connection, prefix, tmp_path / "one", ["trainer"], 1000.0)
        other = Machine(connection, prefix, tmp_path / "other", ["actor"], -0.5)
        for machine in (one, other):
            stack.enter_context(closing(machine.board))
        yield one, other, RedisBoard(connection, prefix)


def copied(*machines: Machine) -> None:
    for machine in machines:
        machine.mirror.push()
    for machine in machines:
        machine.mirror.pull()


def test_each_board_has_every_stage_in_its_own_time(machines: tuple[Machine, Machine, RedisBoard]) -> None:
    one, other, launcher = machines
    one.publish("trainer", 20.0, progress={"type": "trainer", "version": 3, "trained": 9})
    other.publish("actor", 21.0, progress={"type": "actor", "rollouts_started": 5})
    copied(one, other)
    seen = last_statuses(launcher)
    assert {stage: (status.machine, status.written_s) for stage, status in seen.items()} == {
        "trainer": ("one", 20.0),
        "actor": ("other", 21.0),
    }
    assert seen["trainer"].progress == TrainerProgress(version=3, trained=9)
    there = other.board.read("trainer")
    assert there is not None
    assert (there.machine, there.since_s, there.written_s) == ("one", 19.5, 19.5)
    here = one.board.read("actor")
    assert here is not None
    assert here.written_s == 1021.0
    assert here.progress == ActorProgress(rollouts_started=5)
    own = one.board.read("trainer")
    assert own is not None
    assert (own.machine, own.written_s) == ("", 1020.0), "a machine's own stages are not written by its mirror"
    assert describe(there, 25.0).startswith("trainer (pid 7 on one): working for 6 s")


def test_only_what_changed_is_copied(machines: tuple[Machine, Machine, RedisBoard]) -> None:
    one, other, _ = machines
    one.publish("trainer", 20.0)
    copied(one, other)
    first = other.board.read("trainer")
    copied(one, other)
    assert other.board.read("trainer") is first
    one.publish("trainer", 22.0)
    copied(one, other)
    later = other.board.read("trainer")
    assert later is not None
    assert later.written_s == 21.5


def test_a_machine_that_begins_later_sees_what_was_published_before(
    machines: tuple[Machine, Machine, RedisBoard],
) -> None:
    one, other, launcher = machines
    one.publish("trainer", 20.0)
    one.mirror.push()
    other.mirror.pull()
    assert other.board.read("trainer") is not None
    launcher.clear()
    assert last_statuses(launcher) == {}


def test_the_watchdog_and_the_view_do_not_depend_on_clocks(machines: tuple[Machine, Machine, RedisBoard]) -> None:
    one, other, launcher = machines
    watchdog = Watchdog(8.0)
    for second in range(20):
        one.publish("trainer", 100.0 + second, state="waiting", waits_for=["actor"])
        if second < 5:
            other.publish("actor", 100.0 + second, progress={"type": "actor", "rollouts_started": second})
        copied(one, other)
        stall = watchdog.observe(last_statuses(launcher), 100.0 + second)
        assert (stall is not None) == (second >= 12)
    assert stall is not None
    assert stall.suspects == ("actor",)
    assert "waiting for 0 s" in stall.message


def test_silence_is_counted_by_ones_own_beats(connection: RedisConnection) -> None:
    now = 0.0
    prefix = next(NAMES)
    mine = Heartbeats(connection, prefix, "launcher", lambda: now)
    other = Heartbeats(connection, prefix, "other")
    assert mine.silent_s("other") == 0.0
    for _ in range(4):
        other.beat()
        now += 1.0
        mine.beat()
        assert mine.silent_s("other") == 0.0
    for _ in range(4):
        now += 1.0
        mine.beat()
    assert mine.silent_s("other") == 4.0
    now += 3600.0  # this process was stopped for an hour, and may not say how long the others were silent
    mine.beat()
    assert mine.silent_s("other") < 10.0
    other.beat()
    mine.beat()
    assert mine.silent_s("other") == 0.0
    assert mine.silent_s("never heard") == 0.0
    now += 1.0
    mine.beat()
    assert mine.silent_s("never heard") == 1.0
    mine.clear()
    assert connection.client.exists(f"{{{prefix}}}alive") == 0


def test_a_status_is_not_lost_with_the_connection(connection: RedisConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    board = RedisBoard(connection, next(NAMES))
    own = connection.client.connection_pool.get_connection()
    connection.client.connection_pool.release(own)
    send, attempts = own.send_packed_command, itertools.count()

    def lost_once(*arguments: object, **options: object) -> None:
        if next(attempts) == 0:
            raise exceptions.ConnectionError("lost")
        send(*arguments, **options)

    monkeypatch.setattr(own, "send_packed_command", lost_once)
    board.publish(StageStatus(stage="trainer", pid=7, state="working", detail="", since_s=1.0, written_s=1.0))
    assert "trainer" in last_statuses(board)
