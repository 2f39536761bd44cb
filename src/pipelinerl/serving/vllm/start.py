"""Starts and ends a vLLM server as an engine, and protects all of its routes with a key.

    python -m pipelinerl.serving.vllm.start COMMAND ARGUMENT...

runs a command in a process group of its own while standard input, a parent-death pipe, stays open. vLLM has several
processes, and does not notice when the run that started it ends. When the pipe closes, or at a SIGTERM, the group gets a
SIGTERM; what remains after `TERM_TIMEOUT_S` is killed. The exit status is then 0. If the command ends by itself, its other
processes are ended too; the exit status is the command's (128 + the signal's number if a signal ended it).
"""

from __future__ import annotations

import hmac
import os
import select
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.process.child import ChildProcess
from pipelinerl.serving.vllm.messages import BACKEND

HOST = "127.0.0.1"
KEY_VARIABLE = "PIPELINERL_SERVER_KEY"
POLL_EVERY_S = 0.2
TERM_TIMEOUT_S = 15.0
"""vLLM's engine takes 4 to 10 s. Python's resource tracker, which ignores SIGTERM, then removes their shared memory."""

# ---- the command


@dataclass(frozen=True, kw_only=True)
class VllmSettings:
    """How to start a server.

    `python`: the interpreter of the environment that has vLLM. `model`: a folder. `slots`: H. `max_length`: of prompt +
    completion, in tokens. `kv_cache_bytes`: None leaves it to vLLM, which on CPU takes most of the memory (see
    `kv_cache_bytes`). `memory_share`: of its GPUs, from 0 to 1; None leaves it to vLLM. `device`: cpu or cuda.
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


BLOCK = 128
"""Tokens per block of vLLM's KV cache on CPU, where blocks are largest."""
SPARE_BLOCKS = 4


def kv_cache_bytes(path: str, *, slots: int, max_length: int, item_bytes: int) -> int:
    """Memory for the KV cache of all slots at full length, so that vLLM never has to preempt and recompute a request."""
    from transformers import AutoConfig  # noqa: PLC0415 - as above

    from pipelinerl.models.folder import resolve_path  # noqa: PLC0415 - as above

    config = AutoConfig.from_pretrained(resolve_path(path)).get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    block_bytes = 2 * config.num_hidden_layers * heads * head_dim * item_bytes * BLOCK
    return int(block_bytes * (slots * -(-max_length // BLOCK) + SPARE_BLOCKS))


def command_line(settings: VllmSettings, port: int, host: str = HOST, *, guarded: bool = False) -> list[str]:
    """The command that starts vLLM as an engine; docs/vllm.md explains each flag.

    `guarded`: all its routes ask for the key of `environment`. vLLM's own key does not protect the routes for weights.
    """
    command = [settings.python, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", settings.model, "--served-model-name", "policy", "--host", host, "--port", str(port)]
    command += ["--dtype", settings.dtype, "--max-model-len", str(settings.max_length)]
    command += ["--max-num-seqs", str(settings.slots), "--logprobs-mode", "processed_logprobs"]
    command += ["--enable-scale-out", "--enable-prefix-caching", "--generation-config", "vllm"]
    if settings.device == "cpu":
        command += ["--enforce-eager"]
    command += ["--weight-transfer-config", msgspec.json.encode({"backend": BACKEND}).decode()]
    if settings.tls is not None:
        command += ["--ssl-certfile", str(settings.tls[0]), "--ssl-keyfile", str(settings.tls[1])]
    if guarded:
        command += ["--middleware", "pipelinerl.serving.vllm.start.RequireKey"]
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


# ---- the process


def main(command: Sequence[str]) -> int:
    """Run `command` until it ends or must stop; returns the exit status."""
    stop_signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stop_signals.append(number))
    signal.signal(signal.SIGINT, lambda *_: None)  # unlike SIG_IGN, this is not inherited by the command
    try:
        child = ChildProcess(command)
    except OSError as error:
        print(f"can't start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return 127
    with child:
        while child.running and not stop_signals and not _stdin_closed(POLL_EVERY_S):
            pass
        status = child.status
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
        deadline_s = time.monotonic() + TERM_TIMEOUT_S
        while (child.running or members(child.pid)) and time.monotonic() < deadline_s:
            time.sleep(0.05)
    if status is None:
        return 0
    print(f"{command[0]} {child.how_it_ended()}", file=sys.stderr, flush=True)
    return status if status >= 0 else 128 - status


def members(group: int) -> list[int]:
    """Ids of the group's processes that have not ended, from Linux's /proc."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):  # the process has ended meanwhile
            if entry.name.isdecimal():
                state, _, of_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                found += [int(entry.name)] if int(of_group) == group and state not in "ZX" else []
    return found


def _stdin_closed(timeout_s: float) -> bool:
    """Whether standard input closes within the timeout. Nothing is ever written to it."""
    readable, _, _ = select.select([sys.stdin.fileno()], [], [], timeout_s)
    return bool(readable) and not os.read(sys.stdin.fileno(), 1)


# ---- the key


Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class RequireKey:
    """An ASGI middleware for vLLM, whose own key protects routes below /v1 only, and not those for weights.

    Answers 401 to requests without `Authorization: Bearer KEY`. The key is in the environment variable `KEY_VARIABLE`.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ[KEY_VARIABLE]}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or hmac.compare_digest(
            dict(scope["headers"]).get(b"authorization", b""), self._expected
        ):
            await self._app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": b'{"error": "a key is needed: Authorization: Bearer KEY"}'})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
