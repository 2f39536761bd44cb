"""A run over the machines of a Ray cluster: the same promises as on one machine, and machines that are lost.

All machines are this one, each with a raylet, a folder for temporary files and a name of its own. One test runs with the
other slow tests; `make test-ray` runs all.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from pipelinerl.launch.session import StartPlan
from pipelinerl.run_directory import RunDirectory
from pipelinerl.status.board import read_statuses
from pipelinerl.types import StageStatus
from tests.chaos.invariants import check
from tests.integration.runs import (
    Ended,
    alive,
    assert_conserved,
    assert_provenance,
    assert_trained_once,
    command,
    flags,
    start,
    steps,
    summary,
    until,
    wait,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.needs_ray]
if shutil.which("openssl") is None:
    pytest.skip("openssl is not installed (apt-get install openssl)", allow_module_level=True)

TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4, "RAY_USAGE_STATS_ENABLED": "0"}
ROOT = Path(__file__).parents[2]
IN_TIME_S = 60.0
"""For the end of a run after a loss: health checks take 4 s, the patience with a cause 3 s, `lost_s` is 5 s."""
OTHERS = ("machine-1", "machine-2")


class Machines:
    """A cluster of three machines: `machine-0`, where runs are started, and `OTHERS`, which tests remove."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        command = [sys.executable, "-m", "tests.integration.ray_machines", str(folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        self._there: set[str] = set()
        self.address = self._answer()

    def complete(self) -> None:
        """Add the machines that are not there, or not any more."""
        for name in OTHERS:
            if name not in self._there:
                self._tell("add", name)
                self._there.add(name)

    def remove(self, name: str) -> None:
        self._there.remove(name)
        self._tell("remove", name)

    def close(self) -> None:
        self._process.communicate(timeout=60)

    def _tell(self, command: str, name: str) -> None:
        assert self._process.stdin is not None
        print(command, name, file=self._process.stdin, flush=True)
        assert self._answer() == "done"

    def _answer(self) -> str:
        """The next line that is not one of Ray's."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line == "done\n" or re.fullmatch(r"[\d.]+:\d+\n", line):
                return line.strip()
        raise AssertionError("the cluster has ended")


CERTIFICATE, KEY = "certificate.pem", "key.pem"


def certify(folder: Path) -> None:
    """A certificate for this machine's address, which all processes of the cluster trust."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("8.8.8.8", 9))  # sends nothing
        address = probe.getsockname()[0]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=pipelinerl"]
    command += ["-addext", f"subjectAltName=IP:{address}", "-keyout", str(folder / KEY), "-out", str(folder / CERTIFICATE)]
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Machines]:
    # A short path: Ray makes sockets there.
    with tempfile.TemporaryDirectory(prefix="ray-") as folder, pytest.MonkeyPatch.context() as patch:
        certify(Path(folder))
        for name, value in {**TOKEN, "SSL_CERT_FILE": str(Path(folder) / CERTIFICATE)}.items():
            patch.setenv(name, value)
        machines = Machines(Path(folder))
        patch.setenv("RAY_ADDRESS", machines.address)
        try:
            yield machines
        finally:
            machines.close()


@pytest.fixture
def machines(cluster: Machines) -> Machines:
    cluster.complete()
    return cluster


SPREAD = {
    "launch__kind": "ray",
    "weights__kind": "collective",
}
APART = SPREAD | {"engine__kind": "http", "engine__servers": 2, "engine__slots": 8, "launch__preprocessor": "process"}
TWO_ACTORS = SPREAD | {"engine__processes": 2}
ENDLESS = {"trainer__steps": 100_000, "trainer__checkpoint_every": 2, "launch__restarts": 0}


def checked(run_dir: Path, ended: Ended) -> dict[str, Any]:
    """All that any run promises."""
    assert ended.status == 0, ended.error
    assert ended.error == ""
    counts = summary(run_dir)
    assert counts["status"] == "finished"
    assert_conserved(counts)
    assert_trained_once(run_dir)
    assert_provenance(run_dir)
    return counts


def resume_to_the_end(run_dir: Path, *arguments: str) -> dict[str, Any]:
    """Two steps further than the latest checkpoint. Checks what any run promises, over both sessions."""
    version = max([0, *(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step_*"))])
    goal = f"--trainer.steps={version + 2}"
    counts = checked(run_dir, command("train", "--resume", str(run_dir), goal, *arguments))
    assert counts["version"] == version + 2
    assert [step.version for step in steps(run_dir)] == list(range(1, version + 3))
    return counts


def statuses(run_dir: Path) -> dict[str, StageStatus]:
    return read_statuses(RunDirectory(run_dir).statuses)


def version_of(run_dir: Path) -> int:
    status = statuses(run_dir).get("trainer")
    return getattr(status.progress, "version", 0) if status is not None else 0


class Running:
    """A run without an end that is training. `pids` and `agents` by role and stage; all end with the run."""

    def __init__(self, run_dir: Path, **settings: Any) -> None:
        self.run_dir = run_dir
        self.process = start("train", *flags(run_dir, **{**ENDLESS, **settings}))
        until(lambda: version_of(run_dir) >= 3, self.process)
        found = statuses(run_dir)
        self.machines = {stage: status.machine for stage, status in found.items()}
        self.pids = {stage: status.pid for stage, status in found.items()}
        self.pids |= workers_of(run_dir, self.plan.id)
        self.agents = {role: parent_of(pid) for role, pid in self.pids.items()}

    @property
    def plan(self) -> StartPlan:
        return msgspec.json.decode(RunDirectory(self.run_dir).plan.read_bytes(), type=StartPlan)

    def end(self) -> Ended:
        """Wait for the end, which comes in time and leaves no process."""
        begin_s = time.monotonic()
        ended = wait(self.process)
        assert time.monotonic() - begin_s < IN_TIME_S
        assert "Traceback" not in ended.out + ended.error
        self.nothing_is_left()
        return ended

    def nothing_is_left(self) -> None:
        until(lambda: not any(map(alive, [self.process.pid, *self.pids.values(), *self.agents.values()])))


def workers_of(run_dir: Path, *sessions: str) -> dict[str, int]:
    """The process ids of the run's processes, by role, or of these sessions."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            _, *words = path.read_bytes().decode().split("\0")
            if words[:2] == ["-m", "pipelinerl.launch.hosts.worker"] and (
                words[3] == str(run_dir) or json.loads(words[4])["session"] in sessions
            ):
                found[words[2]] = int(path.parent.name)
    return found


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def opened_by(pid: int) -> set[str]:
    """The files that a process has open or mapped."""
    fds = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.exists()}
    maps = {line.split(maxsplit=5)[5] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if line.count("/")}
    return fds | maps


def scratch_folders(machines: Machines) -> set[Path]:
    """Those of machines that were removed stay."""
    return set(machines.folder.glob("*/pipelinerl-*/"))


# ---------------------------------------------------------------------------------------------- runs to their end


@pytest.mark.exhaustive
def test_a_run_over_three_machines_and_on_from_its_checkpoint(machines: Machines, tmp_path: Path) -> None:
    run_dir, before = tmp_path / "r", scratch_folders(machines)
    dry = command("train", "--dry-run", *flags(run_dir, **APART))
    assert dry.status == 0, dry.error
    for line in ("machine-0 (", "training, preprocessing", "server-0", "server-1", "on all machines"):
        assert line in dry.out
    counts = checked(run_dir, command("train", *flags(run_dir, **APART, trainer__steps=4, schedule__max_lag=4)))
    assert counts["peak_memory_bytes"].keys() == {"generation", "preprocessing", "training", "server-0", "server-1"}
    assert counts["rollouts_trained"] == 4 * 16
    assert counts["lag_max"] <= 4
    assert scratch_folders(machines) <= before
    resume_to_the_end(run_dir)


def test_a_run_over_three_machines_loses_one_and_goes_on_with_two(machines: Machines, tmp_path: Path) -> None:
    """Two actors on two machines. The removed machine ends the run and is named."""
    run = Running(tmp_path / "r", **TWO_ACTORS)
    assert run.machines["trainer"] == "machine-0"
    assert {run.machines["actor-0"], run.machines["actor-1"]} == {"machine-1", "machine-2"}
    for stage in ("actor-0", "actor-1"):  # everything goes over the connection with the hub
        opened = [name for name in opened_by(run.pids[stage]) if name.startswith(str(run.run_dir))]
        assert all(name.startswith(str(run.run_dir / "logs")) for name in opened)
    machines.remove(run.machines["actor-1"])
    ended = run.end()
    assert ended.status == 4
    assert f"machine {run.machines['actor-1']} " in ended.error
    assert "which runs generation-1, is lost" in ended.error
    counts = resume_to_the_end(run.run_dir)
    assert counts["rollouts_trained"] == counts["optimizer_steps"] * 16
    assert counts["peak_memory_bytes"].keys() == {"generation-0", "generation-1", "training"}


# ------------------------------------------------------------------------------------------------- the long form


@pytest.mark.exhaustive
def test_the_summary_is_that_of_a_run_on_one_machine(machines: Machines, tmp_path: Path) -> None:
    far = checked(tmp_path / "far", command("train", *flags(tmp_path / "far", **TWO_ACTORS, trainer__steps=2)))
    here = {"launch__kind": "processes", "engine__processes": 2, "trainer__steps": 2}
    near = checked(tmp_path / "near", command("train", *flags(tmp_path / "near", **here)))
    assert far.keys() == near.keys()
    assert far["peak_memory_bytes"].keys() == near["peak_memory_bytes"].keys()


@pytest.mark.exhaustive
def test_servers_speak_https_and_ask_for_the_key(machines: Machines, tmp_path: Path) -> None:
    files = {"engine__tls_certificate": machines.folder / CERTIFICATE, "engine__tls_key": machines.folder / KEY}
    run = Running(tmp_path / "r", **APART, **files)
    ready = msgspec.json.decode((run.run_dir / "control" / "server-0.ready.json").read_bytes())
    assert ready["url"].startswith("https://")
    for key, status in (("wrong", 401), (run.plan.servers_key, 200)):
        answer = httpx2.get(f"{ready['url']}/v1/models", headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code == status
    run.process.send_signal(signal.SIGINT)
    assert run.end().status == 130
    assert_conserved(summary(run.run_dir))


ROLES_APART = ("training", "server-0", "server-1", "preprocessing", "generation")
TWO_RANKS = {"training": "machine-1", "training-rank-1": "machine-2", "generation": "machine-0"}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("victim", "settings", "on"),
    [
        *(
            (one, APART, dict.fromkeys(ROLES_APART, "machine-0") | {one: "machine-1"})
            for one in ROLES_APART
            if one != "server-0"
        ),
        *((one, SPREAD | {"trainer__ranks": 2}, TWO_RANKS) for one in ("training", "training-rank-1")),
    ],
)
def test_a_machine_that_is_removed_under_any_role(
    victim: str, settings: dict[str, Any], on: dict[str, str], machines: Machines, tmp_path: Path
) -> None:
    """Another rank notices it first, and the machine is named all the same. The run goes on with the others."""
    run = Running(tmp_path / "r", **settings, launch__place=json.dumps(on))
    machines.remove(on[victim])
    ended = run.end()
    assert ended.status == 4
    assert f"machine {on[victim]} " in ended.error
    assert f"which runs {victim}, is lost" in ended.error
    counts = resume_to_the_end(run.run_dir, "--launch.place={}")
    assert counts["peak_memory_bytes"].keys() == on.keys()


@pytest.mark.exhaustive
@pytest.mark.parametrize("victim", ["training", "generation", "machine of the trainer", "machine of the actor"])
def test_a_run_that_loses_something_goes_on_by_itself(victim: str, machines: Machines, tmp_path: Path) -> None:
    settings = SPREAD | {"trainer__steps": 30, "trainer__checkpoint_every": 2, "launch__restarts": 2}
    if victim == "machine of the trainer":
        settings |= {"launch__place": json.dumps({"generation": "machine-0"})}  # so the trainer has another one
    run = Running(tmp_path / "r", **settings)
    if victim.startswith("machine"):
        machines.remove(run.machines[victim.rpartition(" ")[2]])
    else:
        os.kill(run.pids[victim], signal.SIGKILL)
    counts = checked(run.run_dir, wait(run.process))
    run.nothing_is_left()
    assert counts["restarts"]["run"]["count"] == 1
    assert counts["optimizer_steps"] == 30


@pytest.mark.exhaustive
def test_a_rank_on_another_machine_that_is_stopped_is_named(machines: Machines, tmp_path: Path) -> None:
    run = Running(tmp_path / "r", **SPREAD, trainer__ranks=2, launch__place=json.dumps(TWO_RANKS), launch__watchdog_s=20)
    os.kill(run.pids["training-rank-1"], signal.SIGSTOP)
    ended = run.end()
    assert ended.status == 4
    assert f"rank 1 of the trainer (pid {run.pids['training-rank-1']}) sent nothing for 10 s" in ended.error
    resume_to_the_end(run.run_dir, "--launch.watchdog_s=120")


@pytest.mark.exhaustive
def test_a_machine_that_is_removed_during_a_broadcast(machines: Machines, tmp_path: Path) -> None:
    """The sender waits for a receiver that is stopped; then the receiver's machine is gone."""
    run = Running(tmp_path / "r", **TWO_ACTORS)
    os.kill(run.pids["actor-1"], signal.SIGSTOP)
    until(lambda: stands_still(run.run_dir), run.process)
    machines.remove(run.machines["actor-1"])
    ended = run.end()
    assert ended.status == 4
    assert "which runs generation-1, is lost" in ended.error
    resume_to_the_end(run.run_dir)


def stands_still(run_dir: Path) -> bool:
    """Whether the trainer takes no step for a while."""
    before = version_of(run_dir)
    time.sleep(1.0)
    return version_of(run_dir) == before


@pytest.mark.exhaustive
def test_a_machine_that_is_removed_during_a_checkpoint(machines: Machines, tmp_path: Path) -> None:
    """The trainer is stopped while a checkpoint is half written, and never goes on."""
    settings = SPREAD | {"launch__place": json.dumps({"training": "machine-1"}), "trainer__checkpoint_every": 1}
    run = Running(tmp_path / "r", **settings)
    trainer = run.pids["trainer"]

    def stopped_in_a_checkpoint() -> bool:
        os.kill(trainer, signal.SIGSTOP)
        if unfinished(run.run_dir):
            return True
        os.kill(trainer, signal.SIGCONT)
        return False

    until(stopped_in_a_checkpoint, run.process)
    machines.remove("machine-1")
    ended = run.end()
    assert ended.status == 4
    assert "which runs training, is lost" in ended.error
    assert unfinished(run.run_dir)
    resume_to_the_end(run.run_dir, "--launch.place={}")


def unfinished(run_dir: Path) -> list[Path]:
    return [path for path in (run_dir / "checkpoints").iterdir() if not re.fullmatch(r"step_\d+", path.name)]


@pytest.mark.exhaustive
def test_an_agent_that_is_killed(machines: Machines, tmp_path: Path) -> None:
    """Nothing but the agent is wrong with its machine, and its process ends with it."""
    run = Running(tmp_path / "r", **TWO_ACTORS)
    os.kill(run.agents["generation-1"], signal.SIGKILL)
    ended = run.end()
    assert ended.status == 4
    assert f"machine {run.machines['actor-1']} " in ended.error
    assert "which runs generation-1, is lost" in ended.error
    resume_to_the_end(run.run_dir)


@pytest.mark.exhaustive
@pytest.mark.parametrize("settings", [APART, TWO_ACTORS])
def test_a_killed_launcher_takes_everything_with_it(settings: dict[str, Any], machines: Machines, tmp_path: Path) -> None:
    """And another launcher may go on at once: it waits for the agents of the first."""
    run = Running(tmp_path / "r", **settings)
    run.process.kill()
    assert run.end().status == -signal.SIGKILL
    resume_to_the_end(run.run_dir)


# ---- an earlier session that goes on after a later one has begun


class Frozen:
    """All processes of a machine are stopped: its part of Ray, its agent and its workers."""

    def __init__(self, machines: Machines, name: str) -> None:
        marker = os.fsencode(f"TMPDIR={machines.folder / name}")
        self._machines, self._name = machines, name
        self._pids = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if marker in path.read_bytes().split(b"\0"):
                    self._pids.append(int(path.parent.name))
        for pid in self._pids:
            os.kill(pid, signal.SIGSTOP)

    def goes_on(self) -> None:
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._machines.remove(self._name)
        until(lambda: not any(map(alive, self._pids)))


def next_session(run: Running, process: subprocess.Popen[str], earlier: str) -> None:
    """Wait until it has trained, and written and deleted checkpoints."""
    until(lambda: run.plan.id != earlier and version_of(run.run_dir) > run.plan.version + 6, process)


def log_of(run: Running, name: str) -> str:
    return (run.run_dir / "logs" / f"{name}.log").read_text()


def ends_whole(run: Running, process: subprocess.Popen[str]) -> None:
    """The later session goes on undisturbed, and so does the one after it."""
    version = version_of(run.run_dir)
    until(lambda: version_of(run.run_dir) > version + 4, process)
    process.send_signal(signal.SIGINT)
    assert wait(process).status == 130
    assert_conserved(summary(run.run_dir))
    resume_to_the_end(run.run_dir)


@pytest.mark.exhaustive
@pytest.mark.parametrize("moment", ["a checkpoint", "a step"])
def test_a_trainer_on_a_machine_that_was_frozen_writes_no_more(moment: str, machines: Machines, tmp_path: Path) -> None:
    place = {"generation": "machine-0"}  # so the trainer has another machine
    settings = SPREAD | {"launch__restarts": 2, "launch__place": json.dumps(place), "trainer__checkpoint_every": 1}
    run = Running(tmp_path / "r", **settings)
    trainer, earlier = run.pids["training"], run.plan.id

    def stopped() -> bool:
        os.kill(trainer, signal.SIGSTOP)
        if moment == "a step" or unfinished(run.run_dir):
            return True
        os.kill(trainer, signal.SIGCONT)
        return False

    until(stopped, run.process)
    frozen = Frozen(machines, run.machines["trainer"])
    next_session(run, run.process, earlier)
    os.kill(trainer, signal.SIGTERM)  # as the end of its agent would: it shall write a last checkpoint
    os.kill(trainer, signal.SIGCONT)
    until(lambda: not alive(trainer), run.process)
    frozen.goes_on()
    ends_whole(run, run.process)


@pytest.mark.exhaustive
def test_actors_on_a_machine_that_was_frozen_write_no_more(machines: Machines, tmp_path: Path) -> None:
    run = Running(tmp_path / "r", **TWO_ACTORS, launch__restarts=2)
    machine, earlier, actor = run.machines["actor-1"], run.plan.id, run.pids["actor-1"]
    frozen = Frozen(machines, machine)
    next_session(run, run.process, earlier)
    os.kill(actor, signal.SIGCONT)
    until(lambda: not alive(actor), run.process)
    assert "has ended this session of the run" in log_of(run, "generation-1")
    frozen.goes_on()
    ends_whole(run, run.process)


@pytest.mark.exhaustive
def test_what_can_not_run_is_refused_in_one_line(machines: Machines, tmp_path: Path) -> None:
    for name, settings, message in (
        ("gpu", {"trainer__device": "cuda"}, "no machine has 1 free GPUs for training: .* need 1 GPUs in all"),
        ("place", {"launch__place": '{"training": "far"}'}, "there is no machine far for training; the cluster has"),
        ("cluster", {"launch__ray_address": "127.0.0.1:1"}, "no connection with the Ray cluster 127.0.0.1:1"),
    ):
        ended = command("train", *flags(tmp_path / name, **SPREAD, **settings))
        assert ended.status == 2, ended.error
        assert re.search(message, ended.error), ended.error
        assert ended.error.count("\n") == 1
    run = Running(tmp_path / "r", **SPREAD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path))  # as on another machine, which does not see the first one's lock
        second = command("train", "--resume", str(tmp_path / "r"))
        assert second.status == 2
        assert "in use by another run on this cluster" in second.error
    version = version_of(run.run_dir)
    until(lambda: version_of(run.run_dir) > version, run.process)
    run.process.send_signal(signal.SIGINT)
    assert run.end().status == 130
    assert_conserved(summary(run.run_dir))


@pytest.mark.exhaustive
def test_a_preprocessor_that_dies_is_started_again_on_its_machine(machines: Machines, tmp_path: Path) -> None:
    """The run trains on with all that it had, and nothing is lost, doubled or miscounted."""
    settings = {"launch__restarts": 2, "schedule__max_lag": 4, "actor__max_tokens": 64}
    run = Running(tmp_path / "r", **APART | settings)
    dead = run.pids["preprocessing"]
    os.kill(dead, signal.SIGKILL)

    def works() -> bool:
        status = statuses(run.run_dir).get("preprocessor")
        run.pids["preprocessing"] = workers_of(run.run_dir, run.plan.id).get("preprocessing", dead)
        new = run.pids["preprocessing"] != dead and status is not None and status.pid == run.pids["preprocessing"]
        return new and status is not None and status.state != "starting"

    until(works, run.process)
    assert not alive(dead)
    assert statuses(run.run_dir)["preprocessor"].machine == run.machines["preprocessor"]
    version = version_of(run.run_dir)
    until(lambda: version_of(run.run_dir) > version + 4, run.process)
    working = workers_of(run.run_dir, run.plan.id)
    assert working == {role: run.pids[role] for role in ROLES_APART}, "all others are those before the kill"
    run.process.send_signal(signal.SIGINT)
    assert run.end().status == 130
    counts = summary(run.run_dir)
    assert_conserved(counts)
    assert counts["restarts"].keys() == {"preprocessing"}
    assert counts["restarts"]["preprocessing"]["count"] == len(counts["restarts"]["preprocessing"]["recovery_s"]) == 1
    resume_to_the_end(run.run_dir)
    assert check(run.run_dir) == []
