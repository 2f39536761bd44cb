"""What a machine has: its memory within the limits of control groups, and its GPUs. Imports no torch."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_UNLIMITED = 1 << 60
"""A limit from here on means none. Control groups also write `max` for that."""


class Memory(NamedTuple):
    """In bytes. `available` is what can be allocated now without ending other processes; None if it is not known."""

    total: int
    available: int | None


def host_memory(root: Path = Path("/")) -> Memory:
    """Physical memory, within the limits of this process's control groups. `root` is the folder of /proc and /sys."""
    machine = _meminfo(root / "proc/meminfo")
    if machine is None:
        return Memory(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), None)
    total, available = machine
    for limit, used in _limits(root):
        total, available = min(total, limit), min(available, max(0, limit - used))
    return Memory(total, available)


def device_memory(device: str) -> Memory | None:
    """The memory of a CUDA device, given its torch name. None without a driver, or if the driver does not know the device.

    This calls the driver directly: importing torch takes seconds, and both number devices in the same way. What is available
    is known to the library of nvidia-smi, which needs no context on the device.
    """
    driver, handle, total = _driver(), ctypes.c_int(), ctypes.c_size_t()
    if driver is None or driver.cuDeviceGet(ctypes.byref(handle), int(device.partition(":")[2] or 0)):
        return None
    if driver.cuDeviceTotalMem_v2(ctypes.byref(total), handle):
        return None
    bus, found, memory = ctypes.create_string_buffer(16), ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()
    with suppress(OSError):
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        failed = driver.cuDeviceGetPCIBusId(bus, len(bus), handle) or nvml.nvmlInit_v2()
        failed = failed or nvml.nvmlDeviceGetHandleByPciBusId_v2(bus, ctypes.byref(found))
        if not failed and not nvml.nvmlDeviceGetMemoryInfo(found, ctypes.byref(memory)):  # total, free, used
            return Memory(total.value, min(memory[1], total.value))
    return Memory(total.value, None)


def usable_gpus() -> int:
    """The CUDA devices that the driver shows to this process (see CUDA_VISIBLE_DEVICES)."""
    driver, count = _driver(), ctypes.c_int()
    return 0 if driver is None or driver.cuDeviceGetCount(ctypes.byref(count)) else count.value


def _driver() -> ctypes.CDLL | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return None if driver.cuInit(0) else driver


def _meminfo(path: Path) -> tuple[int, int] | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if rest.split()}
    return (kib["MemTotal"] << 10, kib["MemAvailable"] << 10) if {"MemTotal", "MemAvailable"} <= kib.keys() else None


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and use, in bytes, of each control group (v1 and v2) that limits this process, parent groups included.

    In a container the group may be mounted as the root, so both places are read. Use excludes file pages that the kernel
    can reclaim.
    """
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folder, limit, used = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            folder, limit, used = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        own = folder / path.strip("/")
        for group in (own, *own.parents):
            if group.is_relative_to(folder) and (most := _number(group / limit)) is not None and most < _UNLIMITED:
                yield most, (_number(group / used) or 0) - _reclaimable(group / "memory.stat")


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _reclaimable(path: Path) -> int:
    try:
        fields = dict(line.split() for line in path.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))
