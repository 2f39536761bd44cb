"""`torch.compile` in a process of a run: where it keeps its files, and what happens if it fails."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from collections.abc import Callable

import torch

_log = logging.getLogger(__name__)

_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def prepare_compiler() -> None:
    """Must be called before anything is compiled by "inductor"."""
    from torch._inductor import config  # noqa: PLC0415 - takes a second

    if _CACHE not in os.environ:  # torch's own default is a name in /tmp that another user may have taken
        os.environ[_CACHE] = tempfile.mkdtemp(prefix="pipelinerl-compiled-")
        atexit.register(shutil.rmtree, os.environ[_CACHE], ignore_errors=True)
    # On a CPU no processes of its own. On a GPU they are worth it: Triton's kernels take seconds.
    config.compile_threads = min(8, os.cpu_count() or 1) if torch.cuda.is_available() else 1


def why_not(failure: Exception) -> str:
    """The cause of an error of a compiler, in one line."""
    inner = getattr(failure, "inner_exception", failure)
    return f"{type(inner).__name__}: {inner}".partition("\n")[0]


def try_compiler(name: str, compile_it: Callable[[], None]) -> str:
    """Empty if `compile_it` succeeds, else ", not compiled: " and why, for a description; there is a warning, too."""
    try:
        prepare_compiler()
        compile_it()
    except Exception as failure:  # noqa: BLE001 - whatever a compiler raises
        _log.warning("%s can't be compiled, which costs some speed: %s", name, why_not(failure))
        return f", not compiled: {why_not(failure)}"
    return ""
