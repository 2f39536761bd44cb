"""What several machines need: agents that refuse a wrong set-up, and memory by machine."""

from __future__ import annotations

import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipelinerl import __version__
from pipelinerl.config.load import load_config
from pipelinerl.errors import UserError
from pipelinerl.launch.hosts.agent import Agent, Ended, Order
from pipelinerl.launch.machine import Memory
from pipelinerl.launch.memory import HOST, Part, Prediction, Process, judge_machine
from pipelinerl.launch.session import Here, StartPlan

RAY = ["--launch.kind=ray", "--weights.kind=collective"]


def order(run_dir: Path, **changes: Any) -> bytes:
    config = load_config(None, RAY)
    whole = Order(
        version=__version__,
        run_dir=str(run_dir),
        nonce=("nonce", "1234"),
        role="generation",
        here=Here(machine="m1", hub=("127.0.0.1", 1)),
        elapsed_s=0.0,
        working_folder="/",
        settings=config.model_dump_json().encode(),
        plan=msgspec.json.encode(StartPlan()),
        model="demo",
        model_folder=False,
    )
    return msgspec.json.encode(msgspec.structs.replace(whole, **changes))


@pytest.fixture(autouse=True)
def _stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An agent goes to the launcher's folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.parametrize(("found", "sees"), [(None, False), ("4321", False), ("1234", True)])
def test_an_agent_says_whether_it_sees_the_run_directory(found: str | None, sees: bool, tmp_path: Path) -> None:
    if found is not None:
        (tmp_path / "nonce").write_text(found)
    with closing(Agent()) as agent:
        assert agent.prepare(order(tmp_path)) == ("", sees)


def test_a_model_in_a_folder_must_be_on_every_machine(tmp_path: Path) -> None:
    far = str(tmp_path / "far")
    problem, _ = Agent().prepare(order(Path("/far/r"), model=far, model_folder=True, working_folder=str(tmp_path)))
    assert problem == f"it does not have the folder {far} (model.path): copy the model there, or share its folder"


def test_an_agent_of_another_version_refuses(tmp_path: Path) -> None:
    """It reads nothing but the version: another one may have other orders."""
    refusal = f"it has pipelinerl {__version__}, and the launcher 0.0.1: install the same version"
    assert refusal in Agent().prepare(order(tmp_path, version="0.0.1"))[0]
    assert refusal in Agent().prepare(b'{"version": "0.0.1"}')[0]


def test_a_machine_without_the_run_directory_works_in_a_folder_of_its_own_and_sends_the_log(tmp_path: Path) -> None:
    """There is no hub at the address, so the process ends with an error."""
    away, agent = Path("/far/r"), Agent()
    assert agent.prepare(order(away, working_folder=str(tmp_path))) == ("", False)
    pid = agent.start(order(away, working_folder=str(tmp_path)))
    (own,) = tmp_path.iterdir()
    assert (own / "run" / "control" / "plan.json").stat().st_mode & 0o077 == 0
    ended = msgspec.json.decode(agent.wait(), type=Ended)
    assert pid > 0
    assert ended.kind == "StageDiedError"
    assert "the generation process has no connection with the launcher at 127.0.0.1:1" in ended.message
    assert b"has no connection with the launcher" in ended.log
    assert not ended.died
    agent.close()
    assert list(tmp_path.iterdir()) == []


def test_memory_is_judged_by_machine() -> None:
    config = load_config(None, [*RAY, "--trainer.device=cuda", "--trainer.ranks=2"])
    roles = ("training", "training-rank-1", "generation")
    on_gpu, on_host = Part("weights", 6, 6, "cuda:0"), Part("weights", 4, 4)
    prediction = Prediction(tuple(Process(role, (on_gpu, on_host)) for role in roles))
    asked: list[str] = []

    def machine(device: str) -> Memory:
        asked.append(device)
        return Memory(8, None)

    both = {"training": (0,), "training-rank-1": (1,)}
    judged = judge_machine(config, prediction, both, machine)
    assert asked == [HOST, "cuda:0", "cuda:1"], "each process has a GPU of its own"
    assert judged.predicted_bytes == dict.fromkeys(both, 10)
    with pytest.raises(UserError, match="needs at least"):
        judge_machine(config, prediction, both | {"generation": (0,)}, machine)
