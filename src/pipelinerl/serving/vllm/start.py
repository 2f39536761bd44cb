"""vLLM servers that a run starts itself: on a free loopback port, logged, awaited, watched, and ended with the run."""

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
from pipelinerl.serving.vllm.guard import SAID
from pipelinerl.serving.vllm.messages import BACKEND

HOST = "127.0.0.1"
LOOK_EVERY_S = 0.25
STOP_PATIENCE_S = 30.0
"""More than the guard needs to end vLLM by force."""
LAST_LINES = 8
_HINTS = {
    "No module named vllm": "that interpreter has no vLLM: scripts/install_vllm_cpu.sh makes one that has",
    "Invalid weight transfer backend": "install pipelinerl beside vLLM: PYTHON -m pip install --no-deps -e PIPELINERL",
    "Address already in use": "another process took its port: start again",
}


@dataclass(frozen=True, kw_only=True)
class VllmSettings:
    """How to start a server.

    `python`: the interpreter of the environment that has vLLM. `model`: a folder. `slots` H; `max_length` of prompt +
    completion. `kv_cache_bytes`: None leaves it to vLLM, which on CPU takes most of the memory (see `kv_cache_bytes`).
    `device` cpu, cuda or cuda:N; `threads` that compute, on CPU. `arguments` are added to vLLM's command line.
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
    """What makes vLLM an engine for reinforcement learning; each flag is explained in docs/vllm.md."""
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
    """`outer`, with what vLLM needs to be told that way."""
    return {
        **outer,
        **_visible(settings.device, outer),
        "VLLM_SERVER_DEV_MODE": "1",  # the routes for weights
        "VLLM_PLUGINS": BACKEND,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # cores are shared with the trainer: the scheduler places threads better
        "OMP_NUM_THREADS": str(settings.threads),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _visible(device: str, outer: Mapping[str, str]) -> dict[str, str]:
    """vLLM takes the first GPU that it sees: let it see no other than `device`. Raises UserError if `outer` hides it."""
    _, _, number = device.partition(":")
    if not number:
        return {}
    seen = outer.get("CUDA_VISIBLE_DEVICES")
    gpus = seen.split(",") if seen is not None else None
    if gpus is not None and int(number) >= len(gpus):
        raise UserError(f"engine.device: {device} is not among the GPUs of CUDA_VISIBLE_DEVICES={seen}; choose one that is")
    return {"CUDA_VISIBLE_DEVICES": number if gpus is None else gpus[int(number)]}


class VllmProcess:
    """One server: started at once, healthy later. `url` is known from the start."""

    def __init__(self, settings: VllmSettings, log: Path) -> None:
        """Start it. Raises UserError if there is no such interpreter."""
        if not os.access(settings.python, os.X_OK):
            raise UserError(f"{settings.python} is no Python interpreter; scripts/install_vllm_cpu.sh makes one with vLLM")
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
        """Of the process that leads the group of all its processes."""
        return self._guard.pid

    def failure(self) -> str | None:
        """Why it does not run, in a few lines; None while it does."""
        if self._guard.poll() is None:
            return None
        return f"the vLLM server at {self.url} ended{self._last_words()}"

    def wait_until_healthy(self, timeout_s: float = 180.0) -> None:
        """Raises StageDiedError if it ends, StalledError if it does not answer in time; both with its last words."""
        deadline_s = time.monotonic() + timeout_s
        while not _healthy(self._port):
            if (failure := self.failure()) is not None:
                raise StageDiedError(failure)
            if time.monotonic() > deadline_s:
                raise StalledError(f"the vLLM server at {self.url} is not ready after {timeout_s:.0f} s{self._last_words()}")
            time.sleep(LOOK_EVERY_S)

    def ask_to_stop(self) -> None:
        if self._guard.stdin is not None:
            self._guard.stdin.close()

    def stop(self, patience_s: float = STOP_PATIENCE_S) -> None:
        """End all its processes, by force in the end."""
        self.ask_to_stop()
        with suppress(subprocess.TimeoutExpired):
            self._guard.wait(patience_s)
        with suppress(ProcessLookupError):  # a guard that was killed has left the others
            os.killpg(self._guard.pid, signal.SIGKILL)
        self._guard.wait()

    def _last_words(self) -> str:
        lines = _end_of(self.log)
        tail = "\n".join(lines[-LAST_LINES:])
        notes = [line.removeprefix(SAID) for line in lines if line.startswith(SAID)][-1:]
        notes += [hint for sign, hint in _HINTS.items() if sign in tail]
        said = f"; its last words:\n{tail}\n" if tail else " without a word "
        return "".join(f" ({note})" for note in notes) + f"{said}(its log: {self.log})"


@contextmanager
def running_vllm(settings: VllmSettings, logs: Sequence[Path], timeout_s: float = 180.0) -> Iterator[list[VllmProcess]]:
    """A healthy server for each log, while inside."""
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
    """Some of the last lines of a log."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - (16 << 10)))
            return log.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return []
