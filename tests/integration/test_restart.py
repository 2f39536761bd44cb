"""A run that loses a process which can't be replaced goes on from its latest checkpoint by itself."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

import pipelinerl
from pipelinerl.experiments.replay.replay import replay
from pipelinerl.files import SHARED_MEMORY
from tests.chaos.invariants import check
from tests.integration.runs import (
    alive,
    assert_gone_on,
    command,
    process_ids,
    start_processes,
    until,
    version_of,
    wait,
)
from tests.integration.test_serve import serving

pytestmark = pytest.mark.slow
exhaustive = pytest.mark.exhaustive

GOAL = 40
BROADCAST = {"weights__kind": "collective", "weights__encoding": "delta"}
SERVERS = {"engine__kind": "http", "engine__servers": 2, "engine__slots": 8}


def going(run_dir: Path, version: int, **settings: Any) -> subprocess.Popen[str]:
    """A run of `GOAL` steps with checkpoints every 4, once it has come to `version`."""
    defaults = {"trainer__steps": GOAL, "trainer__checkpoint_every": 4, "metrics__view": "plain"}
    process = start_processes(run_dir, **(defaults | settings))
    until(lambda: version_of(run_dir) >= version, process)
    return process


def kill(run_dir: Path, role: str, number: signal.Signals = signal.SIGKILL) -> int:
    """Send the signal to the process of this role. Returns its id."""
    found = process_ids(run_dir)
    pid = found[role] if role in found else rank_pid(run_dir, role)
    os.kill(pid, number)
    return pid


def rank_pid(run_dir: Path, role: str) -> int:
    """Ranks have no status on the board: the leader of the session that writes to the rank's log."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/fd/1"):
        with suppress(OSError):  # it has ended
            if os.readlink(path) == str(run_dir / "logs" / f"{role}.log"):
                found.add(os.getsid(int(path.parts[2])))
    (pid,) = found
    return pid


def assert_went_on(run_dir: Path, process: subprocess.Popen[str], count: int, goal: int = GOAL) -> dict[str, Any]:
    """The run reached its goal after so many restarts, and said so. Returns its summary."""
    ended = wait(process)
    assert (ended.status, ended.error) == (0, "")
    counts = assert_gone_on(run_dir, goal)
    assert counts["restarts"]["run"]["count"] == count
    assert len(counts["restarts"]["run"]["recovery_s"]) == count
    assert ended.out.count("the run goes on from its latest checkpoint") == count
    return counts


@pytest.mark.parametrize(
    ("role", "settings"),
    [
        ("training", {}),
        pytest.param("training", {"launch__preprocessor": "process", "engine__processes": 2}, marks=exhaustive),
        pytest.param("training-rank-1", {"trainer__ranks": 2}, marks=exhaustive),
        pytest.param("training", BROADCAST | {"engine__processes": 2}, marks=exhaustive),
        pytest.param("training-rank-1", BROADCAST | {"trainer__ranks": 2}, marks=exhaustive),
        pytest.param("generation-1", BROADCAST | {"engine__processes": 2}, marks=exhaustive),
        pytest.param("generation", BROADCAST | SERVERS, marks=exhaustive),
        pytest.param("server-1", BROADCAST | SERVERS, marks=exhaustive),
    ],
)
def test_a_killed_process_costs_the_steps_since_the_last_checkpoint(
    tmp_path: Path, role: str, settings: dict[str, Any]
) -> None:
    """All processes of the run are started again."""
    run_dir = tmp_path / "r"
    goal = 24
    process = going(run_dir, 6, trainer__steps=goal, **settings)
    before = process_ids(run_dir)
    kill(run_dir, role)
    until(lambda: process_ids(run_dir).get("training", before["training"]) != before["training"], process)
    counts = assert_went_on(run_dir, process, 1, goal)
    assert counts["resumed_from"] >= 4
    restarts = counts["restarts"]["run"]
    assert restarts["steps_lost"] <= 5
    assert restarts["rollouts_abandoned"] > 0 or restarts["steps_lost"] == 0
    assert check(run_dir) == []
    assert not any(alive(pid) for pid in before.values())


@exhaustive
@pytest.mark.parametrize("weights", [{}, BROADCAST])
@pytest.mark.parametrize("whose", ["the run's", "external"])
def test_external_servers_outlive_the_trainer(tmp_path: Path, whose: str, weights: dict[str, str]) -> None:
    """They hold later weights than the checkpoint, and answers with these weights. Servers of the run are started again."""
    run_dir, settings = tmp_path / "r", {"engine__kind": "http", "engine__slots": 16} | weights
    with ExitStack() as stack:
        if whose == "external":
            server = stack.enter_context(serving(tmp_path, "--engine.slots", "16", "--weights-dir", str(SHARED_MEMORY)))
            settings["engine__urls"] = f"[{server.url}]"
            serving_pids = [server.process.pid]
        process = going(run_dir, 6, **settings)
        if whose != "external":
            serving_pids = [process_ids(run_dir)["server-0"]]
        kill(run_dir, "training")
        counts = assert_went_on(run_dir, process, 1)
        assert counts["resumed_from"] >= 4
        assert counts["restarts"]["run"]["rollouts_abandoned"] > 0
        assert check(run_dir) == []
        for path in (run_dir / "logs").glob("server-*.log"):
            assert path.read_text().count("is served at") == 2
        assert [alive(pid) for pid in serving_pids] == [whose == "external"]


@exhaustive
def test_a_run_that_is_interrupted_before_the_next_session_leaves_no_process(tmp_path: Path) -> None:
    run_dir = tmp_path / "r"
    process = going(run_dir, 6, launch__restarts=1, trainer__checkpoint_every=1000)
    pids = process_ids(run_dir)
    kill(run_dir, "training")
    assert process.stdout is not None
    while "the run goes on" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGINT)
    assert wait(process).status != 0
    until(lambda: not any(alive(pid) for pid in pids.values()))


@exhaustive
def test_without_a_checkpoint_it_starts_again_from_the_beginning(tmp_path: Path) -> None:
    run_dir = tmp_path / "r"
    process = going(run_dir, 3, trainer__checkpoint_every=0)
    kill(run_dir, "training")
    counts = assert_went_on(run_dir, process, 1)
    assert counts["resumed_from"] is None
    assert counts["restarts"]["run"]["steps_lost"] >= 3
    assert (run_dir / "before-1" / "metrics.jsonl").exists()


@exhaustive
def test_a_stopped_process_of_a_killed_launcher_keeps_the_next_session_out(tmp_path: Path) -> None:
    """It may write until it has ended. When it goes on, it ends by itself."""
    run_dir = tmp_path / "r"
    process = going(run_dir, 6)
    pids = process_ids(run_dir)
    stopped = kill(run_dir, "training", signal.SIGSTOP)
    process.kill()
    wait(process)
    until(lambda: not any(alive(pid) for pid in pids.values() if pid != stopped))
    refused = command("train", "--resume", str(run_dir))
    assert refused.status == 2
    assert f"{run_dir} is in use, and of its processes these are stopped: {stopped}; continue them" in refused.error
    assert refused.error.count("\n") == 1
    os.kill(stopped, signal.SIGCONT)
    ended = command("train", "--resume", str(run_dir))
    assert (ended.status, ended.error) == (0, "")
    assert_gone_on(run_dir, GOAL)


# ------------------------------------------------------------------------------------------------ at chosen moments


DIES = """
import os, signal, sys

def dies(owner, name, number, after):
    inner, calls = getattr(owner, name), []
    def call(*arguments, **options):
        calls.append(None)
        now = len(calls) == number
        result = None if now and not after else inner(*arguments, **options)
        if now:
            print(name, file=open(os.environ["DIED"], "a"), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(owner, name, call)

if "training" in sys.orig_argv:
    from pipelinerl import checkpoint
    from pipelinerl.weights.broadcast.group import BroadcastGroup
    from pipelinerl.weights.broadcast.sender import CollectiveWeightSender
    from pipelinerl.launch.stages import training
    from pipelinerl.trainer.step import Learner
    from pipelinerl.trainer.trainer import Trainer
    from pipelinerl.weights.sending import Sender
    deaths = open(os.environ["DIED"]).read().count("\\n")
    if deaths < len(MOMENTS):
        dies(*MOMENTS[deaths])
"""
MOMENTS = {
    "before a step": ["Learner, 'step', 7, False"],
    "after a step": ["Learner, 'step', 8, True"],
    "weights are not published": ["Sender, '_offer', 7, False"],
    "weights are published": ["Sender, '_offer', 7, True"],
    "a checkpoint has no name": ["checkpoint, '_install', 2, False"],
    "a checkpoint is there": ["checkpoint, '_install', 2, True"],
    "all steps are taken": ["Trainer, 'finish', 1, False"],
    "no weights are published": ["Sender, '_offer', 1, False"],
    "the first weights are published": ["Sender, '_offer', 1, True"],
    "twice, before it has recorded its session": ["Learner, 'step', 8, True", "training, 'session_recorder', 1, False"],
    "twice, when the engines have worked without it": ["Learner, 'step', 8, True", "Sender, '_offer', 1, False"],
}
"""Which call of which method ends the training process, and whether after the call."""
OF_A_BROADCAST = {
    "a broadcast has not begun": ["Group, 'broadcast', 7, False"],
    "a broadcast has ended": ["Group, 'broadcast', 7, True"],
    "engines may apply it": ["CollectiveWeightSender, '_broadcast', 7, True"],
    "no group is formed": ["CollectiveWeightSender, '_form_group', 1, False"],
    "a group is formed": ["CollectiveWeightSender, '_form_group', 1, True"],
    "twice, when engines join again": ["Learner, 'step', 8, True", "CollectiveWeightSender, '_form_group', 1, False"],
    "twice, when engines have joined": ["Learner, 'step', 8, True", "CollectiveWeightSender, '_form_group', 1, True"],
}


@exhaustive
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_version_is_one_set_of_weights_whenever_the_trainer_dies(
    moment: str, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_exact_after_deaths(MOMENTS[moment], tmp_path, monkeypatch, trainer__checkpoint_every=every, engine__processes=2)


@exhaustive
@pytest.mark.parametrize("engines", [{"engine__processes": 2}, {"engine__kind": "http", "engine__servers": 2}])
@pytest.mark.parametrize("moment", OF_A_BROADCAST)
def test_a_version_is_one_set_of_weights_whenever_its_broadcaster_dies(
    moment: str, engines: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = engines | BROADCAST | {"trainer__checkpoint_every": 3}
    assert_exact_after_deaths(OF_A_BROADCAST[moment], tmp_path, monkeypatch, **settings)


def assert_exact_after_deaths(deaths: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    """All that was trained on was sampled by the weights that its versions have at the end, and training is repeated."""
    listed = ", ".join(f"({death})" for death in deaths)
    (tmp_path / "sitecustomize.py").write_text(DIES.replace("MOMENTS", f"[{listed}]"))
    (tmp_path / "died").touch()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(pipelinerl.__file__).parents[1])]))
    monkeypatch.setenv("DIED", str(tmp_path / "died"))
    run_dir, goal = tmp_path / "r", 12
    defaults = {"trainer__steps": goal, "trainer__keep_versions": "all", "schedule__max_lag": 4}
    ended = wait(start_processes(run_dir, **(defaults | settings)))
    assert (ended.status, ended.error) == (0, "")
    counts = assert_gone_on(run_dir, goal)
    assert counts["lag_max"] <= 4
    assert counts["restarts"]["run"]["count"] == len(deaths)
    assert check(run_dir) == []
    result = replay(run_dir, verify=1000)
    assert result.differences == ()
    assert result.generation is not None
    assert result.generation.drawn == result.generation.tokens
