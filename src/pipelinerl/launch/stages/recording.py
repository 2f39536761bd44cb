"""What a run records about each of its sessions for a replay: one line of `sessions.jsonl`, without secrets."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import torch

from pipelinerl.checkpoint import rng_state
from pipelinerl.config.secrets import without_secrets
from pipelinerl.files import OpenLines
from pipelinerl.launch.session import Session

FORMAT = 1
"""Version of the records that a replay reads: those of sessions, steps, rollouts and published weights together."""
PACKAGES = ("pipelinerl", "torch", "transformers", "numpy", "safetensors", "peft")


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What bits may depend on besides the records. `instructions`: the vector instructions that torch uses."""

    processor: str
    instructions: str
    packages: dict[str, str]


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One session of a run, from the weights of `version` on.

    `config` is the session's configuration without secrets, `threads` the trainer's CPU threads, and `rng` the state of
    torch's generators before the first step. If a later session begins at the same version or an earlier one, the steps of
    this one from there on do not count. `rollouts_bytes` and `trained_bytes` are the sizes of the files with these names
    before the session. `id`: that of the session, which its checkpoints have too. `inputs`: checksums of
    the environment's files.
    """

    version: int
    id: str = ""
    inputs: dict[str, str] = {}
    config: dict[str, Any]
    threads: int
    machine: Machine
    rng: dict[str, str]
    rollouts_bytes: int = 0
    trained_bytes: int = 0
    format: int = FORMAT


def session_recorder(session: Session, lines: OpenLines) -> Callable[[], None]:
    """What appends the record of this session. Called in the training process, when its model is loaded.

    A resume is recorded with its first step, so that one that fails before changes nothing.
    """
    record = SessionRecord(
        version=session.plan.version,
        id=session.plan.id,
        inputs=session.plan.inputs,
        config=without_secrets(session.config),
        threads=torch.get_num_threads(),
        machine=this_machine(),
        rng=rng_state(),
        rollouts_bytes=session.plan.rollouts_bytes,
        trained_bytes=session.plan.trained_bytes,
    )

    def write() -> None:
        with lines(session.run.sessions) as sessions:
            sessions.write(record)

    return write


def this_machine() -> Machine:
    return Machine(
        processor=_processor(),
        instructions=torch.backends.cpu.get_cpu_capability(),
        packages={"python": platform.python_version(), **{name: found for name in PACKAGES if (found := _installed(name))}},
    )


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
