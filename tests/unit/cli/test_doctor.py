"""`pipelinerl doctor`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pipelinerl.cli import main
from pipelinerl.experiments.doctor import vllm


def test_the_doctor_tries_vllms_interpreter(tmp_path: Path) -> None:
    assert vllm(tmp_path / "absent").level == "WRONG"
    assert vllm(Path(sys.executable)).level in ("WRONG", "ok")
    assert vllm(None).level == "note"


def test_the_doctor_looks_at_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) in (0, 1)
    text = capsys.readouterr().out
    for what in ("Python", "processor", "memory", "disk", "GPU", "packages", "vLLM", "extras"):
        assert what in text, what
