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
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from pipelinerl.config.schema import RunConfig
from pipelinerl.launch.run_directory import RunDirectory
from pipelinerl.launch.session import StartPlan
from pipelinerl.launch.stages.streams import redis_of
from pipelinerl.stream.redis_server import RedisServer, start_server
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

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.needs_ray, pytest.mark.needs_redis]
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
        self._away: set[str] = set()
        self.address = self._answer()

    def complete(self, *away: str) -> None:
        """Add the machines that are not there, or not any more. Those that are `away` do not see the run directory."""
        for name in OTHERS:
            if name not in self._there or (name in self._away) != (name in away):
                self._tell("away" if name in away else "add", name)
                self._there.add(name)
        self._away = set(away)

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
    "stream__kind": "redis",
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
    assert not list((run_dir / "rollouts").glob("rollouts-*.jsonl")), "the files of the generation processes are joined"
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
    """The status board in Redis."""
    import redis

    run = RunDirectory(run_dir)
    try:
        plan = msgspec.json.decode(run.plan.read_bytes(), type=StartPlan)
        config = RunConfig.model_validate_json(run.settings.read_bytes())
        url, prefix, _ = redis_of(config, run, plan.redis_url)
        with redis.Redis.from_url(url) as client:
            found: Any = client.hgetall(f"{{{prefix}}}board")
    except (OSError, redis.ConnectionError, msgspec.DecodeError):
        return {}
    return {stage.decode(): msgspec.json.decode(payload, type=StageStatus) for stage, payload in found.items()}


def version_of(run_dir: Path) -> int:
    status = statuses(run_dir).get("trainer")
    return getattr(status.progress, "version", 0) if status is not None else 0


class Running:
    """A run without an end that is training. `pids` by role, `agents` by machine, `launcher`; all end with the run."""

    def __init__(self, run_dir: Path, **settings: Any) -> None:
        self.run_dir = run_dir
        self.process = start("train", *flags(run_dir, **{**ENDLESS, **settings}))
        until(lambda: version_of(run_dir) >= 3, self.process)
        found = statuses(run_dir)
        self.machines = {stage: status.machine for stage, status in found.items()}
        self.pids = {stage: status.pid for stage, status in found.items()}
        self.pids |= workers_of(run_dir, self.plan.id)
        self.agents = {self.machines[stage]: parent_of(pid) for stage, pid in self.pids.items() if stage in self.machines}

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


def broker_of(run: Running) -> int:
    return next(pid for pid in children(run.process.pid) if "redis-server" in Path(f"/proc/{pid}/cmdline").read_text())


def workers_of(run_dir: Path, *sessions: str) -> dict[str, int]:
    """The process ids of the run's processes, by role. On machines without the run directory: of these sessions."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            _, *words = path.read_bytes().decode().split("\0")
            if words[:2] == ["-m", "pipelinerl.launch.hosts.worker"] and (
                words[3] == str(run_dir) or json.loads(words[7])["session"] in sessions
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
    """Two actors on two machines: nothing on one is opened on the other. The removed machine ends the run and is named."""
    run = Running(tmp_path / "r", **TWO_ACTORS)
    assert run.machines["trainer"] == "machine-0"
    assert {run.machines["actor-0"], run.machines["actor-1"]} == {"machine-1", "machine-2"}
    folders = {machine: str(machines.folder / machine) for machine in run.agents}
    for stage, machine in run.machines.items():
        opened = opened_by(run.pids[stage])
        others = [folder for name, folder in folders.items() if name != machine]
        assert any(name.startswith(folders[machine]) and name.endswith(".board") for name in opened)
        assert not [name for name in opened if any(name.startswith(other) for other in others)]
        shared = [name for name in opened if name.startswith(str(run.run_dir))]
        assert not [name for name in shared if name.endswith((".board", ".lock", "admission"))]
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


@pytest.mark.exhaustive
@pytest.mark.parametrize("victim", ["training", "server-1", "preprocessing", "generation"])
def test_a_machine_that_is_removed_under_any_role(victim: str, machines: Machines, tmp_path: Path) -> None:
    """Afterwards the run goes on with the machines that are left."""
    place = dict.fromkeys(("training", "server-0", "server-1", "preprocessing", "generation"), "machine-0")
    run = Running(tmp_path / "r", **APART, launch__place=json.dumps(place | {victim: "machine-1"}))
    machines.remove("machine-1")
    ended = run.end()
    assert ended.status == 4
    assert f"which runs {victim}, is lost" in ended.error
    resume_to_the_end(run.run_dir, "--launch.place={}")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "victim", ["training", "generation", "redis-server", "machine of the trainer", "machine of the actor"]
)
def test_a_run_that_loses_something_goes_on_by_itself(victim: str, machines: Machines, tmp_path: Path) -> None:
    settings = SPREAD | {"trainer__steps": 30, "trainer__checkpoint_every": 2, "launch__restarts": 2}
    if victim == "machine of the trainer":
        settings |= {"launch__place": json.dumps({"generation": "machine-0"})}  # so the trainer has another one
    run = Running(tmp_path / "r", **settings)
    if victim.startswith("machine"):
        machines.remove(run.machines[victim.rpartition(" ")[2]])
    else:
        os.kill(run.pids[victim] if victim in run.pids else broker_of(run), signal.SIGKILL)
    counts = checked(run.run_dir, wait(run.process))
    run.nothing_is_left()
    assert counts["restarts"]["run"]["count"] == 1
    assert counts["optimizer_steps"] == 30


@pytest.mark.exhaustive
@pytest.mark.parametrize("victim", ["training", "training-rank-1"])
def test_a_machine_with_a_rank_of_the_trainer_is_removed(victim: str, machines: Machines, tmp_path: Path) -> None:
    """The other rank notices it first, and the machine is named all the same."""
    on = {"training": "machine-1", "training-rank-1": "machine-2", "generation": "machine-0"}
    run = Running(tmp_path / "r", **SPREAD, trainer__ranks=2, launch__place=json.dumps(on))
    assert run.pids.keys() >= on.keys()
    machines.remove(on[victim])
    ended = run.end()
    assert ended.status == 4
    assert f"machine {on[victim]} " in ended.error
    assert f"which runs {victim}, is lost" in ended.error
    counts = resume_to_the_end(run.run_dir, "--launch.place={}")
    assert counts["peak_memory_bytes"].keys() == on.keys()


@pytest.mark.exhaustive
def test_a_rank_on_another_machine_that_is_stopped_is_named(machines: Machines, tmp_path: Path) -> None:
    on = {"training": "machine-1", "training-rank-1": "machine-2", "generation": "machine-0"}
    run = Running(tmp_path / "r", **SPREAD, trainer__ranks=2, launch__place=json.dumps(on), launch__watchdog_s=20)
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
@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_agent_that_is_killed_or_frozen(signal_number: int, machines: Machines, tmp_path: Path) -> None:
    """Nothing but the agent is wrong with its machine, and its processes go on for a while. They end with the run."""
    run = Running(tmp_path / "r", **TWO_ACTORS, launch__lost_s=20)
    machine = run.machines["actor-1"]
    os.kill(run.agents[machine], signal_number)
    ended = run.end()
    assert ended.status == 4
    assert f"machine {machine} " in ended.error
    why = "its agent died" if signal_number == signal.SIGKILL else "it has not been heard for"
    assert f"which runs generation-1, is lost: {why}" in ended.error
    resume_to_the_end(run.run_dir)


@pytest.mark.exhaustive
@pytest.mark.parametrize("settings", [APART, TWO_ACTORS])
def test_a_killed_launcher_takes_everything_with_it(settings: dict[str, Any], machines: Machines, tmp_path: Path) -> None:
    """And another launcher may go on at once: it waits for the agents of the first."""
    run = Running(tmp_path / "r", **settings)
    run.process.kill()
    assert run.end().status == -signal.SIGKILL
    resume_to_the_end(run.run_dir)


@pytest.mark.exhaustive
def test_a_frozen_launcher_is_given_up_by_its_agents(machines: Machines, tmp_path: Path) -> None:
    run = Running(tmp_path / "r", **TWO_ACTORS, launch__lost_s=20)
    run.process.send_signal(signal.SIGSTOP)
    until(lambda: not any(map(alive, [*run.pids.values(), *run.agents.values()])))
    (log,) = (run.run_dir / "logs").glob(f"agent-{run.machines['actor-1']}.log")
    assert "the launcher has not been heard for" in log.read_text()
    run.process.send_signal(signal.SIGCONT)
    assert run.end().status == 4
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


LATER = "a later session of"


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
    os.kill(trainer, signal.SIGTERM)  # as its agent, or the end of it, would: it shall write a last checkpoint
    os.kill(trainer, signal.SIGCONT)
    until(lambda: not alive(trainer), run.process)
    if moment == "a checkpoint":  # one of its threads writes the checkpoint, another one looks for the session's Redis
        late = f"{LATER} {run.run_dir} has begun, while this process was stopped"
        assert late in log_of(run, "training") or "no connection, tried for" in log_of(run, "training")
    frozen.goes_on()
    ends_whole(run, run.process)


@pytest.mark.exhaustive
def test_actors_on_a_machine_that_was_frozen_write_no_more(machines: Machines, tmp_path: Path) -> None:
    """Their Redis is still there, with the streams of the run. The agent ends as well."""
    with start_server(tmp_path / "redis", durable=True, address=machines.address.partition(":")[0]) as server:
        run = Running(tmp_path / "r", **TWO_ACTORS, launch__restarts=2, stream__url=server.url)
        machine, earlier = run.machines["actor-1"], run.plan.id
        actor, agent = run.pids["actor-1"], run.agents[run.machines["actor-1"]]
        frozen = Frozen(machines, machine)
        next_session(run, run.process, earlier)
        os.kill(actor, signal.SIGCONT)
        until(lambda: not alive(actor), run.process)
        assert LATER in log_of(run, "generation-1")
        os.kill(agent, signal.SIGCONT)
        until(lambda: not alive(agent), run.process)
        assert f"the agent ends: {LATER} {run.run_dir} has begun" in log_of(run, f"agent-{machine}")
        frozen.goes_on()
        ends_whole(run, run.process)


@pytest.mark.exhaustive
def test_a_launcher_that_was_frozen_writes_no_more(machines: Machines, tmp_path: Path) -> None:
    """Another one, which does not see its lock, has followed. The Redis of the first is still there, too."""
    run = Running(tmp_path / "r", **TWO_ACTORS, launch__lost_s=20, launch__restarts=2)
    earlier = run.plan.id
    run.process.send_signal(signal.SIGSTOP)
    until(lambda: not any(map(alive, [*run.pids.values(), *run.agents.values()])))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path))  # as on another machine
        later = start("train", "--resume", str(run.run_dir))
    next_session(run, later, earlier)
    run.process.send_signal(signal.SIGCONT)
    ended = wait(run.process)
    assert ended.status == 2
    assert (
        ended.error
        == f"error: {LATER} {run.run_dir} has begun, while this process was stopped or cut off: it writes no more\n"
    )
    ends_whole(run, later)


@pytest.mark.exhaustive
def test_a_killed_redis_of_the_run_ends_it(machines: Machines, tmp_path: Path) -> None:
    run = Running(tmp_path / "r", **APART)
    (configuration,) = (run.run_dir / "streams").glob("*/redis.conf")
    assert configuration.stat().st_mode & 0o077 == 0, "the password is for this user only"
    server = broker_of(run)
    os.kill(server, signal.SIGKILL)
    ended = run.end()
    assert ended.status == 4
    assert "redis-server" in ended.error
    assert "was killed by SIGKILL" in ended.error
    resume_to_the_end(run.run_dir)


@pytest.mark.exhaustive
def test_a_redis_that_is_killed_and_comes_back_with_its_data_changes_nothing(machines: Machines, tmp_path: Path) -> None:
    address, folder = machines.address.partition(":")[0], tmp_path / "redis"
    with ExitStack() as stack:
        server = stack.enter_context(start_server(folder, durable=True, address=address))
        run = Running(tmp_path / "r", **TWO_ACTORS, stream__url=server.url)
        for _ in range(2):
            version = version_of(run.run_dir)
            server.kill()
            assert server.wait(10)
            server = stack.enter_context(RedisServerAgain(server, folder))
            until(lambda version=version: version_of(run.run_dir) > version + 2, run.process)
        run.process.send_signal(signal.SIGINT)
        ended = run.end()
        assert ended.status == 130, ended.error
        assert_conserved(summary(run.run_dir))
        resume_to_the_end(run.run_dir)


def RedisServerAgain(server: RedisServer, folder: Path) -> RedisServer:
    """The same server with the same configuration."""
    program = shutil.which("redis-server")
    assert program is not None
    return RedisServer(program, folder / "redis.conf", server.url, folder / "redis.log")


def children(pid: int) -> list[int]:
    return [
        int(path.name) for path in Path("/proc").glob("[0-9]*") if alive(int(path.name)) and parent_of(int(path.name)) == pid
    ]


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


# ------------------------------------------------------------------------- machines without the run directory


@pytest.fixture
def apart(cluster: Machines) -> Machines:
    """A cluster whose second and third machine do not see the run directory."""
    cluster.complete(*OTHERS)
    return cluster


TRAINER_AWAY = {"training": "machine-1", "generation": "machine-2"}
files_with_a_shared_folder: dict[frozenset[Any], set[str]] = {}
"""Of a run with these settings, wherever its processes are."""


def files(run_dir: Path) -> set[str]:
    """What a run has left, except what only a session of its own uses."""
    names = {str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if path.is_file()}
    return {name for name in names if not name.startswith("streams/") and "report.json" not in name}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "settings",
    [
        SPREAD | {"launch__place": json.dumps(TRAINER_AWAY)},
        APART | {"launch__place": json.dumps(TRAINER_AWAY | {"server-0": "machine-1", "server-1": "machine-0"})},
        SPREAD | {"trainer__ranks": 2, "launch__place": json.dumps(TRAINER_AWAY | {"training-rank-1": "machine-2"})},
        SPREAD | {"trainer__ranks": 2, "launch__place": json.dumps(TRAINER_AWAY | {"training-rank-1": "machine-0"})},
        SPREAD
        | {"trainer__ranks": 2, "launch__place": json.dumps({"training": "machine-0", "training-rank-1": "machine-1"})},
    ],
    ids=["plain", "apart", "both-ranks", "rank-0", "rank-1"],
)
def test_a_run_without_a_shared_folder_leaves_the_same(settings: dict[str, Any], apart: Machines, tmp_path: Path) -> None:
    """The same files as with one, and it can be resumed."""
    run_dir, before = tmp_path / "r", scratch_folders(apart)
    more = {"evaluation__problems": 4, "trainer__weights_every": 1, "trainer__checkpoint_every": 2, "trainer__steps": 4}
    dry = command("train", "--dry-run", *flags(run_dir, **settings, **more))
    assert "machine machine-1 does not have the run directory: its records, logs and checkpoints are sent" in dry.out
    ended = command("train", *flags(run_dir, **settings, **more, metrics__view="plain"))
    checked(run_dir, msgspec.structs.replace(ended, error=""))
    assert "machine machine-1" in ended.out
    assert "does not have the run directory: its records, logs and checkpoints are sent to this machine" in ended.out
    processes = frozenset(settings.items() - {("launch__place", settings["launch__place"])})
    if processes not in files_with_a_shared_folder:
        shared = tmp_path / "shared"
        apart.complete()
        checked(shared, command("train", *flags(shared, **settings, **more)))
        files_with_a_shared_folder[processes] = files(shared)
        apart.complete(*OTHERS)
    assert files(run_dir) == files_with_a_shared_folder[processes]
    resume_to_the_end(run_dir)
    resume_to_the_end(run_dir, "--launch.place={}")
    assert scratch_folders(apart) <= before


@pytest.mark.exhaustive
@pytest.mark.parametrize("victim", ["training", "generation"])
def test_a_machine_without_the_folder_is_removed(victim: str, apart: Machines, tmp_path: Path) -> None:
    run = Running(tmp_path / "r", **SPREAD, launch__place=json.dumps(TRAINER_AWAY))
    for machine in OTHERS:
        opened = [name for stage, place in run.machines.items() if place == machine for name in opened_by(run.pids[stage])]
        assert opened
        assert not [name for name in opened if name.startswith(str(run.run_dir))]
    apart.remove(TRAINER_AWAY[victim])
    ended = run.end()
    assert ended.status == 4
    assert f"which runs {victim}, is lost" in ended.error
    resume_to_the_end(run.run_dir, "--launch.place={}")


@pytest.mark.exhaustive
def test_a_machine_is_removed_while_it_sends_a_checkpoint(apart: Machines, tmp_path: Path) -> None:
    """Its agent is stopped as soon as the head has a part."""
    run = Running(tmp_path / "r", **SPREAD, launch__place=json.dumps(TRAINER_AWAY), trainer__checkpoint_every=1)
    agent = run.agents["machine-1"]

    def stopped_in_a_checkpoint() -> bool:
        os.kill(agent, signal.SIGSTOP)
        if unfinished(run.run_dir):
            return True
        os.kill(agent, signal.SIGCONT)
        return False

    until(stopped_in_a_checkpoint, run.process)
    apart.remove("machine-1")
    with suppress(ProcessLookupError):
        os.kill(agent, signal.SIGCONT)  # it finds that its machine is gone
    ended = run.end()
    assert ended.status == 4
    assert "which runs training, is lost" in ended.error
    resume_to_the_end(run.run_dir, "--launch.place={}")


@pytest.mark.exhaustive
def test_a_launcher_that_is_killed_is_followed_by_one_that_has_everything(apart: Machines, tmp_path: Path) -> None:
    run = Running(tmp_path / "r", **SPREAD, launch__place=json.dumps(TRAINER_AWAY))
    run.process.kill()
    assert run.end().status == -signal.SIGKILL
    resume_to_the_end(run.run_dir)


KILLED = """
    import os, signal
    from pipelinerl.launch.hosts.head import Head

    def killed(self, first, sizes, taken=Head._taken, times=[]):
        times += [name for name in sizes if "rollouts-1" in name]
        if len(times) == 8:
            os.kill(os.getpid(), signal.SIGKILL)
        taken(self, first, sizes)

    Head._taken = killed
"""


@pytest.mark.exhaustive
def test_lines_that_a_killed_launcher_had_just_written_are_followed_by_no_copy(apart: Machines, tmp_path: Path) -> None:
    run_dir = tmp_path / "r"
    place = {"training": "machine-0", "generation-0": "machine-1", "generation-1": "machine-2"}
    settings = TWO_ACTORS | ENDLESS | {"launch__place": json.dumps(place)}
    assert wait(start("train", *flags(run_dir, **settings), prepare=KILLED)).status == -signal.SIGKILL
    assert (run_dir / "rollouts" / "rollouts-1.jsonl").exists()
    resume_to_the_end(run_dir)
    lines = (run_dir / "rollouts" / "rollouts.jsonl").read_bytes().splitlines()
    assert len(lines) == len(set(lines))


FULL = """
    import errno, os
    from pipelinerl.launch.hosts import head

    def full(path, start, data, write=head._write_at):
        if path.name == "metrics.jsonl" and start:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, start, data)

    head._write_at = full
"""


@pytest.mark.exhaustive
def test_a_full_disk_at_the_head_ends_the_run_with_one_error(apart: Machines, tmp_path: Path) -> None:
    run_dir = tmp_path / "r"
    settings = SPREAD | {"launch__place": json.dumps(TRAINER_AWAY), "trainer__checkpoint_every": 1}
    ended = wait(start("train", *flags(run_dir, **settings), prepare=FULL))
    assert ended.status == 2
    assert ended.error.count("\n") == 1
    assert f"can't write to {run_dir}/metrics.jsonl: No space left on device; make room on that disk" in ended.error
    resume_to_the_end(run_dir)


# -------------------------------------------------------------------------------- processes that are started again


def replace(run: Running, *victims: str) -> None:
    """Kill the processes of these roles, and wait until new ones work on the same machines."""
    before = dict(run.pids)
    for victim in victims:
        os.kill(before[victim], signal.SIGKILL)

    def work() -> bool:
        found, now = statuses(run.run_dir), workers_of(run.run_dir, run.plan.id)
        for victim in victims:
            if now.get(victim, before[victim]) == before[victim]:
                return False
            stage = victim.replace("generation", "actor").replace("preprocessing", "preprocessor")
            if stage in found and (found[stage].pid != now[victim] or found[stage].state == "starting"):
                return False
            assert stage not in found or found[stage].machine == run.machines[stage]
            ready = RunDirectory(run.run_dir).ready_file(victim)
            if ready.exists() and msgspec.json.decode(ready.read_bytes())["pid"] != now[victim]:
                return False
        run.pids |= {f"{victim}, before": before[victim] for victim in victims} | {victim: now[victim] for victim in victims}
        return True

    until(work, run.process)
    assert not any(alive(before[victim]) for victim in victims)


def healed(run: Running, *victims: str, away: bool = False) -> None:
    """The run trains on with all that it had, and nothing is lost, doubled or miscounted."""
    version = version_of(run.run_dir)
    until(lambda: version_of(run.run_dir) > version + 4, run.process)
    working = workers_of(run.run_dir, run.plan.id)
    assert working == {role: run.pids[role] for role in working}  # the victims' are new, all others those before the kill
    assert "training" in working
    run.process.send_signal(signal.SIGINT)
    assert run.end().status == 130
    counts = summary(run.run_dir)
    assert_conserved(counts)
    assert counts["restarts"].keys() == set(victims)
    lost = sum(record["rollouts_lost"] for record in counts["restarts"].values())
    assert counts["rollouts_dropped"].get("lost_in_crash", 0) == lost
    for record in counts["restarts"].values():
        assert record["count"] == len(record["recovery_s"]) == 1
    resume_to_the_end(run.run_dir)
    assert check(run.run_dir) == []


HEALED = {"launch__restarts": 2, "schedule__max_lag": 4, "actor__max_tokens": 64}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("victims", "away", "settings"),
    [
        (["preprocessing"], (), APART),
        (["preprocessing"], OTHERS, APART | {"launch__place": json.dumps({"preprocessing": "machine-1"})}),
    ],
    ids=["preprocessing", "preprocessing-away"],
)
def test_a_process_that_dies_is_started_again_on_its_machine(
    victims: list[str], away: tuple[str, ...], settings: dict[str, Any], cluster: Machines, tmp_path: Path
) -> None:
    cluster.complete(*away)
    run = Running(tmp_path / "r", **settings | HEALED)
    replace(run, *victims)
    healed(run, *victims)
