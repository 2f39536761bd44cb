"""A process of an earlier session that goes on later changes nothing, wherever it was frozen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from pipelinerl.checkpoint_folders import by_version
from pipelinerl.config.load import load_config
from pipelinerl.errors import ReplacedError, RunDirectoryError, StreamError
from pipelinerl.launch import fence as fence_module
from pipelinerl.launch import run_lock
from pipelinerl.launch.fence import Fence, FencedFolders, FencedLines, take_over, take_over_keys
from pipelinerl.launch.run_directory import RunDirectory
from pipelinerl.launch.run_lock import RunLock, new_name

EARLIER = """
import os, signal, sys
from pathlib import Path
from pipelinerl.errors import ReplacedError
from pipelinerl.launch.fence import Fence, FencedFolders, FencedLines
from pipelinerl.launch.run_directory import RunDirectory

what, when, root = sys.argv[1:]

class Freezing(Fence):
    freezes = False

    def check(self):
        if self.freezes and when == "before":
            os.kill(os.getpid(), signal.SIGSTOP)
        super().check()
        if self.freezes and when == "after":
            os.kill(os.getpid(), signal.SIGSTOP)

run = RunDirectory(Path(root))
fence = Freezing(run, "earlier")
folders = FencedFolders(fence)
hidden = run.checkpoints / ".unfinished-step_00000003-ab"
try:
    if what == "line":
        with FencedLines(run.metrics, fence) as lines:
            fence.freezes = True
            lines.write("late")
    elif what == "checkpoint":
        folders.make(hidden)
        (hidden / "state.json").write_text("late")
        fence.freezes = True
        folders.install(hidden, run.checkpoints / "step_00000003", durable=True)
    else:
        fence.freezes = True
        folders.keep_latest(run.checkpoints, None, 1)
except (ReplacedError, FileNotFoundError) as error:
    print(type(error).__name__, error)
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "r")
    run.make_folders()
    take_over(run, "earlier")
    return run


def later_session(run: RunDirectory) -> None:
    """It has taken over at version 2, written a line and a checkpoint, and is writing another one."""
    take_over(run, "later")
    fence = Fence(run, "later")
    folders = FencedFolders(fence)
    with FencedLines(run.metrics, fence) as lines:
        lines.write("mine")
    for version in (3, 4):
        hidden = run.checkpoints / f".unfinished-step_0000000{version}-cd"
        folders.make(hidden)
        (hidden / "state.json").write_text("mine")
        if version == 3:
            folders.install(hidden, run.checkpoints / "step_00000003", durable=False)


def contents(run: RunDirectory) -> dict[str, str]:
    found = {str(path.relative_to(run.root)): path.read_text() for path in run.root.rglob("*") if path.is_file()}
    return {name: text for name, text in found.items() if "step_00000001" not in name}  # needed by no session


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", ["line", "checkpoint", "old"])
def test_a_late_process_changes_nothing(what: str, when: str, run: RunDirectory) -> None:
    """It was frozen directly before or after it looked for a later session."""
    run.metrics.write_text('"before"\n')
    for version in (1, 2):
        (run.checkpoints / f"step_0000000{version}").mkdir()
        (run.checkpoints / f"step_0000000{version}" / "state.json").write_text("before")
    command = [sys.executable, "-c", EARLIER, what, when, str(run.root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        os.waitpid(process.pid, os.WUNTRACED)
        later_session(run)
        before = contents(run)
        process.send_signal(signal.SIGCONT)
        assert process.stdout is not None
        said = process.stdout.read()
    assert contents(run) == before
    assert list(by_version(run.checkpoints)) in ([1, 2, 3], [2, 3])
    assert run.metrics.read_text() == '"before"\n"mine"\n'
    if when == "before":
        assert said.startswith(f"ReplacedError a later session of {run.root} has begun, while this process was stopped")
        assert said.count("\n") == 1


def test_nothing_is_begun_late(run: RunDirectory) -> None:
    fence = Fence(run, "earlier")
    later_session(run)
    before = contents(run)
    for write in (
        lambda: FencedLines(run.metrics, fence),
        lambda: FencedLines(run.metrics, fence, empty=True),
        lambda: FencedFolders(fence).make(run.checkpoints / ".unfinished-step_00000009-ab"),
        lambda: FencedFolders(fence).keep_latest(run.checkpoints, None, 1),
    ):
        with pytest.raises(ReplacedError):
            write()
    assert contents(run) == before
    run.current.unlink()
    with pytest.raises(RunDirectoryError, match="can't read"):
        fence.check()


def test_what_an_earlier_redis_appends_is_lost(run: RunDirectory) -> None:
    log = run.streams / "redis" / "appendonlydir" / "appendonly.aof.1.incr.aof"
    log.parent.mkdir(parents=True)
    log.write_bytes(b"kept")
    with log.open("ab") as earlier:
        take_over(run, "later")
        earlier.write(b"late")
    assert log.read_bytes() == b"kept"
    assert [path.name for path in log.parent.iterdir()] == [log.name]


def test_stopped_processes_that_hold_the_lock_are_named(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "DYING_PATIENCE_S", 0.0)
    code = "import sys, time; sys.stdin.read()"
    lock = RunLock(run)
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, pass_fds=[lock.fd]) as process:
        lock.close()
        monkeypatch.setattr(RunLock, "_holder_alive", lambda _: True)
        with pytest.raises(RunDirectoryError, match="in use by another run"):
            RunLock(run)
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        with pytest.raises(RunDirectoryError, match=f"these are stopped: {process.pid}; continue them .kill -CONT"):
            RunLock(run)
        process.send_signal(signal.SIGCONT)


# ---- Redis

CONFIG = ["--launch.kind=ray", "--stream.kind=redis", "--weights.kind=collective"]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from pipelinerl.stream.redis_server import start_server

    with start_server(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.mark.needs_redis
@pytest.mark.parametrize("killed", [False, True])
def test_streams_move_and_late_processes_do_not_find_them(
    url: str, run: RunDirectory, killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a writer that has just looked. `killed`: the launcher, when it had written the new name and renamed no key."""
    from pipelinerl.actor.admission_redis import RedisAdmission, make_redis_record
    from pipelinerl.launch.run_lock import choose_name_in_redis
    from pipelinerl.launch.stages.streams import ROLLOUTS, redis_of, stream_store
    from pipelinerl.redis_connection import RedisConnection
    from pipelinerl.schedule import make_schedule

    config = load_config(None, CONFIG)
    choose_name_in_redis(run)
    store = stream_store(config, run, url)
    _, prefix, _ = redis_of(config, run, url)
    with closing(RedisConnection(url, "test")) as connection:
        make_redis_record(connection, prefix)
        writer = store.writer(ROLLOUTS, int, capacity=None, when_full="block", on_drop=None)
        late = store.writer(ROLLOUTS, int, capacity=None, when_full="block", on_drop=None)
        reader = store.reader(ROLLOUTS, int)
        admission = RedisAdmission(url, prefix, make_schedule(config))
        admission.open()
        for number in (1, 2):
            assert writer.try_write(number)

        def replace(*_: object) -> None:
            if killed:
                with monkeypatch.context() as patch:
                    patch.setattr(fence_module, "_RENAME", "error('killed')")
                    with pytest.raises(StreamError, match="killed"):
                        take_over_keys(config, run, url, new_name())
            take_over_keys(config, run, url, new_name())

        late.companion = replace  # called between its look and its transaction
        late.try_write(3)
        assert prefix not in (run.streams / "name_in_redis").read_text()
        again = stream_store(config, run, url)
        assert again.waiting(ROLLOUTS, int) == [1, 2]
        for use in (
            lambda: writer.try_write(4),
            lambda: late.try_write(4),
            lambda: reader.read(1),
            lambda: reader.commit(1),
        ):
            with pytest.raises(StreamError, match="a later session of the run has begun"):
                use()
        with pytest.raises(StreamError, match="a later session"):
            admission.open()
        with closing(again.reader(ROLLOUTS, int)) as new:
            assert [item for _, item in new.read(10)] == [1, 2]
