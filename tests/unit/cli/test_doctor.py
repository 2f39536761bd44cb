"""`pipelinerl doctor`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pipelinerl.cli import main
from pipelinerl.experiments.doctor import _gpus, vllm
from tests.pretend_cuda import pretended_cuda


def test_the_doctor_tries_vllms_interpreter(tmp_path: Path) -> None:
    assert vllm(tmp_path / "absent").level == "WRONG"
    assert vllm(Path(sys.executable)).level in ("WRONG", "ok")
    assert vllm(None).level == "note"


def test_the_doctor_names_the_command_for_a_gpu() -> None:
    with pretended_cuda():
        found = next(_gpus())
    assert (found.level, found.what, found.found) == ("ok", "GPU 0", "pretended, 78.0 of 80.0 GiB free")
    assert found.fix.endswith("pipelinerl train --model.path MODEL")


def test_the_doctor_looks_at_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) in (0, 1)
    text = capsys.readouterr().out
    for what in ("Python", "processor", "memory", "disk", "GPU", "packages", "vLLM", "extras"):
        assert what in text, what
