"""`pipelinerl doctor`: what this machine and installation have, what is wrong, and how to fix it. Changes nothing."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from pipelinerl import extras
from pipelinerl.files import SHARED_MEMORY
from pipelinerl.report import count
from pipelinerl.resources.machine import host_memory, load_average, processor, usable_cores

Level = Literal["ok", "note", "WRONG"]
WRONG: Level = "WRONG"
LEAST_MEMORY_GIB = 4.0
"""The demo's processes use some 3 GiB."""
LEAST_DISK_GIB = 5.0
LEAST_FILES = 256
TIMEOUT_S = 60.0
GIB = 1 << 30


class Finding(NamedTuple):
    """One thing that was looked at. `fix`: what to do, or what it is needed for."""

    level: Level
    what: str
    found: str
    fix: str = ""


def examine(vllm_python: Path | None = None) -> list[Finding]:
    return [*_machine(), *_gpus(), *packages(), vllm(vllm_python)]


def shown(findings: Sequence[Finding]) -> str:
    """A line for each finding, with what to do below it, and a line that counts what is wrong."""
    lines = []
    for one in findings:
        lines += [f"{one.level:<5}  {one.what}: {one.found}", *([f"       {one.fix}"] if one.fix else [])]
    wrong = [one.what for one in findings if one.level == WRONG]
    last = f"{count(len(wrong), 'thing')} wrong: {', '.join(wrong)}" if wrong else "nothing is wrong; notes are choices"
    return "\n".join([*lines, last, ""])


def _judged(what: str, found: str, fine: bool, fix: str, otherwise: Level = WRONG) -> Finding:
    return Finding("ok", what, found) if fine else Finding(otherwise, what, found, fix)


def _machine() -> Iterator[Finding]:
    yield Finding("ok", "Python", f"{platform.python_version()}, {sys.executable}")
    cores, load = usable_cores(), load_average()
    loaded = "" if load is None else f", load {load}"
    fix = "other programs compute: times will be longer"
    yield _judged("processor", f"{count(cores, 'core')}, {processor()}{loaded}", (load or 0.0) <= cores, fix, "note")
    memory = host_memory()
    free = memory.free / GIB
    fix = f"free {LEAST_MEMORY_GIB:g} GiB for the demo"
    yield _judged("memory", f"{free:.1f} of {memory.total / GIB:.1f} GiB free", free >= LEAST_MEMORY_GIB, fix)
    fix = "make room: checkpoints and records go below this folder, or to --run_dir"
    yield _room("disk", Path.cwd(), LEAST_DISK_GIB, fix)
    if SHARED_MEMORY.is_dir():
        fix = "weights go through it: in a container, start it with --shm-size 2g"
        yield _room("shared memory", SHARED_MEMORY, 1.0, fix)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    yield _judged("open files", f"at most {files}", files < 0 or files >= LEAST_FILES, "raise it: ulimit -n 4096")


def _room(what: str, folder: Path, least_gib: float, fix: str) -> Finding:
    left, writable = shutil.disk_usage(folder).free / GIB, os.access(folder, os.W_OK)
    found = f"{left:.1f} GiB free at {folder}" + ("" if writable else ", not writable")
    return _judged(what, found, writable and left >= least_gib, fix, "note" if writable else WRONG)


def _gpus() -> Iterator[Finding]:
    import torch  # noqa: PLC0415 - takes a second

    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            of = torch.cuda.get_device_properties(number)
            free = torch.cuda.mem_get_info(number)[0] / GIB
            found = f"{of.name}, {free:.1f} of {of.total_memory / GIB:.1f} GiB free"
            yield Finding("ok", f"GPU {number}", found, "a run of your model uses it: pipelinerl train --model.path MODEL")
        yield from _gpu_checks()
    elif (listed := _output(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"])) is not None:
        built = f"torch {torch.__version__} is built for " + (f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs")
        fix = "install a torch for this driver: https://pytorch.org/get-started/locally"
        yield Finding(WRONG, "GPU", f"{listed.splitlines()[0]} can't be used: {built}", fix)
    else:
        yield Finding("note", "GPU", "none", "runs use the CPU")


def _gpu_checks() -> Iterator[Finding]:
    """What a program finds that may fail or hang, and whether MPS runs."""
    command, lines = [sys.executable, "-m", "pipelinerl.experiments.gpu_checks"], b""
    try:
        lines, end = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=True).stdout, ""  # noqa: S603
    except subprocess.SubprocessError as error:
        lines, end = getattr(error, "stdout", None) or b"", str(error).partition("' ")[2]
    yield from (Finding(*json.loads(line)) for line in lines.splitlines() if line.startswith(b'["'))  # not what nccl prints
    if end:
        yield Finding(WRONG, "GPU checks", f"the program {end}", f"see its errors: {' '.join(command)}")
    runs = _output(["nvidia-cuda-mps-control"], "get_default_active_thread_percentage\n") is not None
    fix = "a trainer and an engine that share a GPU are faster with it: nvidia-cuda-mps-control -d"
    yield _judged("MPS", "running" if runs else "not running", runs, fix, "note")


def packages() -> Iterator[Finding]:
    """This package, what it needs, and its extras: one finding for each that is wrong, one for all that are missing."""
    yield Finding("ok", "pipelinerl", f"{extras.version('pipelinerl')}, {Path(__file__).parents[1]}")
    wrong = extras.lacking()
    yield from (Finding(WRONG, one.name, why, extras.install_command([one])) for one, why in wrong.items())
    if not wrong:
        main = ", ".join(f"{name} {extras.version(name)}" for name in ("torch", "transformers", "numpy"))
        yield Finding("ok", "packages", main)
    found: dict[str, list[str]] = {"ok": [], "note": []}
    for extra in extras.names():
        lacking = extras.lacking(extra)
        if old := [one for one in lacking if extras.version(one.name)]:
            why = ", ".join(lacking[one] for one in old)
            yield Finding(WRONG, f"extra {extra}", why, f"if you need it: {extras.install_command(old)}")
        else:
            found["note" if lacking else "ok"].append(extra)
    yield Finding("ok", "extras", ", ".join(found["ok"]) or "none")
    if absent := ", ".join(found["note"]):
        yield Finding("note", "other extras", f"not installed: {absent}", "what needs one says how to install it")


def vllm(python: Path | None) -> Finding:
    """vLLM in the environment of `python`, or in this one."""
    if python is None:
        here = importlib.util.find_spec("vllm") is not None
        found = f"{extras.version('vllm')} in this environment" if here else "not in this environment"
        return Finding("note", "vLLM", found, "only for engine.kind vllm; its environment: doctor --vllm-python PYTHON")
    if shutil.which(python) is None:
        return Finding(WRONG, "vLLM", f"{python} is no program", "name the Python of an environment with vLLM")
    version = _output([str(python), "-c", "import vllm; print(vllm.__version__)"])
    if version is None:
        return Finding(WRONG, "vLLM", f"{python} can't import vllm", "see docs/vllm.md; engine.python names its interpreter")
    return Finding("ok", "vLLM", f"{version.split()[-1]} in {python}", f"--engine.kind vllm --engine.python {python}")


def _output(command: Sequence[str], given: str = "") -> str | None:
    """What a program prints; None if there is no such program, or it fails. `given`: its standard input."""
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
