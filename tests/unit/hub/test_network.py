"""The hub over a network: who has the key is a worker of the run, and nobody else is heard."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from pipelinerl.errors import StageDiedError
from pipelinerl.hub.hub import Hub
from pipelinerl.hub.network import Listener, dial
from pipelinerl.hub.server import HubServer, WorkerKind
from pipelinerl.status.board import MemoryBoard
from pipelinerl.stream.memory import MemoryStream
from pipelinerl.types import TRAINER, StageStatus
from tests.unit.hub.hub_parts import make_state


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HubServer]:
    hub = Hub(make_state(), MemoryStream(), tmp_path, MemoryBoard())
    with HubServer(hub) as server:
        server.expect({"training": WorkerKind(reads="rollouts", follows=True)})
        yield server


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_times_of_another_machine_are_by_the_launchers_clock(server: HubServer) -> None:
    with closing(Listener("127.0.0.1", "key", server.admit)) as listener:
        with closing(dial(listener.address, "key", "training", "m1")) as worker:
            far_s = time.monotonic() + 1e6
            worker.publish(StageStatus(stage=TRAINER, pid=1, state="working", detail="", since_s=far_s - 5, written_s=far_s))
            until(lambda: server.read(TRAINER) is not None)
        status = server.read(TRAINER)
        assert status is not None
        assert status.machine == "m1"
        assert 4.9 < status.written_s - status.since_s < 5.1
        assert abs(status.written_s - time.monotonic()) < 60


def test_without_the_key_nobody_is_heard(server: HubServer) -> None:
    with closing(Listener("127.0.0.1", "key", server.admit)) as listener:
        with pytest.raises(
            StageDiedError, match=r"the training process has no connection with the launcher at 127\.0\.0\.1:"
        ):
            dial(listener.address, "another", "training", "m1")
        with socket.create_connection(listener.address) as stranger:
            stranger.sendall(b"\x00" * 64)
        with closing(dial(listener.address, "key", "training", "m1")) as worker:
            assert worker.sync(30)
    assert server.failure is None


def test_a_hub_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = closed.getsockname()[:2]
    with pytest.raises(StageDiedError, match="has no connection with the launcher"):
        dial(address, "key", "training", "m1")
