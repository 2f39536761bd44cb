"""Starts vLLM servers for a run, on free loopback ports: waits until they are healthy, and ends them with the run."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pipelinerl.errors import StageDiedError, StalledError, UserError
from pipelinerl.ports import free_port
from pipelinerl.serving.vllm.guard import LOG_PREFIX
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


def command_line(settings: VllmSettings, port: int) -> list[str]:
    """The command that starts vLLM as an engine; docs/vllm.md explains each flag."""
    command = [settings.python, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", settings.model, "--served-model-name", "policy", "--host", HOST, "--port", str(port)]
    command += ["--dtype", settings.dtype, "--max-model-len", str(settings.max_length)]
    command += ["--max-num-seqs", str(settings.slots), "--logprobs-mode", "processed_logprobs"]
    command += ["--enable-scale-out", "--no-enable-prefix-caching", "--generation-config", "vllm"]
    if settings.device == "cpu":
        command += ["--enforce-eager"]
    command += ["--weight-transfer-config", msgspec.json.encode({"backend": BACKEND}).decode()]
    if settings.kv_cache_bytes is not None:
        command += ["--kv-cache-memory-bytes", str(settings.kv_cache_bytes)]
    return [*command, *settings.arguments]


def environment(settings: VllmSettings, outer: Mapping[str, str]) -> dict[str, str]:
    """The environment for vLLM: `outer`, with the variables that vLLM needs."""
    return {
        **outer,
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


class VllmProcess:
    """One server process. The constructor starts it and does not wait until it is healthy."""

    def __init__(self, settings: VllmSettings, log: Path) -> None:
        """Start the server. Raises UserError if the interpreter does not exist."""
        if not os.access(settings.python, os.X_OK):
            raise UserError(
                f"{settings.python} is not a Python interpreter; scripts/install_vllm_cpu.sh installs one with vLLM"
            )
        self.log = log
        self._port = free_port()
        command = [sys.executable, "-m", "pipelinerl.serving.vllm.guard", *command_line(settings, self._port)]
        with log.open("ab") as output:
            self._guard = subprocess.Popen(  # noqa: S603 - our own module, the run file's interpreter
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(settings, os.environ),
                start_new_session=True,
            )

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self._port}"

    @property
    def pid(self) -> int:
        """The guard's process id, which is also the id of the server's process group."""
        return self._guard.pid

    def failure(self) -> str | None:
        """Why the server ended, with the end of its log; None while it runs."""
        if self._guard.poll() is None:
            return None
        return f"the vLLM server at {self.url} ended{self._log_excerpt()}"

    def wait_until_healthy(self, timeout_s: float = 180.0) -> None:
        """Wait until the server is healthy.

        Raises StageDiedError if it exits, StalledError if it does not answer in time, both with the end of its log.
        """
        deadline_s = time.monotonic() + timeout_s
        while not _healthy(self._port):
            if (failure := self.failure()) is not None:
                raise StageDiedError(failure)
            if time.monotonic() > deadline_s:
                raise StalledError(
                    f"the vLLM server at {self.url} is not ready after {timeout_s:.0f} s{self._log_excerpt()}"
                )
            time.sleep(POLL_EVERY_S)

    def ask_to_stop(self) -> None:
        if self._guard.stdin is not None:
            self._guard.stdin.close()

    def stop(self, patience_s: float = STOP_TIMEOUT_S) -> None:
        """End all its processes; kill them if they do not end in time."""
        self.ask_to_stop()
        with suppress(subprocess.TimeoutExpired):
            self._guard.wait(patience_s)
        with suppress(ProcessLookupError):  # if the guard itself was killed, other processes may remain
            os.killpg(self._guard.pid, signal.SIGKILL)
        self._guard.wait()

    def _log_excerpt(self) -> str:
        lines = _end_of(self.log)
        tail = "\n".join(lines[-LOG_LINES:])
        notes = [line.removeprefix(LOG_PREFIX) for line in lines if line.startswith(LOG_PREFIX)][-1:]
        notes += [hint for sign, hint in _HINTS.items() if sign in tail]
        excerpt = f"; the end of its log:\n{tail}\n" if tail else "; its log is empty "
        return "".join(f" ({note})" for note in notes) + f"{excerpt}(log: {self.log})"


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
        for server in servers:
            server.ask_to_stop()
        for server in servers:
            server.stop()


def _healthy(port: int) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=2.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _end_of(path: Path) -> list[str]:
    """The last lines of a log (16 KiB)."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - (16 << 10)))
            return log.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return []
