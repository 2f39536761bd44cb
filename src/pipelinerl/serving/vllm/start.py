"""How a vLLM server is started as an engine: its command line and environment. `guard` runs the command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pipelinerl.errors import UserError
from pipelinerl.serving.vllm.key import KEY_VARIABLE
from pipelinerl.serving.vllm.messages import BACKEND

HOST = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class VllmSettings:
    """How to start a server.

    `python`: the interpreter of the environment that has vLLM. `model`: a folder. `slots`: H. `max_length`: of prompt +
    completion, in tokens. `kv_cache_bytes`: None leaves it to vLLM, which on CPU takes most of the memory (see
    `server_info.kv_cache_bytes`). `device`: cpu, cuda or cuda:N. `threads`: compute threads, on CPU.
    """

    python: str
    model: str
    slots: int
    max_length: int
    dtype: str = "float32"
    kv_cache_bytes: int | None = None
    device: str = "cpu"
    threads: int = 1
    tls: tuple[Path, Path] | None = None


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
    return command


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
