"""The board says what each stage published last, in any process, also after the stage was killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipelinerl.interfaces import Board
from pipelinerl.status.board import STATUS_BYTES, MemoryBoard, MmapBoard
from pipelinerl.types import ActorProgress, EngineProgress, Progress, StageStatus, TrainerProgress


def status(stage: str, detail: str = "", progress: Progress | None = None) -> StageStatus:
    return StageStatus(stage=stage, pid=1, state="working", detail=detail, since_s=1.5, written_s=2.5, progress=progress)


@pytest.fixture(params=["memory", "mmap"])
def boards(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Board, Board]:
    """Where a stage publishes and where another reads."""
    if request.param == "memory":
        board = MemoryBoard()
        return board, board
    return MmapBoard(tmp_path / "control"), MmapBoard(tmp_path / "control")


def test_the_last_status_of_each_stage_is_read(boards: tuple[Board, Board]) -> None:
    here, there = boards
    assert there.read("engine") is None
    assert list(there.stages()) == []
    statuses = [
        status("trainer", "step 1", TrainerProgress(version=3, latest={"ess": 0.97})),
        status("engine", "decoding", EngineProgress(version=2, pauses_s=(0.1, 0.2))),
        status("actor", "waiting", ActorProgress(rollouts_dropped={"timeout": 2})),
        status("launcher"),
    ]
    for one in statuses:
        here.publish(status(one.stage, "before"))
        assert there.read(one.stage) == status(one.stage, "before")
        here.publish(one)
    assert list(there.stages()) == ["actor", "engine", "launcher", "trainer"]
    for _ in range(2):
        assert [there.read(one.stage) for one in statuses] == statuses


def test_an_unchanged_status_is_not_decoded_again(tmp_path: Path) -> None:
    here, there = MmapBoard(tmp_path), MmapBoard(tmp_path)
    here.publish(status("engine", "a"))
    first = there.read("engine")
    assert there.read("engine") is first
    here.publish(status("engine", "b"))
    second = there.read("engine")
    assert second is not None
    assert second.detail == "b"


def test_a_stage_that_starts_again_goes_on(tmp_path: Path) -> None:
    there = MmapBoard(tmp_path)
    for life in range(4):
        board = MmapBoard(tmp_path)
        board.publish(status("engine", f"life {life}"))
        board.close()
        assert there.read("engine") == status("engine", f"life {life}")


def test_a_status_that_is_too_long_is_refused_and_the_last_one_stays(tmp_path: Path) -> None:
    board = MmapBoard(tmp_path)
    board.publish(status("engine", "short"))
    with pytest.raises(ValueError, match=r"status of stage 'engine' takes \d+ bytes .*pauses_s"):
        board.publish(status("engine", "x" * STATUS_BYTES))
    assert MmapBoard(tmp_path).read("engine") == status("engine", "short")


def test_long_pauses_fit(tmp_path: Path) -> None:
    board = MmapBoard(tmp_path)
    long = status("engine", "", EngineProgress(pauses_s=tuple(0.0123456789012345 + i / 7 for i in range(2500))))
    board.publish(long)
    assert MmapBoard(tmp_path).read("engine") == long


@pytest.mark.parametrize("name", ["../engine", "", ".hidden", "a/b"])
def test_a_stage_name_can_not_leave_the_directory(tmp_path: Path, name: str) -> None:
    board = MmapBoard(tmp_path)
    with pytest.raises(ValueError, match="not a stage name"):
        board.publish(status(name))
    with pytest.raises(ValueError, match="not a stage name"):
        board.read(name)


PUBLISHER = """
import itertools, pathlib, sys
from pipelinerl.status.board import MmapBoard
from pipelinerl.types import EngineProgress, StageStatus
board = MmapBoard(pathlib.Path(sys.argv[1]))
for n in itertools.count(1):
    board.publish(StageStatus(stage="engine", pid=n, state="working", detail="x" * (n * 53 % 3000), since_s=n,
        written_s=n, progress=EngineProgress(version=n)))
"""


def test_statuses_of_another_process_are_whole_and_outlive_it(tmp_path: Path) -> None:
    board = MmapBoard(tmp_path)
    publisher = subprocess.Popen([sys.executable, "-c", PUBLISHER, str(tmp_path)])
    try:
        numbers: list[int] = []
        while len(numbers) < 200:
            assert publisher.poll() is None
            found = board.read("engine")
            if found is None or (numbers and found.pid == numbers[-1]):
                continue
            assert isinstance(found.progress, EngineProgress)
            assert found.progress.version == found.pid == found.since_s
            assert len(found.detail) == found.pid * 53 % 3000
            numbers.append(found.pid)
        assert numbers == sorted(numbers)
    finally:
        publisher.kill()
        publisher.wait()
    late = MmapBoard(tmp_path).read("engine")
    assert late is not None
    assert late.pid >= numbers[-1]
    assert board.read("engine") == late
