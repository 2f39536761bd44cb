"""What several machines need: agents that refuse a wrong set-up, memory by machine, records that are joined exactly once."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipelinerl import __version__
from pipelinerl.config.load import load_config
from pipelinerl.errors import StageDiedError, UserError
from pipelinerl.launch.hosts.agent import AWAY, Agent, Ended, Setup
from pipelinerl.launch.hosts.placement import Machine
from pipelinerl.launch.machine import Memory
from pipelinerl.launch.memory import HOST, Part, Prediction, Process, judge_machine
from pipelinerl.launch.resume import join_rollouts
from pipelinerl.launch.session import StartPlan

RAY = ["--launch.kind=ray", "--stream.kind=redis", "--weights.kind=collective"]


def setup(run_dir: Path, **changes: Any) -> bytes:
    whole = Setup(
        version=__version__,
        run_dir=str(run_dir),
        nonce=("nonce", "1234"),
        session="",
        machine="m1",
        stages=(),
        ahead_s=0.0,
        records_from_s=0.0,
        lost_s=5.0,
        working_folder="/",
    )
    return msgspec.json.encode(msgspec.structs.replace(whole, **changes))


@pytest.mark.parametrize("found", [None, "4321"])
def test_an_agent_that_does_not_see_the_run_directory_says_so(found: str | None, tmp_path: Path) -> None:
    if found is not None:
        (tmp_path / "nonce").write_text(found)
    assert Agent().open(setup(tmp_path)) == AWAY


def test_a_model_in_a_folder_must_be_on_a_machine_without_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)  # the agent goes to the launcher's folder
    config = load_config(None, [*RAY, f"--model.path={tmp_path}/far"])
    plan = msgspec.json.encode(StartPlan(checkpoint="/far/r/checkpoints/step_00000002", version=2))
    files = {"control/config.json": config.model_dump_json().encode(), "control/plan.json": plan}
    agent = Agent()
    refusal = agent.open(setup(Path("/far/r"), files=files, model_folder=True, working_folder=str(tmp_path)))
    assert refusal == f"it does not have the folder {tmp_path}/far (model.path): copy the model there, or share its folder"
    (scratch,) = tmp_path.iterdir()
    written = msgspec.json.decode((scratch / "run" / "control" / "plan.json").read_bytes(), type=StartPlan)
    assert written.checkpoint == str(scratch / "run" / "checkpoints" / "step_00000002")
    assert (scratch / "run" / "control" / "plan.json").stat().st_mode & 0o077 == 0
    agent.close()
    assert list(tmp_path.iterdir()) == []


def test_an_agent_of_another_version_refuses(tmp_path: Path) -> None:
    """It reads nothing but the version: another one may have another set-up."""
    (tmp_path / "nonce").write_text("1234")
    refusal = f"it has pipelinerl {__version__}, and the launcher 0.0.1: install the same version"
    assert refusal in Agent().open(setup(tmp_path, version="0.0.1"))
    assert refusal in Agent().open(b'{"version": "0.0.1"}')


@pytest.mark.needs_ray
def test_how_an_earlier_process_ended_says_nothing_of_the_next_one_of_its_role() -> None:
    """The launcher may get an answer about the earlier one after it has started the next."""
    from pipelinerl.launch.hosts.ray import RemoteWorker, Seat

    seat = Seat(Machine("m1", "10.0.0.1", 1, 0), None, ["generation"])
    first, second = (RemoteWorker("generation", pid, Path("log"), seat, lambda: None) for pid in (1, 2))
    seat.ended["generation"] = Ended(role="generation", pid=1, status=-9, kind="StageDiedError", died=True)
    assert [first.died, first.running, isinstance(first.failure(), StageDiedError)] == [True, False, True]
    assert [second.died, second.running, second.failure()] == [False, True, None]


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


def killed_in_copy(source: Any, target: Any) -> None:
    target.write(source.read()[:7])
    raise KeyboardInterrupt


def killed_at_unlink(number: int) -> Callable[..., None]:
    """Instead of the unlink with this number, counted from 0."""
    left = [number]
    unlink = Path.unlink

    def counting(path: Path, **options: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        unlink(path, **options)

    return counting


@pytest.mark.parametrize(
    ("owner", "name", "killed"),
    [(shutil, "copyfileobj", killed_in_copy), *((Path, "unlink", killed_at_unlink(number)) for number in range(4))],
)
def test_records_are_joined_exactly_once_wherever_the_launcher_is_killed(
    owner: Any, name: str, killed: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "rollouts.jsonl"
    whole.write_text('{"index": 0}\n{"ind')
    (tmp_path / "rollouts-1.jsonl").write_text('{"index": 1}\n{"index": 2}\n{"in')
    (tmp_path / "rollouts-2.jsonl").write_text('{"index": 3}\n')
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, killed)
        with pytest.raises(KeyboardInterrupt):
            join_rollouts(tmp_path)
    join_rollouts(tmp_path)
    assert whole.read_text() == "".join(f'{{"index": {index}}}\n' for index in range(4))
    assert list(tmp_path.iterdir()) == [whole]
