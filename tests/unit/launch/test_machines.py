"""What several machines need: agents that refuse a wrong set-up, and memory by machine."""

from __future__ import annotations

import tempfile
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from pipelinerl import __version__
from pipelinerl.config.load import load_config
from pipelinerl.errors import UserError
from pipelinerl.launch.hosts.agent import Agent
from pipelinerl.launch.session import Session, StartPlan, WorkerReport, WorkerSpec, write_session
from pipelinerl.resources.machine import Memory
from pipelinerl.resources.memory import HOST, Prediction, Use, judge
from pipelinerl.run_directory import RunDirectory
from pipelinerl.schedule import make_schedule

RAY = ["--launch.kind=ray", "--weights.kind=collective"]


@pytest.fixture(autouse=True)
def _stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An agent goes to the launcher's folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.parametrize("found", [None, "4321"])
def test_a_machine_without_the_run_directory_is_refused(found: str | None, tmp_path: Path) -> None:
    note = tmp_path / "note"
    if found is not None:
        note.write_text(found)  # of another folder at the same path
    problem = Agent().prepare(__version__, str(note), "1234", str(tmp_path))
    assert problem == f"it does not have {tmp_path}: put run_dir on a file system that all machines share"
    note.write_text("1234")
    assert Agent().prepare(__version__, str(note), "1234", str(tmp_path)) == ""


def test_an_agent_of_another_version_refuses(tmp_path: Path) -> None:
    refusal = f"it has pipelinerl {__version__}, and the launcher 0.0.1: install the same version"
    assert refusal in Agent().prepare("0.0.1", str(tmp_path / "note"), "", "/")


def test_an_agent_tells_how_its_process_ended(tmp_path: Path) -> None:
    """There is no hub at the address, so the process ends with an error."""
    run, agent = RunDirectory(tmp_path / "r"), Agent()
    run.make_folders()
    config = load_config(None, RAY)
    write_session(Session(config, run, StartPlan(), make_schedule(config), 0.0))
    here = msgspec.json.encode(WorkerSpec(machine="m1", hub_at=("127.0.0.1", 1)))
    with closing(agent):
        pid = agent.start(str(run.root), "generation", 0.0, here)
        ended = msgspec.json.decode(agent.wait(), type=WorkerReport)
    assert pid > 0
    assert ended.error is not None
    assert ended.error.kind == "StageDiedError"
    assert "the generation process has no connection with the launcher at 127.0.0.1:1" in ended.error.message
    assert not ended.died


def test_memory_is_judged_by_machine() -> None:
    roles = ("training", "training-rank-1", "generation")
    on_gpu, on_host = Use("weights", 6, "cuda:0"), Use("weights", 4)
    prediction = Prediction((role, [on_gpu, on_host]) for role in roles)
    asked: list[str] = []

    def machine(device: str) -> Memory:
        asked.append(device)
        return Memory(8, None)

    both = {"training": (0,), "training-rank-1": (1,)}
    judged = judge(prediction.on(both), machine)
    assert asked == [HOST, "cuda:0", "cuda:1"], "each process has a GPU of its own"
    assert judged.prediction.sizes == dict.fromkeys(both, 10)
    with pytest.raises(UserError, match="needs at least"):
        judge(prediction.on(both | {"generation": (0,)}), machine)
