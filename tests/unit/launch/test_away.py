"""What machines without the run directory send: each line exactly once, and folders whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import pytest

from pipelinerl.checkpoint_folders import record_of
from pipelinerl.config.load import load_config
from pipelinerl.errors import CheckpointError, ReplacedError, RunDirectoryError, StreamError
from pipelinerl.launch import away
from pipelinerl.launch.away import Append, Install, KeepLatest, Outbox, ReadyFiles, Sending
from pipelinerl.launch.fence import Fence
from pipelinerl.launch.hosts import head
from pipelinerl.launch.hosts.head import Head, RunningHead
from pipelinerl.launch.run_directory import RunDirectory
from pipelinerl.launch.session import Session, StartPlan
from pipelinerl.redis_connection import RedisConnection
from pipelinerl.schedule import make_schedule
from pipelinerl.stream.redis_server import start_server

pytestmark = pytest.mark.needs_redis


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with start_server(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture
def connection(url: str) -> Iterator[RedisConnection]:
    with closing(RedisConnection(url, "test")) as connection:
        connection.client.flushall()
        yield connection


@pytest.fixture
def outbox(connection: RedisConnection) -> Outbox:
    return Outbox(connection, "run")


def fence(root: Path) -> Fence:
    """Of the session that has begun there."""
    root.mkdir(exist_ok=True)
    run = RunDirectory(root)
    run.current.write_text("this")
    return Fence(run, "this")


def take(url: str, root: Path) -> None:
    """As a launcher that has just started."""
    with closing(Head(RedisConnection(url, "head"), "run", fence(root))) as taking:
        taking.take_all()


def lines(*numbers: int) -> bytes:
    return b"".join(b"%d\n" % number for number in numbers)


def test_lines_follow_on_what_is_in_the_file(url: str, outbox: Outbox, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(0) + b"parti")
    for number in (1, 2):
        outbox.push(Append("a.jsonl", lines(number)))
        outbox.push(Append("logs/x.log", b"log"))
    take(url, tmp_path)
    outbox.push(Append("a.jsonl", lines(3)))
    take(url, tmp_path)
    assert (tmp_path / "a.jsonl").read_bytes() == lines(0, 1, 2, 3)
    assert (tmp_path / "logs" / "x.log").read_bytes() == b"loglog"


def test_a_file_is_emptied(url: str, outbox: Outbox, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(0))
    for entry in (Append("a.jsonl", lines(1)), Append("a.jsonl", b"", empty=True), Append("a.jsonl", lines(2))):
        outbox.push(entry)
    take(url, tmp_path)
    assert (tmp_path / "a.jsonl").read_bytes() == lines(2)


def test_a_push_whose_answer_was_lost_is_not_executed_twice(url: str, connection: RedisConnection, tmp_path: Path) -> None:
    outbox = Outbox(connection, "run")
    push, lost = outbox._push, [True]

    def losing(*arguments: Any) -> int:
        waiting = int(push(*arguments))
        if lost.pop() if lost else False:
            raise ConnectionError
        return waiting

    def patiently(operation: Any) -> Any:
        try:
            return operation()
        except ConnectionError:
            return operation()

    connection.patiently = patiently  # type: ignore[method-assign]
    outbox._push = losing
    outbox.push(Append("a.jsonl", lines(1)))
    outbox.push(Append("a.jsonl", lines(2)))
    take(url, tmp_path)
    assert (tmp_path / "a.jsonl").read_bytes() == lines(1, 2)


@pytest.mark.parametrize("where", ["_write_at", "fsync", "_taken", "after"])
def test_lines_arrive_exactly_once_wherever_the_launcher_is_killed(
    where: str, url: str, outbox: Outbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(0))
    for number in (1, 2):
        outbox.push(Append("a.jsonl", lines(number)))

    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    def half(path: Path, start: int, data: bytes) -> None:
        with path.open("ab") as file:
            file.write(data[:3])
        raise KeyboardInterrupt

    def after(self: Head, *arguments: Any) -> None:
        taken(self, *arguments)
        raise KeyboardInterrupt

    taken = Head._taken
    with monkeypatch.context() as patch:
        owner, name, instead = {
            "_write_at": (head, "_write_at", half),
            "fsync": (os, "fsync", killed),
            "_taken": (Head, "_taken", killed),
            "after": (Head, "_taken", after),
        }[where]
        patch.setattr(owner, name, instead)
        with pytest.raises(KeyboardInterrupt):
            take(url, tmp_path)
    outbox.push(Append("a.jsonl", lines(3)))
    take(url, tmp_path)
    assert (tmp_path / "a.jsonl").read_bytes() == lines(0, 1, 2, 3)


def test_a_full_disk_loses_nothing(url: str, outbox: Outbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(0))
    outbox.push(Append("a.jsonl", lines(1)))
    calls = []

    def full(fd: int, data: bytes, offset: int) -> int:
        if calls:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        calls.append(write(fd, data[:1], offset))
        return calls[0]

    write = os.pwrite
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(RunDirectoryError, match="No space left on device; make room on that disk"):
            take(url, tmp_path)
    assert (tmp_path / "a.jsonl").read_bytes() == lines(0)
    take(url, tmp_path)
    assert (tmp_path / "a.jsonl").read_bytes() == lines(0, 1)


def test_senders_wait_while_too_much_is_in_the_outbox(
    url: str, outbox: Outbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(away, "MOST_WAITING_BYTES", 100)
    pushed = []

    def push() -> None:
        for number in range(20):
            outbox.push(Append("a.jsonl", bytes(50)))
            pushed.append(number)

    pushing = Thread(target=push)
    pushing.start()
    pushing.join(0.3)
    assert 1 <= len(pushed) <= 2, "an entry is more than its data"
    while pushing.is_alive():
        take(url, tmp_path)
        pushing.join(0.01)
    take(url, tmp_path)
    assert (tmp_path / "a.jsonl").read_bytes() == bytes(20 * 50)
    with closing(Head(RedisConnection(url, "head"), "run", fence(tmp_path))) as taking:
        taking.refuse("the disk is full")
    with pytest.raises(StreamError, match="the disk is full"):
        push()
    outbox.waits = False
    push()


def test_an_agent_sends_what_is_new_in_its_logs(url: str, connection: RedisConnection, tmp_path: Path) -> None:
    there, here = RunDirectory(tmp_path / "there"), tmp_path / "here"
    there.make_folders()
    config = load_config(None, ["--launch.kind=ray", "--stream.kind=redis", "--weights.kind=collective"])
    sending = Sending(Session(config, there, StartPlan(), make_schedule(config), 0.0), connection, "run", {})
    (there.root / "logs" / "empty.log").touch()
    for text in ("one\n", "two\n"):
        with (there.root / "logs" / "a.log").open("a") as log:
            log.write(text)
        sending.send()
    take(url, here)
    assert {path.name: path.read_text() for path in (here / "logs").iterdir()} == {"empty.log": "", "a.log": "one\ntwo\n"}


def test_ready_files_are_copied_to_all_machines_also_when_they_have_changed(
    connection: RedisConnection, tmp_path: Path
) -> None:
    """A server that was started again has written it, at a time when all had its first one."""
    folders = [tmp_path / name for name in ("home", "launcher", "other")]
    for folder in folders:
        folder.mkdir()
    copies = [ReadyFiles(folder, connection, "run") for folder in folders]
    for contents in (b"first", b"second"):
        (folders[0] / "server-0.ready.json").write_bytes(contents)
        for _ in range(2):
            for copy in reversed(copies):
                copy.exchange()
        assert [(folder / "server-0.ready.json").read_bytes() for folder in folders] == [contents] * 3


def test_a_launcher_catches_up_with_what_was_sent(
    url: str, outbox: Outbox, connection: RedisConnection, tmp_path: Path
) -> None:
    taking = RunningHead(Head(RedisConnection(url, "head"), "run", fence(tmp_path)), ReadyFiles(tmp_path, connection, "run"))
    with closing(taking):
        for number in range(3):
            outbox.push(Append("a.jsonl", lines(number)))
            taking.catch_up()
            assert (tmp_path / "a.jsonl").read_bytes() == lines(*range(number + 1))
        (tmp_path / "a.jsonl").unlink()
        (tmp_path / "a.jsonl").mkdir()
        outbox.push(Append("a.jsonl", lines(3)))
        with pytest.raises(RunDirectoryError, match="can't write to"):
            taking.catch_up()


def test_who_waits_for_a_launcher_that_takes_no_more_is_told(url: str, outbox: Outbox, tmp_path: Path) -> None:
    with closing(Head(RedisConnection(url, "head"), "run", fence(tmp_path))) as taking:
        taking.refuse("the disk is full")
    with pytest.raises(CheckpointError, match="the disk is full"):
        outbox.ask(KeepLatest(id="1", directory="weights", version=1, count=1, spared_every=0), lambda _: None)


def test_a_path_outside_of_the_run_directory_is_refused(url: str, outbox: Outbox, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    outbox.push(Append("../a", b"a"))
    with pytest.raises(RunDirectoryError, match="not in the run directory"):
        take(url, tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_launcher_whose_session_was_replaced_takes_nothing(url: str, outbox: Outbox, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(0))
    outbox.push(Append("a.jsonl", lines(1)))
    with closing(Head(RedisConnection(url, "head"), "run", fence(tmp_path))) as taking:
        RunDirectory(tmp_path).current.write_text("later")
        with pytest.raises(ReplacedError, match=f"a later session of {tmp_path} has begun"):
            taking.take_all()
    assert (tmp_path / "a.jsonl").read_bytes() == lines(0)
    take(url, tmp_path)
    assert (tmp_path / "a.jsonl").read_bytes() == lines(0, 1)


# ------------------------------------------------------------------------------------------------------- folders


class Machine:
    """A checkpoint on another machine, `hidden`, and what the launcher fetches of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.hidden = root / "checkpoints" / ".unfinished-step_00000001-ab"
        self.hidden.mkdir(parents=True)
        (self.hidden / "model").write_bytes(bytes(range(256)) * 40)
        (self.hidden / "empty").write_bytes(b"")
        files = {path.name: record_of(path) for path in self.hidden.iterdir()}
        (self.hidden / "state.json").write_bytes(msgspec.json.encode({"checksum": "", "state": {"files": files}}))

    def request(self, *names: str, target: str | None = "checkpoints/step_00000001") -> Install:
        chosen = [path for path in sorted(self.hidden.iterdir()) if not names or path.name in names]
        files = {path.name: record_of(path) for path in chosen}
        return Install(
            id="1", machine="m", folder=str(self.hidden.relative_to(self.root)), files=files, target=target, durable=True
        )

    def fetch(self, machine: str, name: str, size: int) -> Iterator[bytes]:
        assert machine == "m"
        data = (self.root / name).read_bytes()
        assert len(data) == size
        yield from (data[start : start + 1000] for start in range(0, size, 1000))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "there")


def carry_out(url: str, outbox: Outbox, root: Path, request: Install | KeepLatest, fetch: Any) -> list[int]:
    """As a launcher does. Raises CheckpointError. Returns how much was sent, as the sender learns it."""
    sent: list[int] = []
    with closing(Head(RedisConnection(url, "head"), "run", fence(root), fetch)) as taking:
        outbox.push(request)
        taking.take_all()
        outbox._number -= 1  # it is there already: `ask` only waits for the answer
        outbox.ask(request, sent.append)
    return sent


def test_a_checkpoint_arrives_whole(url: str, outbox: Outbox, machine: Machine, tmp_path: Path) -> None:
    root = tmp_path / "here"
    left = root / "checkpoints" / ".unfinished-step_00000001-of-an-earlier-launcher"
    left.mkdir(parents=True)
    carry_out(url, outbox, root, machine.request(), machine.fetch)
    (arrived,) = (root / "checkpoints").iterdir()
    assert arrived.name == "step_00000001"
    assert {path.name: path.read_bytes() for path in arrived.iterdir()} == {
        path.name: path.read_bytes() for path in machine.hidden.iterdir()
    }


def test_the_files_of_other_ranks_come_first(url: str, outbox: Outbox, machine: Machine, tmp_path: Path) -> None:
    root = tmp_path / "here"
    rest = machine.request("empty", "state.json")
    with pytest.raises(CheckpointError, match="model did not arrive"):
        carry_out(url, outbox, root, rest, machine.fetch)
    assert list((root / "checkpoints").iterdir()) == []
    carry_out(url, outbox, root, machine.request("model", target=None), machine.fetch)
    carry_out(url, outbox, root, rest, machine.fetch)
    assert [path.name for path in (root / "checkpoints").iterdir()] == ["step_00000001"]


def full(machine: str, name: str, size: int) -> Iterator[bytes]:
    yield b"1"
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def damaged(machine: str, name: str, size: int) -> Iterator[bytes]:
    yield bytes(size)


@pytest.mark.parametrize(
    "failing", [(full, "No space left on device"), (damaged, "model has changed on its way from m")], ids=["full", "damaged"]
)
def test_a_checkpoint_that_does_not_arrive_leaves_nothing(
    failing: tuple[Any, str], url: str, outbox: Outbox, machine: Machine, tmp_path: Path
) -> None:
    (fetch, message), root = failing, tmp_path / "here"
    (root / "checkpoints" / "step_00000000").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=f"can't write checkpoint {root}/checkpoints/step_00000001: {message}"):
        carry_out(url, outbox, root, machine.request("model", "state.json"), fetch)
    assert [path.name for path in (root / "checkpoints").iterdir()] == ["step_00000000"]


def test_old_folders_are_deleted(url: str, outbox: Outbox, tmp_path: Path) -> None:
    for version in range(4):
        (tmp_path / "weights" / f"step_{version:08d}").mkdir(parents=True)
    request = KeepLatest(id="1", directory="weights", version=3, count=1, spared_every=2)
    carry_out(url, outbox, tmp_path, request, damaged)
    assert sorted(path.name[-1] for path in (tmp_path / "weights").iterdir()) == ["0", "2", "3"]


def test_a_request_of_an_earlier_session_is_forgotten(url: str, outbox: Outbox, machine: Machine, tmp_path: Path) -> None:
    outbox.push(machine.request())
    outbox.push(Append("a.jsonl", lines(1)))
    take(url, tmp_path)
    assert (tmp_path / "a.jsonl").read_bytes() == lines(1)
    assert not (tmp_path / "checkpoints").exists()
