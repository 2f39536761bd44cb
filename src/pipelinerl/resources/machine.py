"""What this machine has: its processor, its memory within the limits of control groups, its GPUs and its software."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from pipelinerl.metrics.records import Computer

PACKAGES = ("pipelinerl", "torch", "transformers", "numpy", "safetensors", "peft")


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The machine that an experiment runs on, and its software. `cores`: how many this process may use."""

    cpu: str
    cores: int
    memory_gib: float | None
    system: str
    versions: dict[str, str]


def this_machine(device: str = "cpu") -> Machine:
    """This machine. With a GPU as `device`, its name takes the place of the processor's."""
    from pipelinerl.extras import version  # noqa: PLC0415 - few runs need it

    name = processor()
    if device != "cpu":
        import torch  # noqa: PLC0415 - takes seconds

        name = torch.cuda.get_device_name(device)
    return Machine(
        cpu=name,
        cores=usable_cores(),
        memory_gib=round(host_memory().total / 2**30, 1),
        system=f"{platform.system()} {platform.machine()}",
        versions={
            "python": platform.python_version(),
            **{name: version(name) or "not installed" for name in ("pipelinerl", "torch", "transformers", "numpy")},
        },
    )


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load_average() -> float | None:
    """Runnable processes over the last minute, which shows other load. None where the system does not report it."""
    try:
        return round(os.getloadavg()[0], 2)
    except OSError:
        return None


def processor() -> str:
    """The name of the processor."""
    lines = _lines(Path("/proc/cpuinfo"))
    found = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(found, platform.processor() or "unknown")


def this_computer() -> Computer:
    """What the bits that this process computes depend on."""
    import torch  # noqa: PLC0415 - the launcher does without it

    from pipelinerl.extras import version  # noqa: PLC0415 - as above

    versions = {name: found for name in PACKAGES if (found := version(name))} | {"python": platform.python_version()}
    return Computer(processor=processor(), instructions=torch.backends.cpu.get_cpu_capability(), packages=versions)


# ---- memory and GPUs


class Memory(NamedTuple):
    """In bytes. `free` is what can be allocated now without ending other processes; the total if it is not known."""

    total: int
    free: int


def host_memory(root: Path = Path("/")) -> Memory:
    """Physical memory, within the limits of this process's control groups. `root` is the folder of /proc and /sys."""
    lines = _lines(root / "proc/meminfo")
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if rest.split()}
    if not {"MemTotal", "MemAvailable"} <= kib.keys():
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return Memory(total, total)
    total, free = kib["MemTotal"] << 10, kib["MemAvailable"] << 10
    for limit, used in _limits(root):
        total, free = min(total, limit), min(free, max(0, limit - used))
    return Memory(total, min(free, total))


def memory_of(device: str) -> Memory | None:
    """The memory of this machine for `cpu`, or of a CUDA device, given its torch name. None if the driver doesn't know it.

    This calls the driver directly: importing torch takes seconds, and both number devices in the same way. What is available
    is known to the library of nvidia-smi, which needs no context on the device.
    """
    if device == "cpu":
        return host_memory()
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
    return Memory(total.value, total.value)


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


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and use, in bytes, of each control group (v1 and v2) that limits this process, parent groups included.

    In a container the group may be mounted as the root, so both places are read. Use excludes file pages that the kernel
    can reclaim.
    """
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folder, limit, used = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            folder, limit, used = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        own = folder / path.strip("/")
        for group in [group for group in (own, *own.parents) if group.is_relative_to(folder)]:
            most = "".join(_lines(group / limit)).strip()
            if most.isdecimal():  # else `max`, which is none, as are numbers beyond the memory
                fields = dict(line.split() for line in _lines(group / "memory.stat"))
                reclaimable = int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))
                yield int(most), int("".join(_lines(group / used)) or 0) - reclaimable


def _lines(path: Path) -> list[str]:
    """The lines of one of the kernel's files; none if it can't be read."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
