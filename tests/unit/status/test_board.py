"""The board says what each stage published last, in this process and, from a file, in others."""

from __future__ import annotations

from pathlib import Path

from pipelinerl.status.board import REFRESH_S, MemoryBoard, StatusReporter, last_statuses, read_statuses, write_statuses
from pipelinerl.types import ActorProgress, EngineProgress, TrainerProgress
from tests.limits import small_files
from tests.unit.record_parts import status, statuses_of

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
