"""A run that loses a process goes on by itself, and nothing is lost, doubled or miscounted.

Some processes are started again while the others continue. The loss of any other process takes the session with it, and the
next one begins at the latest checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import pipelinerl
from pipelinerl.experiments.replay.replay import replay
from pipelinerl.files import SHARED_MEMORY
from pipelinerl.report.series import read_timeline
from pipelinerl.resources.memory import BETWEEN
from tests.chaos.faults import processes_of
from tests.chaos.invariants import check
from tests.integration.runs import (
    alive,
    assert_finished,
    assert_gone_on,
    assert_provenance,
    assert_whole,
    command,
    endless,
    groups,
    in_training,
    process_ids,
    start,
    start_processes,
    status_of,
    steps,
    trained,
    until,
    version_of,
    wait,
    write_environment,
)
from tests.integration.test_conservation import MISBEHAVES, TIMEOUTS
from tests.integration.test_provenance import EVERY_VERSION, assert_recomputed
from tests.integration.test_serve import serving

pytestmark = pytest.mark.slow
exhaustive = pytest.mark.exhaustive

GOAL = 24
TWO = {"engine__processes": 2}
PREPROCESSOR = {"launch__preprocessor": "process"}
HTTP = {"engine__kind": "http"}
SERVERS = HTTP | {"engine__servers": 2, "engine__slots": 8}
BROADCAST = {"weights__kind": "collective", "weights__encoding": "delta"}
ROUNDS = {"schedule__steps_per_round": 2, "schedule__max_lag": None}


def going(run_dir: Path, version: int, **settings: Any) -> subprocess.Popen[str]:
    """A run of `GOAL` steps with checkpoints every 4, once it has come to `version`."""
    defaults = {"trainer__steps": GOAL, "trainer__checkpoint_every": 4, "metrics__view": "plain", "schedule__max_lag": 4}
    process = start_processes(run_dir, **(defaults | settings))
    until(lambda: version_of(run_dir) >= version, process)
    return process


def kill(run_dir: Path, role: str, number: signal.Signals = signal.SIGKILL) -> int:
    """Send the signal to the process of this role. Returns its id."""
    pid = processes_of(run_dir)[role]
    os.kill(pid, number)
    return pid


def assert_went_on(run_dir: Path, process: subprocess.Popen[str], *, sessions: int = 1) -> dict[str, Any]:
    """The run reached its goal after so many returns to a checkpoint, and said so. Returns its summary."""
    ended = wait(process)
    assert (ended.status, ended.error) == (0, "")
    counts = assert_gone_on(run_dir, GOAL)
    assert counts["restarts"].get("run", 0) == sessions == ended.out.count("; the run ")
    assert check(run_dir) == []
    return counts


OF_THE_RUN = [
    ("training", {}),
    ("training", {"trainer__checkpoint_every": 0}),
    ("training-rank-1", {"trainer__ranks": 2}),
    ("training", BROADCAST | TWO),
    ("training-rank-1", BROADCAST | {"trainer__ranks": 2}),
    ("generation-1", BROADCAST | TWO),
    ("generation", BROADCAST | SERVERS),
    ("server-1", SERVERS),
]
"""Processes whose loss ends the session."""
ALONE = [
    ("generation-1", TWO | ROUNDS | {"schedule__kind": "conventional"}),
    ("generation-1", TWO | ROUNDS | {"schedule__kind": "async"}),
    ("generation", {"stream__capacity": 4, "stream__when_full": "drop_oldest"}),
    ("generation", HTTP),
    ("preprocessing", PREPROCESSOR | BROADCAST),
]
"""Processes that are started again while the others continue."""


@pytest.mark.parametrize(
    ("victim", "settings", "alone"),
    [
        *(pytest.param(*case, False, marks=exhaustive if number else ()) for number, case in enumerate(OF_THE_RUN)),
        *(pytest.param(*case, True, marks=exhaustive) for case in ALONE),
    ],
)
def test_a_run_that_loses_a_process_reaches_its_goal(
    victim: str, settings: dict[str, Any], alone: bool, tmp_path: Path
) -> None:
    run_dir = tmp_path / "r"
    process = going(run_dir, 6, **settings)
    before, pid = process_ids(run_dir), kill(run_dir, victim)
    new = victim if alone else "training"
    until(lambda: process_ids(run_dir).get(new, before[new]) != before[new], process)
    if alone:
        for ready in (run_dir / "control").glob("server-*.ready.json"):
            assert_asks_for_its_key(json.loads(ready.read_bytes())["url"])
    counts = assert_went_on(run_dir, process, sessions=not alone)
    assert counts["lag_max"] <= 4
    assert not any(alive(one) for one in (pid, *before.values()))
    if alone:
        assert counts["restarts"] == {victim: 1}
    elif settings.get("trainer__checkpoint_every") == 0:
        assert counts["resumed_from"] is None
        assert (run_dir / "before-1" / "metrics.jsonl").exists()
    else:
        assert counts["resumed_from"] >= 4


def assert_asks_for_its_key(url: str) -> None:
    """Other users of this machine reach its port, and so does the code of rewards."""
    for path in ("/generate", "/request_weight_update", "/init_process_group"):
        with closing(HTTPConnection(urlsplit(url).netloc, timeout=20)) as connection:
            connection.request("POST", path, body=b"{}", headers={"Content-Type": "application/json"})
            assert connection.getresponse().status == 401, path


def assert_healed(run_dir: Path, process: subprocess.Popen[str], role: str) -> dict[str, Any]:
    """All that a run promises that reached its goal, and that no group was recorded twice. Returns its summary."""
    counts = assert_finished(run_dir, wait(process))
    assert [record.version for record in trained(run_dir)] == list(range(1, len(steps(run_dir)) + 1))
    indices = [group.index for group in groups(run_dir)]
    assert len(indices) == len(set(indices))
    timeline = read_timeline(run_dir)
    assert [look.time_s for look in timeline] == sorted(look.time_s for look in timeline)
    assert counts["lag_max"] <= 4
    assert counts["restarts"] == {role: 1}
    return counts


DIES_AT_12 = """
def problem(self, index):
    if index == 12 and not os.path.exists({path!r}):
        open({path!r}, "w").close()
        os.kill(os.getpid(), 9)
    return super().problem(index)
"""


def test_a_process_that_dies_is_started_again_and_every_token_is_of_its_version(tmp_path: Path) -> None:
    """It dies as it starts a group; the new process starts that group first. The environment fails in every other way, too.

    The timeout leaves enough time for rollouts that do nothing wrong, on a busy machine too.
    """
    run_dir = tmp_path / "r"
    body = MISBEHAVES + DIES_AT_12.format(path=str(tmp_path / "died"))
    kind = write_environment(tmp_path, body, imports=["import os"])
    settings = {"environment__kind": kind, "engine__kv_on_update": "recompute"}
    settings |= TIMEOUTS | {"actor__rollout_timeout_s": 4.0}
    process = start_processes(run_dir, **settings, **EVERY_VERSION, schedule__max_lag=4)
    counts = assert_healed(run_dir, process, "generation")
    assert counts["rollouts_trained"] == 6 * 16
    assert counts["rollouts_dropped"]["lost_in_crash"] >= 4
    assert 12 in {group.index for group in groups(run_dir)}
    assert {"raised", "bad_rollout", "timeout"} <= counts["rollouts_dropped"].keys()
    assert assert_provenance(run_dir) >= 3
    assert_recomputed(run_dir)


@exhaustive
def test_a_run_is_stopped_while_a_process_is_away(tmp_path: Path) -> None:
    run_dir = tmp_path / "r"
    process = start_processes(run_dir, trainer__steps=100_000, schedule__max_lag=4)
    with in_training(process, run_dir) as pids:
        os.kill(pids["generation"], signal.SIGKILL)
        until(lambda: (found := status_of(run_dir, "actor")) is not None and found.pid == process.pid, process)
        process.send_signal(signal.SIGINT)
        assert wait(process).status == 130
    counts = assert_whole(run_dir)
    goal = counts["version"] + 2
    assert wait(start("train", "--resume", str(run_dir), f"--trainer.steps={goal}")).status == 0
    assert_gone_on(run_dir, goal)


@exhaustive
@pytest.mark.parametrize("when", ["before", "online", "after"])
def test_an_evaluation_that_a_death_interrupts_is_repeated(when: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "r"
    process = start_processes(
        run_dir, engine__processes=2, evaluation__problems=300, evaluation__every=4, trainer__steps=10, schedule__max_lag=4
    )
    text = {"before": "before training", "online": "since version", "after": "after training"}[when]

    def evaluates() -> bool:
        status = status_of(run_dir, "actor-0")
        return status is not None and text in status.detail

    until(evaluates, process)
    kill(run_dir, "generation-0")
    counts = assert_healed(run_dir, process, "generation-0")
    assert counts["eval_reward_before"] is not None
    assert counts["eval_reward_after"] is not None
    lines = (run_dir / "evaluations.jsonl").read_text().splitlines()
    assert sum('"before"' in line for line in lines) == sum('"after"' in line for line in lines) == 1
    versions = [record["version"] for record in counts["eval_online"]]
    assert versions == sorted(set(versions))


@exhaustive
@pytest.mark.parametrize("weights", [{}, BROADCAST])
@pytest.mark.parametrize("whose", ["the run's", "external"])
def test_external_servers_outlive_the_trainer(tmp_path: Path, whose: str, weights: dict[str, str]) -> None:
    """They hold later weights than the checkpoint, and answers with these weights. Servers of the run are started again."""
    run_dir, settings = tmp_path / "r", HTTP | {"engine__slots": 16} | weights
    with ExitStack() as stack:
        if whose == "external":
            server = stack.enter_context(serving(tmp_path, "--engine.slots", "16", "--weights-dir", str(SHARED_MEMORY)))
            settings["engine__urls"] = f"[{server.url}]"
            serving_pids = [server.process.pid]
        process = going(run_dir, 6, **settings)
        if whose != "external":
            serving_pids = [process_ids(run_dir)["server-0"]]
        kill(run_dir, "training")
        assert assert_went_on(run_dir, process)["resumed_from"] >= 4
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
    while "; the run " not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGINT)
    assert wait(process).status != 0
    until(lambda: not any(alive(pid) for pid in pids.values()))


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
    assert f"{run_dir} is in use by another run, or by stopped processes of one" in refused.error
    assert refused.error.count("\n") == 1
    os.kill(stopped, signal.SIGCONT)
    ended = command("train", "--resume", str(run_dir))
    assert (ended.status, ended.error) == (0, "")
    assert_gone_on(run_dir, GOAL)


# ------------------------------------------------------------------------------------------------ at chosen moments


DIES = """
import os, runpy, signal, sys

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

run_module = runpy.run_module

def planted(module, **options):
    if sys.argv[1] == "training":
        from pipelinerl.trainer import saving
        from pipelinerl.weights.broadcast.group import BroadcastGroup
        from pipelinerl.weights.broadcast.sender import CollectiveWeightSender
        from pipelinerl.launch.stages import training
        from pipelinerl.trainer.step import Learner
        from pipelinerl.trainer.trainer import Trainer
        from pipelinerl.weights.sending import Sender
        deaths = open(os.environ["DIED"]).read().count("\\n")
        if deaths < len(MOMENTS):
            dies(*MOMENTS[deaths])
    return run_module(module, **options)

runpy.run_module = planted  # in the server from which the run's processes are forked
"""
MOMENTS = {
    "before a step": ["Learner, 'step', 7, False"],
    "after a step": ["Learner, 'step', 8, True"],
    "weights are not published": ["Sender, '_offer', 7, False"],
    "weights are published": ["Sender, '_offer', 7, True"],
    "a checkpoint has no name": ["saving, 'install', 2, False"],
    "a checkpoint is there": ["saving, 'install', 2, True"],
    "all steps are taken": ["Trainer, 'finish', 1, False"],
    "no weights are published": ["Sender, '_offer', 1, False"],
    "the first weights are published": ["Sender, '_offer', 1, True"],
    "twice, before it has recorded its session": ["Learner, 'step', 8, True", "training, 'session_record', 1, False"],
    "twice, when the engines have worked without it": ["Learner, 'step', 8, True", "Sender, '_offer', 1, False"],
}
"""Which call of which method ends the training process, and whether after the call."""
OF_A_BROADCAST = {
    "a broadcast has not begun": ["BroadcastGroup, 'broadcast', 7, False"],
    "a broadcast has ended": ["BroadcastGroup, 'broadcast', 7, True"],
    "engines may apply it": ["CollectiveWeightSender, '_broadcast', 7, True"],
    "no group is formed": ["CollectiveWeightSender, '_form_group', 1, False"],
    "a group is formed": ["CollectiveWeightSender, '_form_group', 1, True"],
    "twice, when engines join again": ["Learner, 'step', 8, True", "CollectiveWeightSender, '_form_group', 1, False"],
    "twice, when engines have joined": ["Learner, 'step', 8, True", "CollectiveWeightSender, '_form_group', 1, True"],
}


SERVED = {"engine__kind": "http", "engine__servers": 2}
CASES = [
    *((moment, MOMENTS[moment], TWO | {"trainer__checkpoint_every": every}) for moment in MOMENTS for every in (1, 3)),
    *((moment, OF_A_BROADCAST[moment], engines | BROADCAST) for moment in OF_A_BROADCAST for engines in (TWO, SERVED)),
]


@exhaustive
@pytest.mark.parametrize(("deaths", "settings"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_version_is_one_set_of_weights_whenever_the_trainer_dies(
    deaths: list[str], settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that was trained on was sampled by the weights that its versions have at the end, and training is repeated."""
    listed = ", ".join(f"({death})" for death in deaths)
    (tmp_path / "sitecustomize.py").write_text(DIES.replace("MOMENTS", f"[{listed}]"))
    (tmp_path / "died").touch()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(pipelinerl.__file__).parents[1])]))
    monkeypatch.setenv("DIED", str(tmp_path / "died"))
    run_dir, goal = tmp_path / "r", 12
    defaults = {"trainer__steps": goal, "trainer__checkpoint_every": 3, "trainer__weights_every": 1, "schedule__max_lag": 4}
    ended = wait(start_processes(run_dir, **(defaults | settings)))
    assert (ended.status, ended.error) == (0, "")
    counts = assert_gone_on(run_dir, goal)
    assert counts["lag_max"] <= 4
    assert counts["restarts"] == {"run": len(deaths)}
    assert check(run_dir) == []
    result = replay(run_dir, verify=1000)
    assert result.differences == []
    assert result.generation is not None
    assert result.generation.drawn == result.generation.tokens


# ------------------------------------------------------------------------------------------------ by hand


def test_stopped_in_any_way_it_goes_on_with_any_number_of_processes(tmp_path: Path) -> None:
    """One generation process, everything is killed at once; three, Ctrl-C; two, to its end. Together they are one run.

    The stream is one, whoever writes it: what was handed over is trained on, by whom it was generated does not matter.
    """
    run_dir = tmp_path / "r"
    settings = {"schedule__max_lag": 4, "trainer__checkpoint_every": 2, "evaluation__problems": 8}
    with endless(run_dir, **settings) as (process, pids):
        for pid in (process.pid, *pids.values()):
            os.kill(pid, signal.SIGKILL)
        assert wait(process).status == -signal.SIGKILL
    process = start("train", "--resume", str(run_dir), "--engine.processes=3")
    with in_training(process, run_dir, version_of(run_dir) + 2, workers=4):
        process.send_signal(signal.SIGINT)
        ended = wait(process)
    assert ended.status == 130
    assert "--resume" in ended.error
    assert "Traceback" not in ended.out + ended.error
    stopped = assert_whole(run_dir)
    assert stopped["status"] == "interrupted"
    assert (run_dir / "checkpoints" / f"step_{stopped['version']:08d}").is_dir()
    goal = stopped["version"] + 3
    ended = command("train", "--resume", str(run_dir), f"--trainer.steps={goal}", "--engine.processes=2")
    assert ended.status == 0, ended.error
    counts = assert_gone_on(run_dir, goal)
    assert counts["lag_max"] <= 4
    assert counts["eval_reward_before"] is not None
    assert counts["eval_reward_after"] is not None
    assert 0 < counts["engine_busy_fraction"] <= 1
    assert counts["peak_memory_bytes"].keys() == {"generation-0", "generation-1", "training"}
    assert counts["predicted_memory_bytes"].keys() == counts["peak_memory_bytes"].keys() | {BETWEEN}
    timeline = read_timeline(run_dir)
    assert [look.time_s for look in timeline] == sorted(look.time_s for look in timeline)
    generated = {worker: [look.tokens_generated for look in timeline if look.worker == worker] for worker in range(3)}
    assert min(map(max, generated.values())) > 0
    assert steps(run_dir)[-1].engine is not None
