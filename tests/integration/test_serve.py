"""`pipelinerl serve` as a real process: clients that leave, stopping, and what it refuses to start with."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from pipelinerl.channel import free_port
from pipelinerl.cli import main
from pipelinerl.serving.wire import ServerInfo
from tests.integration.runs import start, until, wait

pytestmark = pytest.mark.slow
LONG = {"prompt": "12,18:", "max_tokens": 500, "ignore_eos": True}


class Server:
    """A server process that is ready."""

    def __init__(self, process: subprocess.Popen[str], ready: dict[str, Any], weights_dir: Path) -> None:
        self.process = process
        self.url: str = ready["url"]
        self.weights_dir = weights_dir
        assert ready["pid"] == process.pid

    @contextmanager
    def held(self) -> Iterator[None]:
        """Meanwhile the engine takes requests, updates and cancellations, but no sequence gets far beyond `HELD_AFTER`."""
        hold = self.weights_dir / "hold"
        hold.touch()
        try:
            yield
        finally:
            hold.unlink()

    def info(self) -> ServerInfo:
        return msgspec.json.decode(httpx2.get(f"{self.url}/info", timeout=30).content, type=ServerInfo)


HOLD = """
import time
from pathlib import Path
from pipelinerl.engine import LocalEngine
from pipelinerl.interfaces import StepOutput

step = LocalEngine.step

def step_unless_held(self):
    table = self._table
    table.flush()
    fresh = self._prefills or self._cancelled or (self._waiting and table.free)
    if fresh or not table.used or table.counts[: table.used].max() < {tokens} or not Path({path!r}).exists():
        return step(self)
    time.sleep(0.001)
    return StepOutput((), ())

LocalEngine.step = step_unless_held
"""
HELD_AFTER = 100
"""While `Server.held`, the server's engine stops here, with whatever came in having begun: no test depends on its speed."""


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[Server]:
    weights_dir, ready_file = folder / "weights", folder / "ready.json"
    weights_dir.mkdir(parents=True, exist_ok=True)
    ready_file.unlink(missing_ok=True)
    files = ("--ready-file", str(ready_file), "--weights-dir", str(weights_dir))
    hold = HOLD.format(tokens=HELD_AFTER, path=str(weights_dir / "hold"))
    process = start("serve", "demo", "--port", "0", "--engine.threads", "1", *files, *flags, prepare=hold)
    try:
        until(ready_file.exists, process)
        yield Server(process, msgspec.json.decode(ready_file.read_bytes()), weights_dir)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("serve"), "--engine.slots", "16", "--max-queue", "8", "--drain-s", "300") as server:
        yield server


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_frees_its_slot(server: Server, stream: bool) -> None:
    async with httpx2.AsyncClient(base_url=server.url) as client:
        before = server.info().decode_steps
        with server.held():
            asking = asyncio.create_task(client.post("/v1/completions", json=LONG | {"stream": stream}))
            while server.info().decode_steps == before:
                await asyncio.sleep(0.002)
            asking.cancel()
            await asyncio.wait({asking})
            await asyncio.to_thread(until, lambda: server.info().in_progress == 0, server.process)
    assert 0 < server.info().decode_steps - before < 500


async def asked(client: httpx2.AsyncClient, count: int) -> list[asyncio.Task[httpx2.Response]]:
    """So many requests, which are all at the server."""
    asking = [asyncio.create_task(client.post("/v1/completions", json=LONG)) for _ in range(count)]
    while (info := (await client.get("/info")).json())["in_progress"] + info["queued"] < count:
        await asyncio.sleep(0.002)
    return asking


async def test_sigterm_finishes_what_is_in_progress_and_takes_nothing_more(server: Server) -> None:
    """The last test of the shared server. There are more requests than slots: the others wait in the queue."""

    async with httpx2.AsyncClient(base_url=server.url, timeout=300) as client:
        with server.held():
            asking = await asked(client, 24)
            server.process.send_signal(signal.SIGTERM)
            while (health := await client.get("/health")).status_code == 200:
                pass
            late = await client.post("/v1/completions", json=LONG)
        assert late.status_code == health.status_code == 503
        assert late.json()["error"]["message"] == "the server is stopping"
        assert "retry-after" in late.headers
        for answer in await asyncio.gather(*asking):
            assert answer.json()["usage"]["completion_tokens"] == 500
    ended = wait(server.process, 30)
    assert ended.status == 0, ended
    assert "Traceback" not in ended.error


@pytest.mark.exhaustive
async def test_what_does_not_finish_within_the_bound_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--engine.slots", "2", "--drain-s", "0", "--host", ANYWHERE, "--api-key-env", "THE_KEY")
    monkeypatch.setenv("THE_KEY", "open sesame")
    headers = {"Authorization": "Bearer open sesame"}
    with serving(tmp_path, *flags) as server:
        assert httpx2.post(f"{server.url}/v1/completions", json=LONG).status_code == 401
        async with httpx2.AsyncClient(base_url=server.url, timeout=60, headers=headers) as client:
            with server.held():
                asking = await asked(client, 12)
                server.process.send_signal(signal.SIGTERM)
                answers = [answer.json() for answer in await asyncio.gather(*asking)]
        assert {answer["error"]["code"] for answer in answers if "error" in answer} == {"unavailable"}
        assert wait(server.process, 30).status == 0


def test_while_it_loads_it_says_so_and_can_be_stopped() -> None:
    slow = "import time, pipelinerl.models.loading as loading; loading.load_tokenizer = lambda *_: time.sleep(100)"
    port = free_port()
    process = start("serve", "demo", "--port", str(port), prepare=slow)

    def answer() -> int:
        with contextlib.suppress(httpx2.HTTPError):
            return httpx2.get(f"http://127.0.0.1:{port}/health").status_code
        return 0

    until(lambda: answer() == 503, process)
    process.send_signal(signal.SIGTERM)
    assert wait(process, 30).status == 0


ANYWHERE = "0.0.0.0"  # noqa: S104 - with a key, or refused


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["demo", "--host", ANYWHERE], "--host 0.0.0.0 can be reached by others"),
        (["demo", "--api-key-env", "NOT_SET_ANYWHERE"], "NOT_SET_ANYWHERE: this environment variable is not set"),
        (["demo", "--engine.slots", "0"], "--engine.slots: 0 is not allowed here; this takes a whole number >= 1"),
        (["demo", "--port", "70000"], "--port: 70000: give a whole number of 0 to 65535"),
        (["demo", "--host", "no.such.host.invalid"], "can't listen on"),
        (["demo", "--slotz", "3"], "did you mean `--engine.slots`?"),
        (["demo", "--weights-dir", "/no/such/place"], "/no/such/place is not a directory"),
        (["/no/such/model", "--port", "0"], "does not exist"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.strip().splitlines()) == 1


def test_a_port_that_is_taken_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "demo", "--port", str(taken.getsockname()[1])]) == 2
    assert "Address already in use; choose another port" in capsys.readouterr().err
