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
from tests.chaos.faults import processes_of
from tests.chaos.invariants import check
from tests.integration.runs import (
    Ended,
    alive,
    assert_finished,
    assert_whole,
    command,
    flags,
    start,
    steps,
    until,
    version_of,
    wait,
    write_environment,
)
from tests.integration.test_death import STARTS_A_PROCESS

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


SPREAD = {"launch__kind": "ray", "weights__kind": "collective"}
APART = SPREAD | {"engine__kind": "http", "engine__servers": 2, "engine__slots": 8, "launch__preprocessor": "process"}
TWO_ACTORS = SPREAD | {"engine__processes": 2}
TWO_RANKS = SPREAD | {"trainer__ranks": 2}
ENDLESS = {"trainer__steps": 100_000, "trainer__checkpoint_every": 2, "launch__restarts": 0}


def resume_to_the_end(run_dir: Path, *arguments: str) -> dict[str, Any]:
    """Two steps further than the latest checkpoint. Checks what any run promises, over all sessions."""
    version = max([0, *(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step_*"))])
    counts = assert_finished(
        run_dir, command("train", "--resume", str(run_dir), f"--trainer.steps={version + 2}", *arguments)
    )
    assert [step.version for step in steps(run_dir)] == list(range(1, version + 3))
    assert check(run_dir) == []
    return counts


class Running:
    """A run without an end that is training. `pids` and `machines` by role."""

    def __init__(self, run_dir: Path, on: dict[str, str] | None = None, **settings: Any) -> None:
        """`on`: the machines of some roles."""
        self.run_dir = run_dir
        self.process = start("train", *flags(run_dir, **ENDLESS | {"launch__place": json.dumps(on or {})} | settings))
        until(lambda: version_of(run_dir) >= 3, self.process)
        self.pids = processes_of(run_dir)
        self.machines = {role: machine_of(pid) for role, pid in self.pids.items()}

    @property
    def plan(self) -> StartPlan:
        return msgspec.json.decode(RunDirectory(self.run_dir).plan.read_bytes(), type=StartPlan)

    @property
    def unfinished(self) -> list[Path]:
        """Checkpoints that are half written."""
        return [path for path in (self.run_dir / "checkpoints").iterdir() if not re.fullmatch(r"step_\d+", path.name)]

    def stop(self, role: str, moment: str) -> None:
        """Stop this process, in a step or while a checkpoint is half written."""

        def stopped() -> bool:
            os.kill(self.pids[role], signal.SIGSTOP)
            if moment == "a step" or self.unfinished:
                return True
            os.kill(self.pids[role], signal.SIGCONT)
            return False

        until(stopped, self.process)

    def go_on(self, steps: int) -> None:
        """Wait until it has taken so many more steps."""
        version = version_of(self.run_dir)
        until(lambda: version_of(self.run_dir) > version + steps, self.process)

    def end(self) -> Ended:
        """Wait for the end, which comes in time and leaves no process."""
        begin_s = time.monotonic()
        ended = wait(self.process)
        assert time.monotonic() - begin_s < IN_TIME_S
        assert "Traceback" not in ended.out + ended.error
        until(lambda: not any(map(alive, self.pids.values())) and not processes_of(self.run_dir))
        return ended

    def interrupt(self) -> dict[str, Any]:
        self.process.send_signal(signal.SIGINT)
        assert self.end().status == 130
        return assert_whole(self.run_dir)


def machine_of(pid: int) -> str:
    """Each machine has its own folder for temporary files."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next(Path(os.fsdecode(value)).name for value in variables if value.startswith(b"TMPDIR="))


@pytest.mark.exhaustive
def test_a_run_over_three_machines_and_on_from_its_checkpoint(machines: Machines, tmp_path: Path) -> None:
    run_dir = tmp_path / "r"
    dry = command("train", "--dry-run", *flags(run_dir, **APART))
    assert dry.status == 0, dry.error
    for line in ("machine-0 (", "training, preprocessing", "server-0", "server-1", "on all machines"):
        assert line in dry.out
    ended = command("train", *flags(run_dir, **APART, trainer__steps=4, schedule__max_lag=4))
    counts = assert_finished(run_dir, ended)
    assert counts["peak_memory_bytes"].keys() == {"generation", "preprocessing", "training", "server-0", "server-1"}
    assert counts["rollouts_trained"] == 4 * 16
    assert counts["lag_max"] <= 4
    resume_to_the_end(run_dir)


APART_ON = dict.fromkeys(("training", "server-0", "server-1", "preprocessing", "generation"), "machine-0")
RANKS_ON = {"training": "machine-1", "training-rank-1": "machine-2", "generation": "machine-0"}


@pytest.mark.parametrize(
    ("victim", "settings", "on", "moment"),
    [
        ("generation-1", TWO_ACTORS, {"training": "machine-0"}, ""),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                *((one, APART, APART_ON | {one: "machine-1"}, "") for one in APART_ON if one != "server-0"),
                ("training", TWO_RANKS, RANKS_ON, ""),
                ("training-rank-1", TWO_RANKS, RANKS_ON, ""),
                ("generation-1", TWO_ACTORS, {"training": "machine-0"}, "a step"),  # the trainer waits in a broadcast
                ("training", SPREAD, {"training": "machine-1"}, "a checkpoint"),
            )
        ),
    ],
)
def test_a_machine_that_is_removed_ends_the_run_and_is_named(
    victim: str, settings: dict[str, Any], on: dict[str, str], moment: str, *, machines: Machines, tmp_path: Path
) -> None:
    """Another process may notice it first. The run goes on with the other machines."""
    if moment == "a checkpoint":
        settings = settings | {"trainer__checkpoint_every": 1}
    run = Running(tmp_path / "r", on, **settings)
    if victim == "generation-1":
        assert {run.machines["generation-0"], run.machines["generation-1"]} == {"machine-1", "machine-2"}
    if moment:
        run.stop(victim, moment)
        time.sleep(1.0)
    machines.remove(run.machines[victim])
    ended = run.end()
    assert ended.status == 4
    assert f"machine {run.machines[victim]} " in ended.error
    assert f"which runs {victim}, is lost" in ended.error
    assert bool(run.unfinished) == (moment == "a checkpoint")
    counts = resume_to_the_end(run.run_dir, "--launch.place={}")
    assert counts["peak_memory_bytes"].keys() == run.pids.keys()


@pytest.mark.exhaustive
@pytest.mark.parametrize("victim", ["training", "generation", "machine of training", "machine of generation"])
def test_a_run_that_loses_something_goes_on_by_itself(victim: str, machines: Machines, tmp_path: Path) -> None:
    settings = SPREAD | {"trainer__steps": 30, "launch__restarts": 2}
    run = Running(tmp_path / "r", {"generation": "machine-0"} if victim == "machine of training" else {}, **settings)
    if victim.startswith("machine"):
        machines.remove(run.machines[victim.rpartition(" ")[2]])
    else:
        os.kill(run.pids[victim], signal.SIGKILL)
    counts = assert_finished(run.run_dir, wait(run.process))
    until(lambda: not any(map(alive, run.pids.values())))
    assert counts["restarts"] == {"run": 1}
    assert counts["optimizer_steps"] == 30


@pytest.mark.exhaustive
def test_a_killed_process_is_named_and_what_it_has_started_ends_with_it(machines: Machines, tmp_path: Path) -> None:
    body = STARTS_A_PROCESS.format(path=str(tmp_path / "child"))
    kind = write_environment(tmp_path, body, imports=["import subprocess"])
    run = Running(tmp_path / "r", **SPREAD, environment__kind=kind)
    pid = run.pids["generation"]
    os.kill(pid, signal.SIGKILL)
    until(lambda: not alive(int((tmp_path / "child").read_text())))
    ended = run.end()
    assert ended.status == 4
    assert f"the generation process (pid {pid} on {run.machines['generation']}) was killed or crashed" in ended.error
    resume_to_the_end(run.run_dir)


@pytest.mark.exhaustive
def test_a_rank_on_another_machine_that_is_stopped_is_named(machines: Machines, tmp_path: Path) -> None:
    run = Running(tmp_path / "r", RANKS_ON, **TWO_RANKS, launch__watchdog_s=20)
    os.kill(run.pids["training-rank-1"], signal.SIGSTOP)
    ended = run.end()
    assert ended.status == 4
    named = f"the training-rank-1 process (pid {run.pids['training-rank-1']} on machine-2) no longer answers"
    assert named in ended.error
    resume_to_the_end(run.run_dir, "--launch.watchdog_s=120")


@pytest.mark.exhaustive
@pytest.mark.parametrize("settings", [APART, TWO_ACTORS])
def test_a_killed_launcher_takes_everything_with_it(settings: dict[str, Any], machines: Machines, tmp_path: Path) -> None:
    """And another launcher may go on at once: it waits for the processes of the first."""
    run = Running(tmp_path / "r", **settings)
    run.process.kill()
    assert run.end().status == -signal.SIGKILL
    resume_to_the_end(run.run_dir)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("role", "settings", "moment"),
    [
        ("training", SPREAD | {"trainer__checkpoint_every": 1}, "a checkpoint"),
        ("training", SPREAD | {"trainer__checkpoint_every": 1}, "a step"),
        ("generation-1", TWO_ACTORS, "a step"),
    ],
)
def test_a_process_on_a_machine_that_was_frozen_writes_no_more(
    role: str, settings: dict[str, Any], moment: str, machines: Machines, tmp_path: Path
) -> None:
    """It goes on after a later session has begun, has trained, and has written and deleted checkpoints."""
    on = {"generation": "machine-0"} if role == "training" else {}  # so the trainer has another machine
    run = Running(tmp_path / "r", on, **settings, launch__restarts=2)
    frozen, earlier, pid = run.machines[role], run.plan.id, run.pids[role]
    run.stop(role, moment)
    marker = os.fsencode(f"TMPDIR={machines.folder / frozen}")
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if marker in path.read_bytes().split(b"\0"):
                pids.append(int(path.parent.name))
    for one in pids:
        os.kill(one, signal.SIGSTOP)
    until(lambda: run.plan.id != earlier and version_of(run.run_dir) > run.plan.version + 6, run.process)
    os.kill(pid, signal.SIGTERM)  # a trainer shall write a last checkpoint
    os.kill(pid, signal.SIGCONT)
    log = run.run_dir / "logs" / f"{role}.log"
    until(lambda: "has ended this session of the run" in log.read_text(), run.process)
    run.go_on(steps=4)
    for one in pids:
        with suppress(ProcessLookupError):
            os.kill(one, signal.SIGCONT)
    machines.remove(frozen)
    until(lambda: not any(map(alive, pids)))
    run.go_on(steps=4)
    run.interrupt()
    resume_to_the_end(run.run_dir)


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


@pytest.mark.exhaustive
def test_servers_ask_for_the_key_over_https_and_no_other_launcher_gets_in(machines: Machines, tmp_path: Path) -> None:
    files = {"engine__tls_certificate": machines.folder / CERTIFICATE, "engine__tls_key": machines.folder / KEY}
    run = Running(tmp_path / "r", **APART, **files)
    ready = msgspec.json.decode((run.run_dir / "control" / "server-0.ready.json").read_bytes())
    assert ready["url"].startswith("https://")
    for key, status in (("wrong", 401), (run.plan.servers_key, 200)):
        answer = httpx2.get(f"{ready['url']}/v1/models", headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code == status
    (run.run_dir / ".lock").unlink()  # as on another machine, whose file system has no locks
    second = command("train", "--resume", str(run.run_dir))
    assert second.status == 2
    assert "in use by another run on this cluster" in second.error
    run.go_on(steps=1)
    run.interrupt()
