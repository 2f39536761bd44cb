"""The trainer's status: published when something changes, and often enough while nothing does."""

from __future__ import annotations

from pipelinerl.status.board import REFRESH_S, MemoryBoard, StatusReporter
from pipelinerl.types import TrainerProgress


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
