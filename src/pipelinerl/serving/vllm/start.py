"""Starts vLLM servers for a run, on free loopback ports: waits until they are healthy, and ends them with the run."""

from __future__ import annotations

import http.client
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pipelinerl.child import ChildProcess, stop_all
from pipelinerl.errors import StageDiedError, StalledError, UserError
from pipelinerl.ports import free_port
from pipelinerl.serving.vllm.guard import LOG_PREFIX
from pipelinerl.serving.vllm.key import KEY_VARIABLE
from pipelinerl.serving.vllm.messages import BACKEND

HOST = "127.0.0.1"
POLL_EVERY_S = 0.25
STOP_TIMEOUT_S = 30.0
"""More than the guard needs to kill vLLM."""
LOG_LINES = 8
_HINTS = {
    "No module named vllm": "that interpreter has no vLLM: scripts/install_vllm_cpu.sh creates an environment with it",
    "Invalid weight transfer backend": "install pipelinerl beside vLLM: PYTHON -m pip install --no-deps -e PIPELINERL",
    "Address already in use": "another process uses its port: start again",
}


@dataclass(frozen=True, kw_only=True)
class VllmSettings:
    """How to start a server.

    `python`: the interpreter of the environment that has vLLM. `model`: a folder. `slots`: H. `max_length`: of prompt +
    completion, in tokens. `kv_cache_bytes`: None leaves it to vLLM, which on CPU takes most of the memory (see
    `server_info.kv_cache_bytes`). `device`: cpu, cuda or cuda:N. `threads`: compute threads, on CPU. `arguments`: added to
    vLLM's command line.
    """

    python: str
    model: str
    slots: int
    max_length: int
    dtype: str = "float32"
    kv_cache_bytes: int | None = None
    device: str = "cpu"
    threads: int = 1
    arguments: tuple[str, ...] = ()


def command_line(settings: VllmSettings, port: int, host: str = HOST, *, guarded: bool = False) -> list[str]:
    """The command that starts vLLM as an engine; docs/vllm.md explains each flag.

    `guarded`: all its routes ask for the key of `environment`. vLLM's own key does not protect the routes for weights.
    """
    command = [settings.python, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", settings.model, "--served-model-name", "policy", "--host", host, "--port", str(port)]
    command += ["--dtype", settings.dtype, "--max-model-len", str(settings.max_length)]
    command += ["--max-num-seqs", str(settings.slots), "--logprobs-mode", "processed_logprobs"]
    command += ["--enable-scale-out", "--no-enable-prefix-caching", "--generation-config", "vllm"]
    if settings.device == "cpu":
        command += ["--enforce-eager"]
    command += ["--weight-transfer-config", msgspec.json.encode({"backend": BACKEND}).decode()]
    if guarded:
        command += ["--middleware", "pipelinerl.serving.vllm.key.RequireKey"]
    if settings.kv_cache_bytes is not None:
        command += ["--kv-cache-memory-bytes", str(settings.kv_cache_bytes)]
    return [*command, *settings.arguments]


def environment(settings: VllmSettings, outer: Mapping[str, str], key: str | None = None) -> dict[str, str]:
    """The environment for vLLM: `outer`, with the variables that vLLM needs. `key`: of a guarded server."""
    return {
        **outer,
        **({} if key is None else {KEY_VARIABLE: key}),
        **_visible(settings.device, outer),
        "VLLM_SERVER_DEV_MODE": "1",  # enables the routes for weight updates
        "VLLM_PLUGINS": BACKEND,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer shares the cores, so the OS scheduler should place threads
        "OMP_NUM_THREADS": str(settings.threads),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _visible(device: str, outer: Mapping[str, str]) -> dict[str, str]:
    """Make `device` the only visible GPU: vLLM uses the first one that it sees. Raises UserError if `outer` hides it."""
    _, _, number = device.partition(":")
    if not number:
        return {}
    seen = outer.get("CUDA_VISIBLE_DEVICES")
    gpus = seen.split(",") if seen is not None else None
    if gpus is not None and int(number) >= len(gpus):
        raise UserError(f"engine.device: {device} is not among the GPUs of CUDA_VISIBLE_DEVICES={seen}; choose one that is")
    return {"CUDA_VISIBLE_DEVICES": number if gpus is None else gpus[int(number)]}


class VllmProcess(ChildProcess):
    """One server, as its guard process. The constructor starts it and does not wait until it is healthy."""

    def __init__(self, settings: VllmSettings, log: Path) -> None:
        """Start the server. Raises UserError if the interpreter does not exist."""
        if not os.access(settings.python, os.X_OK):
            raise UserError(
                f"{settings.python} is not a Python interpreter; scripts/install_vllm_cpu.sh installs one with vLLM"
            )
        self._port = free_port()
        super().__init__(
            [sys.executable, "-m", "pipelinerl.serving.vllm.guard", *command_line(settings, self._port)],
            log=log,
            environment=environment(settings, os.environ),
            watches_parent=True,
            patience_s=STOP_TIMEOUT_S,
        )

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self._port}"

    def failure(self) -> str | None:
        """Why the server ended, with the end of its log; None while it runs."""
        return None if self.running else f"the vLLM server at {self.url} ended{self._log_excerpt()}"

    def wait_until_healthy(self, timeout_s: float = 180.0) -> None:
        """Wait until the server is healthy.

        Raises StageDiedError if it exits, StalledError if it does not answer in time, both with the end of its log.
        """
        if self.wait_until(lambda: _healthy(self._port), timeout_s, POLL_EVERY_S):
            return
        if (failure := self.failure()) is not None:
            raise StageDiedError(failure)
        raise StalledError(f"the vLLM server at {self.url} is not ready after {timeout_s:.0f} s{self._log_excerpt()}")

    def _log_excerpt(self) -> str:
        lines, excerpt = self.log_lines(), self.log_excerpt(LOG_LINES)
        notes = [line.removeprefix(LOG_PREFIX) for line in lines if line.startswith(LOG_PREFIX)][-1:]
        notes += [hint for sign, hint in _HINTS.items() if sign in excerpt]
        return "".join(f" ({note})" for note in notes) + excerpt


@contextmanager
def running_vllm(settings: VllmSettings, logs: Sequence[Path], timeout_s: float = 180.0) -> Iterator[list[VllmProcess]]:
    """Start one server for each log; yields them when all are healthy, and stops them at the end."""
    servers: list[VllmProcess] = []
    try:
        servers += [VllmProcess(settings, log) for log in logs]
        for server in servers:
            server.wait_until_healthy(timeout_s)
        yield servers
    finally:
        stop_all(servers, STOP_TIMEOUT_S)


def _healthy(port: int) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=2.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
