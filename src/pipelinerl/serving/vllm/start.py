"""How a vLLM server is started as an engine: its command line and environment. `guard` runs the command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pipelinerl.serving.vllm.key import KEY_VARIABLE
from pipelinerl.serving.vllm.messages import BACKEND

HOST = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class VllmSettings:
    """How to start a server.

    `python`: the interpreter of the environment that has vLLM. `model`: a folder. `slots`: H. `max_length`: of prompt +
    completion, in tokens. `kv_cache_bytes`: None leaves it to vLLM, which on CPU takes most of the memory (see
    `server_info.kv_cache_bytes`). `memory_share`: of its GPUs, from 0 to 1; None leaves it to vLLM. `device`: cpu or cuda.
    `threads`: compute threads, on CPU. `arguments`: more of them; vLLM takes the last of two.
    """

    python: str
    model: str
    slots: int
    max_length: int
    dtype: str = "float32"
    kv_cache_bytes: int | None = None
    memory_share: float | None = None
    device: str = "cpu"
    threads: int = 1
    tls: tuple[Path, Path] | None = None
    arguments: Sequence[str] = ()


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
    if settings.tls is not None:
        command += ["--ssl-certfile", str(settings.tls[0]), "--ssl-keyfile", str(settings.tls[1])]
    if guarded:
        command += ["--middleware", "pipelinerl.serving.vllm.key.RequireKey"]
    if settings.kv_cache_bytes is not None:
        command += ["--kv-cache-memory-bytes", str(settings.kv_cache_bytes)]
    if settings.memory_share is not None:
        command += ["--gpu-memory-utilization", f"{settings.memory_share:.3f}"]
    return [*command, *settings.arguments]


def environment(settings: VllmSettings, outer: Mapping[str, str], key: str | None = None) -> dict[str, str]:
    """The environment for vLLM: `outer`, with the variables that vLLM needs. `key`: of a guarded server."""
    return {
        **outer,
        **({} if key is None else {KEY_VARIABLE: key}),
        "VLLM_SERVER_DEV_MODE": "1",  # enables the routes for weight updates
        "VLLM_PLUGINS": BACKEND,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer shares the cores, so the OS scheduler should place threads
        "OMP_NUM_THREADS": str(settings.threads),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
