"""Runs whose parts are apart: which processes there are, what each gets of the machine, and whose end is told."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from pipelinerl import __version__
from pipelinerl.config.schema import EngineConfig, LaunchConfig, RunConfig, ScheduleConfig, TrainerConfig, WeightsConfig
from pipelinerl.errors import PipelineRLError, RankLostError, StageDiedError, StalledError, UserError, WeightUpdateError
from pipelinerl.hub.hub import DirectMessages
from pipelinerl.launch.hosts.processes import Processes
from pipelinerl.launch.hosts.worker import WorkerActor
from pipelinerl.launch.session import Session, StartPlan, WorkerSpec, read_session, write_session
from pipelinerl.launch.stages import training
from pipelinerl.launch.stages.generation import Generation, make_engine
from pipelinerl.resources.roles import process_environment, server_roles, shares_of, worker_roles
from pipelinerl.run_directory import RunDirectory
from pipelinerl.schedule import make_schedule
from pipelinerl.serving.client.adapter import EngineUnavailableError
from pipelinerl.weights.broadcast.sender import CollectiveWeightSender
from tests.unit.group_parts import receipt
from tests.unit.scripted_engine import CharTokenizer

LOCAL = RunConfig()
TWO_SERVERS = RunConfig(engine=EngineConfig(kind="http", servers=2), launch=LaunchConfig(preprocessor="process"))
ATTACHED = RunConfig(engine=EngineConfig(kind="http", urls=("http://a:1", "http://b:1", "http://c:1")))
TURNS = ScheduleConfig(kind="conventional")


def generating(processes: int, threads: int | None = None, **sections: Any) -> RunConfig:
    engine = EngineConfig(processes=processes, threads=threads)
    return RunConfig(engine=engine, launch=LaunchConfig(kind="processes"), **sections)


@pytest.mark.parametrize(
    ("config", "cores", "expected", "generation", "yields"),
    [
        (LOCAL, 8, (4, 4), 4, False),
        (RunConfig(engine=EngineConfig(kind="http")), 8, (4, 4), 1, False),
        (TWO_SERVERS, 8, (1, 6), 1, False),
        (TWO_SERVERS, 2, (1, 1), 1, True),
        (ATTACHED, 1, (1, 1), 1, False),
        (ATTACHED.model_copy(update={"schedule": TURNS}), 8, (8, 8), 1, False),
        (generating(2, schedule=TURNS), 8, (4, 8), 4, False),
        (generating(2, schedule=TURNS), 2, (1, 2), 1, False),  # it sleeps while the trainer computes
        (generating(1, schedule=TURNS), 8, (8, 8), 8, False),
        (generating(3), 8, (1, 5), 1, False),
        (generating(2), 2, (1, 1), 1, True),
        (RunConfig(engine=EngineConfig(processes=2, device="cuda")), 2, (1, 1), 1, False),
        (generating(2, threads=3, trainer=TrainerConfig(threads=5)), 8, (3, 5), 3, False),
    ],
)
def test_cores_go_to_what_computes_and_engines_yield_where_they_share_the_trainers(
    config: RunConfig, cores: int, expected: tuple[int, int], generation: int, yields: bool
) -> None:
    schedule = make_schedule(config)
    servers, workers = server_roles(config), worker_roles(config)
    shares = shares_of(config, schedule, [*servers, *workers], cores)
    assert shares[workers[0]].threads == generation
    assert shares["training"].threads == expected[1]
    assert all(shares[server].threads == expected[0] for server in servers)
    assert any(share.yields for share in shares.values()) == yields


def test_the_processes_of_a_run_allocate_huge_pages_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    environment = process_environment(3)
    assert (environment["OMP_NUM_THREADS"], environment["GLIBC_TUNABLES"]) == ("3", "glibc.malloc.hugetlb=1")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=2")
    assert process_environment(3)["GLIBC_TUNABLES"] == "glibc.malloc.arena_max=2"


def test_a_process_that_yields_has_a_low_priority_also_among_sessions() -> None:
    code = (
        "import os, threading\nfrom pathlib import Path\n"
        "from pipelinerl.process import lower_priority\nend = threading.Event()\n"
        "thread = threading.Thread(target=end.wait)\nthread.start()\nlower_priority()\n"
        "assert os.getpriority(os.PRIO_PROCESS, thread.native_id) == os.nice(0), 'threads that loading has started, too'\n"
        "end.set()\n"
        "group = Path('/proc/self/autogroup')\nprint(os.nice(0), group.read_text().split()[-1] if group.exists() else 10)"
    )
    ran = subprocess.run([sys.executable, "-c", code], start_new_session=True, check=True, capture_output=True, text=True)
    before = os.nice(0)
    assert ran.stdout.split() == [str(min(19, before + 10)), "10"]


COLLECTIVE = WeightsConfig(kind="collective")


def session_of(config: RunConfig, run_dir: Path) -> Session:
    run = RunDirectory(run_dir)
    run.make_folders()
    return Session(config, run, StartPlan(), make_schedule(config), 0.0)


def test_each_session_has_keys_of_its_own_that_only_its_user_can_read(tmp_path: Path) -> None:
    session = session_of(LOCAL, tmp_path)
    write_session(session)
    assert read_session(session.run, WorkerSpec()).plan == session.plan
    assert session.run.plan.stat().st_mode & 0o777 == session.run.settings.stat().st_mode & 0o777 == 0o600
    assert StartPlan().weights_key != session.plan.weights_key


def test_a_machine_of_a_cluster_that_is_not_set_up_is_refused(tmp_path: Path) -> None:
    def begin(version: str) -> str:
        spec = msgspec.json.encode(WorkerSpec(session="s"))
        return WorkerActor().begin(str(tmp_path), "generation", spec, version, "/")[1]

    assert f"it has pipelinerl {__version__}, and the launcher 0.0.1: install the same version" in begin("0.0.1")
    shared = f"it does not have {tmp_path}: put run_dir on a file system that all machines share"
    assert begin(__version__) == shared
    write_session(session_of(LOCAL, tmp_path))
    assert begin(__version__) == shared, "another folder at the same path"


def test_a_broadcast_comes_from_an_address_that_all_servers_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def host(*urls: str) -> str:
        config = RunConfig(weights=COLLECTIVE, engine=EngineConfig(kind="http", urls=urls))
        hub: Any = DirectMessages()
        with closing(training._sender(session_of(config, tmp_path), hub, lambda: False)) as sender:
            found: str = cast(CollectiveWeightSender, sender).host
        return found

    assert host() == host("http://127.0.0.1:8000", "http://localhost:8001") == "127.0.0.1"
    with pytest.raises(UserError, match=r"^engine.urls: there is no route to http://no-such-host.invalid:8000"):
        host("http://no-such-host.invalid:8000")
    ways = {"http://127.0.0.1:8000": "127.0.0.1", "http://far:8000": "127.0.0.2"}
    monkeypatch.setattr(training, "source_address", ways.__getitem__)
    assert host(*ways) == "127.0.0.2"


@pytest.mark.parametrize(
    ("engine", "kind", "message"),
    [
        (EngineConfig(kind="http", servers=2), StalledError, r"^server-1 not ready after .* s; look at .*server-1\.log$"),
        (EngineConfig(kind="http", urls=("http://127.0.0.1:9",)), EngineUnavailableError, "http://127.0.0.1:9"),
        (EngineConfig(kind="http", urls=("http://a:1",), api_key_env="NO_KEY"), UserError, "variable NO_KEY is not set"),
    ],
    ids=["started by the run", "attached", "without the key"],
)
async def test_servers_are_awaited_for_a_while_and_named(
    engine: EngineConfig, kind: type[Exception], message: str, tmp_path: Path
) -> None:
    session = session_of(RunConfig(engine=engine, launch=LaunchConfig(startup_timeout_s=0.01)), tmp_path)
    session.run.ready_file("server-0").write_text('{"url": "http://127.0.0.1:7", "pid": 1}')
    with pytest.raises(kind, match=message):
        async with make_engine(session, "engine", CharTokenizer()):
            pass


class Ended:
    """A process that is not running any more, for the reason given (None: it ended well)."""

    machine, log = "", Path("log")

    def __init__(self, why: PipelineRLError | str | None, role: str = "generation", pid: int = 7) -> None:
        self.why, self.role, self.pid, self.running = why, role, pid, False

    def failure(self) -> Any:
        return self.why

    def cause(self, failure: Any) -> Any:
        return failure


def processes(host: Any, started: list[Any]) -> Processes:
    """As the launcher watches them."""
    made = Processes(cast(Any, SimpleNamespace(config=RunConfig(launch=LaunchConfig(restarts=0)))), host, cast(Any, None))
    made.started = started
    return made


LOST, BROKEN, GONE = RankLostError("no answer"), StageDiedError("a bug"), StageDiedError("the machine")


@pytest.mark.parametrize(
    ("machine", "ends", "told"),
    [
        (GONE, {"generation": BROKEN, "server-0": BROKEN}, "the machine"),
        (None, {"generation": LOST, "server-0": BROKEN}, "a bug"),
        (None, {"generation": BROKEN, "server-0": None}, "the server-0 process (pid 7) ended before the run did"),
        (None, {"preprocessing": None, "generation": BROKEN}, "a bug"),
        (None, {"generation": None}, None),
        # Rank 0 ends because of another rank, and then engines; or rank 0 because of an engine, and then the other ranks.
        (None, {"generation": BROKEN, "training": LOST}, "no answer"),
        (None, {"generation": BROKEN, "training": LOST, "training-rank-1": GONE}, "the machine"),
        (None, {"generation": BROKEN, "training": GONE, "training-rank-1": LOST}, "a bug"),
    ],
)
def test_the_first_cause_is_told(machine: Any, ends: dict[str, PipelineRLError | None], told: str | None) -> None:
    """What others depend on is looked at before them; a server has no reason to end well."""
    here: Any = Ended(machine)
    found = processes(here, [Ended(why, role) for role, why in ends.items()]).failure()
    assert (found is None) == (told is None)
    assert str(found).startswith(told or "None")


@pytest.mark.parametrize(
    ("ends", "named"),
    [
        ((LOST, None, LOST), "the training-rank-1 process (pid 1) no longer answers"),
        ((LOST, None, None), "the training-rank-1 process (pid 1) and the training-rank-2 process (pid 2) no longer"),
        ((LOST, LOST, LOST), "no answer"),  # nobody runs
        ((BROKEN, None, LOST), "a bug"),  # one has a reason of its own
    ],
)
def test_a_rank_that_the_others_have_ended_for_want_of_is_named(
    ends: tuple[PipelineRLError | None, ...], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelinerl.launch.hosts.processes.CAUSE_PATIENCE_S", 0.0)
    roles = ["training", "training-rank-1", "training-rank-2"]
    workers: list[Any] = [Ended(end, role, pid=rank) for rank, (role, end) in enumerate(zip(roles, ends, strict=True))]
    for worker in workers:
        worker.running = worker.why is None
    here: Any = Ended(None)
    assert str(processes(here, workers).cause(LOST)).startswith(named)


REFUSED = 9


class SlowUpdates:
    """An engine whose updates take `seconds`, as those of a server that is started again; and the trainer's last offers."""

    def __init__(self, seconds: float, *versions: int) -> None:
        self.version, self._seconds, self._versions = 0, seconds, list(versions)
        self._offer_s = 0.0

    async def update_weights(self, update: Any) -> Any:
        await asyncio.sleep(self._seconds)
        self._offer_s = time.monotonic() + 0.1
        refused = update.version == REFUSED
        self.version = self.version if refused else update.version
        return receipt(update.version, update.checksum, engine="e", error="out of memory" if refused else None)

    def poll(self) -> Any:
        there = self._versions and time.monotonic() >= self._offer_s
        return SimpleNamespace(version=self._versions.pop(0), checksum="") if there else None

    def acknowledge(self, received: Any) -> None:
        assert received.version in {self.version, REFUSED}


@pytest.mark.parametrize(
    ("offered", "error"),
    [
        ((1, 2), ""),
        ((1,), r"reached version 2 .* has version 1"),
        ((1, REFUSED), "engine 'e' did not apply weights of version 9: out of memory"),
    ],
)
def test_the_wait_for_the_last_weights_begins_again_with_each_that_arrived(offered: tuple[int, ...], error: str) -> None:
    """An engine that refuses the last ones says why: the trainer may have ended, and reads no receipt."""
    engine = SlowUpdates(0.4, *offered)
    stage = SimpleNamespace(_receiver=engine, _trainer=SimpleNamespace(version=2))
    work = Generation._take_weights(
        cast(Generation, stage), cast(Any, engine), lambda: False, until=lambda: engine.version == 2, timeout_s=0.3
    )
    if error:
        with pytest.raises((StalledError, WeightUpdateError), match=error):
            asyncio.run(work)
    else:
        asyncio.run(work)
        assert engine.version == 2
