"""How vLLM is started and ended, with stand-ins for it, and what our backend inside it takes and refuses, without vLLM."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from pipelinerl.config.checks import VLLM_OWN
from pipelinerl.config.schema import EngineConfig
from pipelinerl.errors import WeightUpdateError
from pipelinerl.models.state import checksum, write_safetensors
from pipelinerl.process.child import ChildProcess
from pipelinerl.serving.vllm.adapter import model_facts
from pipelinerl.serving.vllm.messages import REFUSED
from pipelinerl.serving.vllm.plugin import TransferBackend, refresh_heads
from pipelinerl.serving.vllm.start import (
    KEY_VARIABLE,
    RequireKey,
    VllmSettings,
    command_line,
    environment,
    kv_cache_bytes,
    members,
)
from pipelinerl.serving.wire import ProcessGroupRequest
from pipelinerl.weights.broadcast.sender import CollectiveWeightSender
from tests.unit.process.test_child import until
from tests.unit.weights.relay import Relay


def group_of(log: Path) -> int:
    """The process group of the script, which says its process id first."""
    assert until(lambda: log.exists() and "\n" in log.read_text())
    return int(log.read_text().splitlines()[0])


def started(script: str, log: Path) -> ChildProcess:
    """A shell script in the place of vLLM."""
    command = [sys.executable, "-m", "pipelinerl.serving.vllm.start", "/bin/sh", "-c", f"echo $$; {script}"]
    return ChildProcess(command, log=log, watches_parent=True, patience_s=30.0)


@pytest.mark.slow
def test_stopping_ends_the_whole_group_and_is_no_failure(tmp_path: Path) -> None:
    server = started("sleep 100 & sleep 100", tmp_path / "log")
    assert members(group_of(tmp_path / "log"))
    server.stop()
    assert server.status == 0
    assert not members(group_of(tmp_path / "log"))


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_process_that_cleans_up_after_the_others_has_time_to(tmp_path: Path) -> None:
    """As Python's resource tracker, which ignores SIGTERM and ends with the last of the others."""
    cleaner = "(trap '' TERM; touch ready; while kill -0 $$; do sleep 0.1; done; sleep 1; echo clean) 2>/dev/null &"
    server = started(f"cd {tmp_path}; {cleaner} until [ -e ready ]; do sleep 0.1; done; kill -9 $$", tmp_path / "log")
    assert server.wait(20.0)
    assert "clean" in server.log_lines()


@pytest.mark.slow
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


class Backend(TransferBackend):
    """Keeps what it would load."""

    taken: Mapping[str, torch.Tensor] | None = None

    def receive_weights(self, update_info: Mapping[str, torch.Tensor]) -> None:
        self.taken = dict(update_info)


@pytest.fixture
def transfer(tmp_path: Path) -> Backend:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a.weight": torch.zeros(2, 3), "b.weight": torch.zeros(4)}, folder / "model.safetensors")
    backend = Backend()
    backend.model_config = SimpleNamespace(model=str(folder))
    backend.parallel_config = SimpleNamespace(world_size=1)
    backend.device = torch.device("cpu")
    return backend


def good() -> dict[str, torch.Tensor]:
    return {"a.weight": torch.ones(2, 3), "b.weight": torch.arange(4.0), "alias.weight": torch.ones(2, 3)}


def write(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    path.unlink(missing_ok=True)
    write_safetensors(tensors, path)
    return {"path": str(path), "version": 2, "checksum": checksum(tensors)}


def assert_taken(transfer: Backend) -> None:
    assert transfer.taken is not None
    assert transfer.taken.keys() == good().keys()
    assert all(torch.equal(tensor, good()[name]) for name, tensor in transfer.taken.items())
    transfer.taken = None


def test_a_good_file_is_loaded_whole(tmp_path: Path, transfer: Backend) -> None:
    transfer.start_weight_update()
    transfer.update_weights(write(tmp_path / "v2.safetensors", good()))
    assert_taken(transfer)


def refusal(transfer: Backend, info: dict[str, Any]) -> str:
    with pytest.raises(WeightUpdateError) as caught:
        transfer.update_weights(info)
    assert str(caught.value).startswith(REFUSED)
    assert transfer.taken is None, "the model was touched"
    return str(caught.value)


def test_what_is_not_the_announced_weights_is_refused_before_the_model_is_touched(tmp_path: Path, transfer: Backend) -> None:
    path = tmp_path / "v2.safetensors"
    info = write(path, good())
    assert "arrived damaged: checksum" in refusal(transfer, info | {"checksum": "0" * 32})
    missing = {name: tensor for name, tensor in good().items() if name != "b.weight"}
    assert "1 weights are missing" in refusal(transfer, write(path, missing))
    longer = good() | {"b.weight": torch.ones(5)}
    assert "1 have another shape, among them b.weight" in refusal(transfer, write(path, longer))
    broken = good() | {"b.weight": good()["b.weight"] * float("inf")}
    assert "1 weights are not finite, among them b.weight" in refusal(transfer, write(path, broken))


# ---------------------------------------------------------------------------------------------- by the trainer's broadcast


def join(sender: CollectiveWeightSender, **changes: Any) -> dict[str, Any]:
    group = ProcessGroupRequest(host=sender.host, port=sender.port, key="secret", index=0, timeout_s=10.0)
    return msgspec.to_builtins(group) | changes


def test_what_was_broadcast_is_loaded_whole(transfer: Backend) -> None:
    with closing(CollectiveWeightSender("127.0.0.1", "secret", 1, Relay().trainer)) as sender:
        transfer.init_transfer_engine(transfer.parse_init_info(join(sender)))
        digest = sender.send(2, good())
        group: Any = transfer._incoming._group
        assert until(lambda: group.newest() is not None, 10.0)
        transfer.start_weight_update()
        transfer.update_weights({"version": 2, "checksum": digest})
        assert_taken(transfer)
        transfer.shutdown()


def test_a_broadcast_that_can_not_be_joined_is_refused(transfer: Backend) -> None:
    assert "no broadcast was joined" in refusal(transfer, {"version": 2, "checksum": ""})
    with closing(CollectiveWeightSender("127.0.0.1", "secret", 2, Relay().trainer)) as sender:
        with pytest.raises(WeightUpdateError, match=f"^{REFUSED}.*in 0.2 s"):
            transfer.init_transfer_engine(transfer.parse_init_info(join(sender, timeout_s=0.2)))
        transfer.parallel_config = SimpleNamespace(world_size=2)
        with pytest.raises(WeightUpdateError, match=r"this vLLM has 2: set weights\.kind to shared"):
            transfer.init_transfer_engine(transfer.parse_init_info(join(sender)))


class ParallelLMHead(nn.Module):
    refreshed = 0
    quant_method: Any = None


def test_heads_prepare_their_weights_again() -> None:
    head = type("OurHead", (ParallelLMHead,), {})()
    head.quant_method = SimpleNamespace(process_weights_after_loading=lambda module: setattr(module, "refreshed", 1))
    refresh_heads(nn.ModuleDict({"embed": nn.Linear(2, 2), "lm_head": head}))
    assert head.refreshed == 1
    head.quant_method = None
    with pytest.raises(WeightUpdateError, match="lm_head"):
        refresh_heads(nn.ModuleDict({"lm_head": head}))
