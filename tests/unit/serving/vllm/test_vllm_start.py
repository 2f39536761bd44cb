"""How vLLM is started and ended, with stand-ins for it: other commands, under the same guard."""

from __future__ import annotations

import dataclasses
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pipelinerl.errors import StageDiedError, StalledError, UserError
from pipelinerl.serving.vllm.guard import members
from pipelinerl.serving.vllm.server_info import ServerDescription, kv_cache_bytes, model_facts, problems
from pipelinerl.serving.vllm.start import VllmProcess, VllmSettings, command_line, environment

SETTINGS = VllmSettings(python="/env/bin/python", model="/models/m", slots=8, max_length=300)


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return condition()


def group_is_gone(pid: int) -> bool:
    return not members(pid)


def stand_in(tmp_path: Path, script: str) -> VllmSettings:
    """Settings whose interpreter is a shell script."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return VllmSettings(python=str(program), model="m", slots=1, max_length=8)


def test_stopping_ends_the_whole_group(tmp_path: Path) -> None:
    server = VllmProcess(stand_in(tmp_path, "sleep 100 & echo ready; sleep 100"), tmp_path / "log")
    assert until(lambda: "ready" in server.log.read_text())
    assert server.failure() is None
    server.stop()
    assert group_is_gone(server.pid)
    server.stop()  # twice is fine


def test_the_guard_ends_well_when_it_is_asked_to(tmp_path: Path) -> None:
    """As the launcher asks its processes."""
    server = VllmProcess(stand_in(tmp_path, "sleep 100 & echo ready; sleep 100"), tmp_path / "log")
    assert until(lambda: "ready" in server.log.read_text())
    os.kill(server.pid, signal.SIGTERM)
    assert until(lambda: group_is_gone(server.pid))
    assert server.wait(5.0)
    assert server.status == 0


@pytest.mark.parametrize(("script", "status"), [("exit 7", 7), ("kill -9 $$", 137)])
def test_the_guards_status_is_that_of_a_command_that_ends_by_itself(tmp_path: Path, script: str, status: int) -> None:
    server = VllmProcess(stand_in(tmp_path, f"sleep 100 & {script}"), tmp_path / "log")
    assert server.wait(20.0)
    assert server.status == status
    assert group_is_gone(server.pid)


def test_a_server_that_ends_takes_the_rest_of_the_group_with_it(tmp_path: Path) -> None:
    server = VllmProcess(stand_in(tmp_path, "sleep 100 & echo Invalid weight transfer backend; exit 7"), tmp_path / "log")
    with pytest.raises(StageDiedError, match="ended with status 7") as caught:
        server.wait_until_healthy(20.0)
    assert "pip install --no-deps" in str(caught.value)
    assert str(tmp_path / "log") in str(caught.value)
    assert until(lambda: group_is_gone(server.pid))


def test_a_server_that_does_not_get_ready_is_not_awaited_for_ever(tmp_path: Path) -> None:
    server = VllmProcess(stand_in(tmp_path, "echo loading; sleep 100"), tmp_path / "log")
    try:
        assert until(lambda: "loading" in server.log.read_text())
        with pytest.raises(StalledError, match=r"not ready after 0 s; the end of its log:\nloading"):
            server.wait_until_healthy(0.3)
    finally:
        server.stop()


def test_a_server_ends_when_who_started_it_is_killed(tmp_path: Path) -> None:
    starter = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time\nfrom pathlib import Path\n"
            "from pipelinerl.serving.vllm.start import VllmProcess, VllmSettings\n"
            "settings = VllmSettings(python=sys.argv[1], model='m', slots=1, max_length=8)\n"
            "server = VllmProcess(settings, Path(sys.argv[2]))\nprint(server.pid, flush=True)\ntime.sleep(100)",
            stand_in(tmp_path, "sleep 100 & sleep 100").python,
            str(tmp_path / "log"),
        ],
        stdout=subprocess.PIPE,
    )
    assert starter.stdout is not None
    with starter.stdout:
        pid = int(starter.stdout.readline())
    assert not group_is_gone(pid)
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    assert until(lambda: group_is_gone(pid))


def test_no_interpreter_is_an_error_that_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="install_vllm_cpu"):
        VllmProcess(SETTINGS, tmp_path / "log")


def test_the_command_line_asks_for_what_the_client_requires() -> None:
    command = " ".join(command_line(SETTINGS, 8123))
    assert command.startswith("/env/bin/python -m vllm.entrypoints.openai.api_server --model /models/m ")
    for part in (
        "--host 127.0.0.1 --port 8123",
        "--max-num-seqs 8",
        "--max-model-len 300",
        "--logprobs-mode processed_logprobs",
        "--no-enable-prefix-caching",
        '--weight-transfer-config {"backend":"pipelinerl"}',
    ):
        assert part in command
    assert "--kv-cache-memory-bytes" not in command
    assert (
        environment(SETTINGS, {"PATH": "/bin", "OMP_NUM_THREADS": "9"}).items()
        >= {
            "PATH": "/bin",
            "OMP_NUM_THREADS": "1",
            "VLLM_SERVER_DEV_MODE": "1",
        }.items()
    )


def test_a_gpu_is_the_only_one_that_vllm_sees() -> None:
    gpu = dataclasses.replace(SETTINGS, device="cuda:1")
    assert "--enforce-eager" in command_line(SETTINGS, 1)
    assert "--enforce-eager" not in command_line(gpu, 1)
    assert "CUDA_VISIBLE_DEVICES" not in environment(SETTINGS, {})
    assert environment(gpu, {})["CUDA_VISIBLE_DEVICES"] == "1"
    assert environment(gpu, {"CUDA_VISIBLE_DEVICES": "4,7"})["CUDA_VISIBLE_DEVICES"] == "7"
    with pytest.raises(UserError, match=r"^engine.device: cuda:1 is not among the GPUs of CUDA_VISIBLE_DEVICES=4;"):
        environment(gpu, {"CUDA_VISIBLE_DEVICES": "4"})


def description(**changes: str) -> bytes:
    config = {
        "instance_id": "ab12c",
        "model_config": {"model": "m", "max_model_len": 300, "logprobs_mode": changes.get("logprobs", "processed_logprobs")},
        "cache_config": {"enable_prefix_caching": changes.get("prefix") == "on"},
        "scheduler_config": {"max_num_seqs": 8, "policy": "fcfs"},
        "weight_transfer_config": {"backend": changes["backend"]} if "backend" in changes else None,
    }
    return msgspec.json.encode({"vllm_config": config, "vllm_env": {}})


def test_a_server_that_is_set_up_otherwise_is_not_used() -> None:
    def found(**changes: str) -> list[str]:
        settings = msgspec.json.decode(description(**changes), type=ServerDescription).vllm_config.settings
        assert (settings.instance, settings.slots, settings.max_length) == ("ab12c", 8, 300)
        return problems(settings, "pipelinerl")

    assert found(backend="pipelinerl") == []
    assert "--logprobs-mode" in found(backend="pipelinerl", logprobs="raw_logprobs")[0]
    assert "--no-enable-prefix-caching" in found(backend="pipelinerl", prefix="on")[0]
    assert "--weight-transfer-config" in found(backend="nccl")[0]
    assert len(found(logprobs="raw_logprobs", prefix="on")) == 3


def test_what_the_models_folder_says() -> None:
    assert model_facts("demo") == (16, (1,))
    # 2 layers x (keys, values) x 3 heads x 32 x 4 bytes, for 8 slots of 3 blocks of 128, and 4 blocks to spare
    assert kv_cache_bytes("demo", slots=8, max_length=300, item_bytes=4) == 2 * 2 * 3 * 32 * 4 * 128 * (8 * 3 + 4)
