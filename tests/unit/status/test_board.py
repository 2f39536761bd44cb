"""The board says what each stage published last, in this process and, from a file, in others."""

from __future__ import annotations

from pathlib import Path

from pipelinerl.status.board import REFRESH_S, MemoryBoard, StatusReporter, last_statuses, read_statuses, write_statuses
from pipelinerl.types import ActorProgress, EngineProgress, Progress, StageStatus, TrainerProgress
from tests.limits import small_files


def status(stage: str, detail: str = "", progress: Progress | None = None) -> StageStatus:
    return StageStatus(stage=stage, pid=1, state="working", detail=detail, since_s=1.5, written_s=2.5, progress=progress)


STATUSES = {
    "actor": status("actor", "waiting", ActorProgress(rollouts_dropped={"timeout": 2})),
    "engine": status("engine", "decoding", EngineProgress(version=2, pauses_s=(0.1, 0.2))),
    "launcher": status("launcher"),
    "trainer": status("trainer", "step 1", TrainerProgress(version=3, latest={"ess": 0.97})),
}


def test_the_last_status_of_each_stage_is_read() -> None:
    board = MemoryBoard()
    assert (board.read("engine"), last_statuses(board)) == (None, {})
    for one in reversed(STATUSES.values()):
        board.publish(status(one.stage, "before"))
        assert board.read(one.stage) == status(one.stage, "before")
        board.publish(one)
    assert list(board.stages()) == list(STATUSES)
    assert last_statuses(board) == STATUSES


def test_other_programs_read_all_statuses_or_those_before(tmp_path: Path) -> None:
    path = tmp_path / "statuses.json"
    assert read_statuses(path) == {}
    write_statuses(path, STATUSES)
    assert read_statuses(path) == STATUSES
    with small_files(10):
        write_statuses(path, {"engine": status("engine", "x" * 100)})
    assert read_statuses(path) == STATUSES, "a full disk leaves what was there"
    write_statuses(path, {"engine": status("engine", "x" * 100_000)})
    assert read_statuses(path) == {"engine": status("engine", "x" * 100_000)}
    path.write_bytes(b"{")
    assert read_statuses(path) == {}


def test_status_is_published_on_change_and_refreshed_in_between() -> None:
    board, now_s, calls = MemoryBoard(), [100.0], [0]
    reporter = StatusReporter(board, "trainer", lambda: now_s[0])

    def progress() -> TrainerProgress:
        calls[0] += 1
        return TrainerProgress(version=calls[0])

    def seen() -> tuple[str, str, float, float]:
        status = board.read("trainer")
        assert status is not None
        return status.state, status.detail, status.since_s, status.written_s

    reporter.report("working", "a", progress)
    assert seen() == ("working", "a", 100.0, 100.0)
    now_s[0] = 100.0 + REFRESH_S / 2
    reporter.report("working", "b", progress)
    assert seen()[1] == "a", "too soon"
    now_s[0] = 100.0 + 2 * REFRESH_S
    reporter.report("working", "b", progress)
    assert seen() == ("working", "b", 100.0, now_s[0]), "working since 100"
    reporter.report("waiting", "c", progress)
    assert seen() == ("waiting", "c", now_s[0], now_s[0]), "a change of state is told at once"
    reporter.report("waiting", "d", progress, now=True)
    assert seen()[1] == "d"
    assert calls[0] == 4, "progress is put together only when it is published"
