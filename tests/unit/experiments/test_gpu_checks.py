"""What `pipelinerl doctor` tries on a GPU, on a device that is pretended: all of it passes, and faults are seen."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipelinerl.cli import main
from pipelinerl.engine import static
from pipelinerl.experiments import doctor, gpu_checks
from pipelinerl.models import varlen
from tests.pretend_cuda import pretended_cuda

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def _a_torch_for_cuda(monkeypatch: Patch) -> None:
    monkeypatch.setattr("pipelinerl.models.device.require_device", lambda _: None)


def run(capsys: pytest.CaptureFixture[str], plant: Callable[[Patch], None] | None = None) -> list[list[Any]]:
    with pretended_cuda(), pytest.MonkeyPatch.context() as patch:
        if plant is not None:
            plant(patch)
        gpu_checks.main()
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.slow
def test_all_checks_pass(capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys)
    assert [what for level, what, _ in found if level == "ok"] == list(gpu_checks.CHECKS), found
    assert found[-1][2] == "off by 0"


def imprecise_attention(patch: Patch) -> None:
    own = varlen.flash_attention
    patch.setattr(varlen, "flash_attention", lambda *given, **options: own(*given, **options) * 1.1)


def unrecordable_step(patch: Patch) -> None:
    own = static.DeviceRows.step

    def step(rows: static.DeviceRows, count: int, plain: bool) -> None:
        rows.integers.sum().item()
        own(rows, count, plain)

    patch.setattr(static.DeviceRows, "step", step)


def early_copies(patch: Patch) -> None:
    def early(tensor: Tensor) -> Callable[[], Any]:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True).numpy

    patch.setattr(gpu_checks, "to_host", early)


def wrong_sum(patch: Patch) -> None:
    patch.setattr(torch.cuda.nccl, "all_reduce", lambda tensors: tensors[0].mul_(2))


@pytest.mark.parametrize(
    ("fault", "what", "message"),
    [
        (imprecise_attention, "attention", "off by 0."),
        (unrecordable_step, "CUDA graph", "UnsupportedModelError: its decode step can't be recorded as a CUDA graph"),
        (early_copies, "pinned memory", "off by 1"),
        (wrong_sum, "nccl", "off by 1"),
    ],
)
def test_a_fault_is_seen_and_ends_the_checks(
    fault: Callable[[Patch], None], what: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: Patch
) -> None:
    monkeypatch.setattr(gpu_checks, "CHECKS", {what: gpu_checks.CHECKS[what]})
    ((level, name, found, fix),) = run(capsys, fault)
    assert (level, name) == ("WRONG", what)
    assert found.startswith(message)
    assert fix


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("""print('NCCL INFO'); print('["ok", "nccl", "off by 0"]')""", [("ok", "nccl", "off by 0")]),
        (
            """import os; print('["WRONG", "nccl", "no", "do"]', flush=True); os.abort()""",
            [("WRONG", "nccl", "no"), ("WRONG", "GPU checks", "the program died with <Signals.SIGABRT: 6>.")],
        ),
        ("import time; time.sleep(60)", [("WRONG", "GPU checks", "the program timed out after 0.3 seconds")]),
    ],
)
def test_the_doctor_reports_the_checks_and_how_their_program_ended(
    program: str, expected: list[tuple[str, str, str]], monkeypatch: Patch
) -> None:
    own = subprocess.run

    def other(command: list[str], **options: Any) -> Any:
        return own([sys.executable, "-c", program] if "-m" in command else command, **options)

    monkeypatch.setattr(doctor, "TIMEOUT_S", 0.3 if "sleep" in program else 60.0)
    monkeypatch.setattr(subprocess, "run", other)
    *found, mps = doctor._gpu_checks()
    assert [(one.level, one.what, one.found) for one in found] == expected
    assert (mps.level, mps.found, mps.fix.endswith("nvidia-cuda-mps-control -d")) == ("note", "not running", True)


def test_the_doctor_tries_vllms_interpreter_and_looks_at_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor.vllm(tmp_path / "absent").level == "WRONG"
    assert doctor.vllm(Path(sys.executable)).level in ("WRONG", "ok")
    assert main(["doctor"]) in (0, 1)
    text = capsys.readouterr().out
    assert all(what in text for what in ("Python", "processor", "memory", "disk", "GPU", "packages", "vLLM", "extras"))


def test_only_a_gpu_is_tried() -> None:
    assert [one.what for one in doctor._gpus()] == ["GPU"]
    with pretended_cuda():
        found = next(doctor._gpus())
    assert (found.level, found.what, found.found) == ("ok", "GPU 0", "pretended, 78.0 of 80.0 GiB free")
    assert found.fix.endswith("pipelinerl train --model.path MODEL")
