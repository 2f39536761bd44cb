"""How vLLM is started and ended, with stand-ins for it: other commands, started in the same way."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.child import ChildProcess
from pipelinerl.config.checks import VLLM_OWN
from pipelinerl.config.schema import EngineConfig
from pipelinerl.serving.vllm.adapter import model_facts
from pipelinerl.serving.vllm.start import (
    KEY_VARIABLE,
    RequireKey,
    VllmSettings,
    command_line,
    environment,
    kv_cache_bytes,
    members,
)


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return condition()


def group_of(log: Path) -> int:
    """The process group of the script, which says its process id first."""
    assert until(lambda: log.exists() and "\n" in log.read_text())
    return int(log.read_text().splitlines()[0])


def started(script: str, log: Path) -> ChildProcess:
    """A shell script in the place of vLLM."""
    command = [sys.executable, "-m", "pipelinerl.serving.vllm.start", "/bin/sh", "-c", f"echo $$; {script}"]
    return ChildProcess(command, log=log, watches_parent=True, patience_s=30.0)


def test_stopping_ends_the_whole_group_and_is_no_failure(tmp_path: Path) -> None:
    server = started("sleep 100 & sleep 100", tmp_path / "log")
    assert members(group_of(tmp_path / "log"))
    server.stop()
    assert server.status == 0
    assert not members(group_of(tmp_path / "log"))


@pytest.mark.parametrize(
    ("script", "status", "ended"),
    [("exit 7", 7, "ended with status 7"), ("kill -9 $$", 137, "was killed by SIGKILL")],
)
def test_a_command_that_ends_by_itself_takes_its_group_with_it_and_gives_its_status(
    tmp_path: Path, script: str, status: int, ended: str
) -> None:
    server = started(f"sleep 100 & {script}", tmp_path / "log")
    assert server.wait(20.0)
    assert server.status == status
    assert not members(group_of(tmp_path / "log"))
    assert f"/bin/sh {ended}" in server.log_lines()


def test_a_process_that_cleans_up_after_the_others_has_time_to(tmp_path: Path) -> None:
    """As Python's resource tracker, which ignores SIGTERM and ends with the last of the others."""
    cleaner = "(trap '' TERM; touch ready; while kill -0 $$; do sleep 0.1; done; sleep 1; echo clean) 2>/dev/null &"
    server = started(f"cd {tmp_path}; {cleaner} until [ -e ready ]; do sleep 0.1; done; kill -9 $$", tmp_path / "log")
    assert server.wait(20.0)
    assert "clean" in server.log_lines()


@pytest.mark.parametrize("killed", ["launcher", "runner"])
def test_a_server_ends_when_the_processes_that_started_it_are_killed(tmp_path: Path, killed: str) -> None:
    log = tmp_path / "log"
    launcher = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time\nfrom pathlib import Path\n"
            "from tests.unit.serving.vllm.test_vllm_start import started\n"
            "server = started('sleep 100 & sleep 100', Path(sys.argv[1]))\n"
            "print(server.pid, flush=True)\ntime.sleep(100)",
            str(log),
        ],
        stdout=subprocess.PIPE,
    )
    assert launcher.stdout is not None
    with launcher.stdout:
        runner = int(launcher.stdout.readline())
    group = group_of(log)
    assert members(group)
    os.kill(launcher.pid if killed == "launcher" else runner, signal.SIGKILL)
    assert until(lambda: not members(group))
    launcher.kill()
    launcher.wait()


def test_what_the_run_file_adds_comes_last_and_replaces_nothing_of_the_run_but_its_memory() -> None:
    tls = (Path("c"), Path("k"))
    of_engine: Any = {"python": "python", "model": "m", "slots": 8, "max_length": 300, "device": "cuda"}
    more = ("--seed", "1")
    settings = VllmSettings(**of_engine, tls=tls, kv_cache_bytes=5, memory_share=0.337, arguments=more)
    command = command_line(settings, 1, "10.0.0.5", guarded=True)
    assert command[command.index("--host") + 1] == "10.0.0.5"
    assert command[command.index("--middleware") + 1] == "pipelinerl.serving.vllm.start.RequireKey"
    outer = {"CUDA_VISIBLE_DEVICES": "4"}
    assert environment(settings, outer, "secret").items() >= {**outer, KEY_VARIABLE: "secret"}.items()
    assert KEY_VARIABLE not in environment(settings, outer)
    assert command[-6:] == ["--kv-cache-memory-bytes", "5", "--gpu-memory-utilization", "0.337", "--seed", "1"]
    own = {option.replace("--no-", "--") for option in command[2:-2] if option.startswith("--")}
    assert own - VLLM_OWN.keys() == {"--kv-cache-memory-bytes", "--gpu-memory-utilization"}


def test_a_server_has_as_many_gpus_as_its_arguments_ask_for() -> None:
    workers = {"": 1, "--seed=3": 1, "--tensor-parallel-size=4": 4, "--tensor_parallel_size 2": 2, "-tp 2 -tp 4": 4}
    workers |= {"-tp 2 -pp=3 --seed 5": 6, "--tensor-parallel-size": 1}
    for arguments, count in workers.items():
        assert EngineConfig(kind="vllm", vllm_args=tuple(arguments.split())).vllm_workers == count, arguments


def test_what_the_models_folder_says() -> None:
    assert model_facts("demo") == (16, (1,), ())
    # 2 layers x (keys, values) x 3 heads x 32 x 4 bytes, for 8 slots of 3 blocks of 128, and 4 blocks to spare
    assert kv_cache_bytes("demo", slots=8, max_length=300, item_bytes=4) == 2 * 2 * 3 * 32 * 4 * 128 * (8 * 3 + 4)


# ---- every route asks for the key


def status_for(kind: str, *headers: tuple[bytes, bytes]) -> int:
    """What a client of a guarded app gets."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"status": 200})

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(RequireKey(app)({"type": kind, "headers": headers, "path": "/update_weights"}, None, send))  # type: ignore[arg-type]
    return int(sent[0]["status"])


def test_every_route_asks_for_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    assert status_for("http", (b"authorization", b"Bearer secret")) == 200
    assert status_for("lifespan") == 200
    for headers in ([], [(b"authorization", b"Bearer wrong")], [(b"authorization", b"secret")]):
        assert status_for("http", *headers) == 401
    assert status_for("websocket") == 401
