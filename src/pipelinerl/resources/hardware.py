"""The machine that an experiment runs on: hardware, software and load, which affect the results."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from pipelinerl.resources.share import usable_cores


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A machine and its software. `cores` are those that this process may use."""

    cpu: str
    cores: int
    memory_gib: float | None
    system: str
    versions: dict[str, str]


def this_machine(device: str = "cpu") -> Machine:
    """This machine. With a GPU as `device`, its name takes the place of the processor's."""
    return Machine(
        cpu=processor() if device == "cpu" else _gpu_name(device),
        cores=usable_cores(),
        memory_gib=_memory_gib(),
        system=f"{platform.system()} {platform.machine()}",
        versions={
            "python": ".".join(map(str, sys.version_info[:3])),
            **{name: installed(name) or "not installed" for name in ("pipelinerl", "torch", "transformers", "numpy")},
        },
    )


def load_average() -> float | None:
    """Runnable processes over the last minute, which shows other load. None where the system does not report it."""
    try:
        return round(os.getloadavg()[0], 2)
    except OSError:
        return None


def processor() -> str:
    """The name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    found = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(found, platform.processor() or "unknown")


def _gpu_name(device: str) -> str:
    import torch  # noqa: PLC0415 - only with a GPU

    return torch.cuda.get_device_name(device)


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError):
        return None


def installed(package: str) -> str | None:
    """The version of a package; None without it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def clock_of(device: str) -> Callable[[], float]:
    """The clock for measurements on `device`. On a CPU it counts the seconds that the calling thread computes, so that
    programs that share its core do not count. The threads of an operation all compute equally long.
    """
    return time.thread_time if device == "cpu" else time.perf_counter
