"""Whether PyTorch can compute on a device of this machine."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipelinerl.errors import UserError


def require_device(device: torch.device | str) -> None:
    """Raise UserError unless `device` is a CPU or a CUDA GPU, and PyTorch can compute on it on this machine."""
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise UserError(f"device {str(device)!r} is unknown to PyTorch; use cpu, cuda or cuda:N") from error
    instead = "use cpu"
    if wanted.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if torch.version.cuda is None and torch.version.hip is None:
            problem = f"the PyTorch installed here ({torch.__version__}) is built without CUDA"
            instead = "use cpu, or install a PyTorch with CUDA"
        elif not count:
            problem = "PyTorch finds no CUDA GPU here (nvidia-smi shows what the driver finds)"
        elif (wanted.index or 0) >= count:
            problem, instead = f"there are {count} CUDA GPUs here", f"use cuda:0 to cuda:{count - 1}"
        else:
            return
    elif wanted.type == "cpu":
        return
    else:
        problem, instead = "models run on CPUs and CUDA GPUs only", "use cpu, cuda or cuda:N"
    raise UserError(f"device {str(device)!r} can't be used: {problem}; {instead}")


# ---- `torch.compile` in a process of a run: where it keeps its files, and what happens if it fails


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


def try_compiler(name: str, compile_it: Callable[[], None]) -> str:
    """Empty if `compile_it` succeeds, else ", not compiled: " and why, for a description; there is a warning, too."""
    try:
        prepare_compiler()
        compile_it()
    except Exception as failure:  # noqa: BLE001 - whatever a compiler raises
        inner = getattr(failure, "inner_exception", failure)
        why = f"{type(inner).__name__}: {inner}".partition("\n")[0]
        _log.warning("%s can't be compiled, which costs some speed: %s", name, why)
        return f", not compiled: {why}"
    return ""


# ---- Transfers between host and device that do not block: through pinned memory, in the order of the device's stream


PART = 1 << 26
"""In bytes. A power of two, which PyTorch rounds pinned memory up to."""
_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for all devices."""


def to_device(array: npt.ArrayLike | Tensor, device: torch.device) -> Tensor:
    """A copy of `array` on the device, unless it is there. The host does not wait for the transfer."""
    if isinstance(array, Tensor) and array.device == device:
        return array
    host = array if isinstance(array, Tensor) else torch.from_numpy(np.array(array))
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Callable[[], npt.NDArray[Any]]:
    """Start to copy `tensor`, as it is after all work enqueued so far. The returned function waits for the copy."""
    if tensor.device.type != "cuda":
        copied = tensor.clone()
        return lambda: copied.numpy(force=True)
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record(torch.cuda.current_stream(tensor.device))

    def read() -> npt.NDArray[Any]:
        done.synchronize()
        return host.numpy()

    return read


def arriving(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, npt.NDArray[np.uint8]]]:
    """The bytes of each tensor [n], in parts of at most `PART`. The next part is copied while the caller uses one."""
    before: tuple[str, Callable[[], npt.NDArray[Any]]] | None = None
    parts = ((name, part) for name, bytes_U8 in named for part in torch.split(bytes_U8, PART))
    for name, part_U8 in parts:
        started = name, to_host(part_U8)
        if before is not None:
            yield before[0], before[1]()
        before = started
    if before is not None:
        yield before[0], before[1]()


def pin(tensor: Tensor, device: torch.device) -> Callable[[], object]:
    """Pin the memory that `tensor` is a view of, for a GPU to access it directly. The returned function unpins it.

    For memory that PyTorch has not allocated. If CUDA refuses, that is logged, and the driver copies twice, which is slower.
    """
    memory = tensor.untyped_storage()
    with torch.cuda.device(device):
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if error := int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes(), _PORTABLE)):
            with suppress(RuntimeError):
                torch.ones(1, device=device)  # CUDA reports the error again at the next launch, which is this one
            _log.warning("shared weights can't be pinned (CUDA error %d): copies to and from %s are slower", error, device)
            return lambda: None
    return lambda: cudart.cudaHostUnregister(memory.data_ptr())
