"""Runs whose parts are apart: which processes there are, what each gets of the machine, and whose end is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipelinerl.config import EngineConfig, LaunchConfig, RunConfig, ScheduleConfig, StreamConfig, TrainerConfig
from pipelinerl.config.schema import WeightsConfig
from pipelinerl.errors import PipelineRLError, RunDirectoryError, StageDiedError, StalledError, UserError
from pipelinerl.launch.engines import _api_key, _started
from pipelinerl.launch.processes import Processes
from pipelinerl.launch.resources import Threads, generation_threads, plan_threads, trainer_goes_first
from pipelinerl.launch.roles import server_roles, worker_roles, worker_stages
from pipelinerl.launch.run_directory import RunDirectory
from pipelinerl.launch.streams import FileStore, RedisStore, stream_store
from pipelinerl.launch.weights import _between_gpus
from pipelinerl.schedule import make_schedule

LOCAL = RunConfig()
TWO_SERVERS = RunConfig(engine=EngineConfig(kind="http", servers=2), launch=LaunchConfig(preprocessor="process"))
ATTACHED = RunConfig(engine=EngineConfig(kind="http", urls=("http://a:1", "http://b:1", "http://c:1")))
TURNS = ScheduleConfig(kind="conventional")


def test_roles_and_stages() -> None:
    assert (worker_roles(LOCAL), server_roles(LOCAL)) == (["generation", "training"], [])
    assert worker_roles(TWO_SERVERS) == ["generation", "preprocessing", "training"]
    assert server_roles(TWO_SERVERS) == ["server-0", "server-1"]
    assert worker_stages(TWO_SERVERS) == ["engine", "actor", "preprocessor", "trainer"]
    assert server_roles(ATTACHED) == []


@pytest.mark.parametrize(
    ("config", "cores", "expected", "generation"),
    [
        (LOCAL, 8, Threads(4, 4), 4),
        (RunConfig(engine=EngineConfig(kind="http")), 8, Threads(4, 4), 1),
        (TWO_SERVERS, 8, Threads(1, 6), 1),
        (TWO_SERVERS, 2, Threads(1, 1), 1),
        (msgspec.structs.replace(TWO_SERVERS, schedule=TURNS), 8, Threads(4, 8), 1),
        (ATTACHED, 8, Threads(1, 8), 1),
        (msgspec.structs.replace(ATTACHED, schedule=TURNS), 8, Threads(8, 8), 1),
    ],
)
def test_cores_go_to_what_computes(config: RunConfig, cores: int, expected: Threads, generation: int) -> None:
    schedule = make_schedule(config)
    assert plan_threads(config, schedule, cores) == expected
    assert generation_threads(config, schedule, cores) == generation


def test_servers_yield_to_the_trainer_only_where_they_share_its_cores() -> None:
    schedule = make_schedule(TWO_SERVERS)
    assert trainer_goes_first(TWO_SERVERS, schedule, 2)
    assert not trainer_goes_first(TWO_SERVERS, schedule, 3)
    assert not trainer_goes_first(ATTACHED, schedule, 1)


@pytest.mark.parametrize(
    ("trainer", "engine", "nccl"),
    [
        ("cuda:0", EngineConfig(device="cuda:1"), True),
        ("cuda:0", EngineConfig(device="cuda:0"), False),
        ("cuda:0", EngineConfig(device="cuda"), False),
        ("cpu", EngineConfig(device="cuda:1"), False),
        ("cuda:0", EngineConfig(device="cuda:1", processes=2), False),
        ("cuda:0", EngineConfig(kind="http", device="cuda:1"), False),
    ],
)
def test_nccl_is_for_a_gpu_at_each_end(trainer: str, engine: EngineConfig, nccl: bool) -> None:
    weights = WeightsConfig(kind="collective")
    assert _between_gpus(RunConfig(trainer=TrainerConfig(device=trainer), engine=engine, weights=weights)) is nccl


def test_where_streams_lie(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.make_folders()
    assert isinstance(stream_store(LOCAL, run, None), FileStore)
    own = RunConfig(stream=StreamConfig(kind="redis"))
    assert isinstance(stream_store(own, run, "unix:///r"), RedisStore)
    name = (run.streams / "name_in_redis").read_text()
    stream_store(own, run, "unix:///r")
    assert (run.streams / "name_in_redis").read_text() == name, "a resumed run finds its streams"
    with pytest.raises(RunDirectoryError, match="was not started"):
        stream_store(own, run, None)


def test_servers_are_awaited_for_a_while_and_named(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.make_folders()
    run.ready_file("server-0").write_text('{"url": "http://127.0.0.1:7", "pid": 1}')
    assert _started(run, ["server-0"], 0.0) == ["http://127.0.0.1:7"]
    with pytest.raises(StalledError, match=r"^server-1 not ready after 0 s; look at .*server-1\.log$"):
        _started(run, ["server-0", "server-1"], 0.0)


def test_a_key_that_is_not_set_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(kind="http", urls=("http://a:1",), api_key_env="THE_KEY")
    monkeypatch.setenv("THE_KEY", "k")
    assert _api_key(config) == "k"
    monkeypatch.delenv("THE_KEY")
    with pytest.raises(UserError, match="environment variable THE_KEY is not set"):
        _api_key(config)


class Ended:
    """A process that is not running any more, for the reason given (None: it ended well)."""

    running = False
    url = ""

    def __init__(self, why: PipelineRLError | str | None) -> None:
        self.why = why

    def failure(self) -> Any:
        return self.why

    def desertion(self) -> PipelineRLError:
        return StageDiedError("it left")


def test_the_first_cause_is_told() -> None:
    """What others depend on is looked at before them; a server has no reason to end well."""
    worker, server = Ended(StageDiedError("the worker lost its server")), Ended(StageDiedError("the server"))
    broker: Any = Ended("the broker")
    assert str(Processes(broker, [worker], [server]).failure()) == "the broker"  # type: ignore[list-item]
    assert str(Processes(None, [worker], [server]).failure()) == "the server"  # type: ignore[list-item]
    assert str(Processes(None, [worker], [Ended(None)]).failure()) == "it left"  # type: ignore[list-item]
    assert str(Processes(None, [Ended(None), worker]).failure()) == "the worker lost its server"  # type: ignore[list-item]
    assert Processes(None, [Ended(None)]).failure() is None  # type: ignore[list-item]
