"""`pipelinerl doctor` and `pipelinerl completion`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipelinerl.cli import main
from pipelinerl.experiments.doctor import _gpus, vllm
from tests.pretend_cuda import pretended_cuda

pytest.importorskip("shtab")
COMPLETE = """
source {script}
COMP_WORDS=({words}); COMP_CWORD={place}; COMP_LINE="{words}"; COMP_POINT=${{#COMP_LINE}}
function=$(complete -p pipelinerl | sed "s/.*-F \\([^ ]*\\).*/\\1/")
$function pipelinerl "${{COMP_WORDS[{place}]}}" "${{COMP_WORDS[{before}]}}" 2>/dev/null
printf "%s\n" "${{COMPREPLY[@]}}"
"""


def completions(script: Path, *words: str) -> list[str]:
    """What bash offers for the last word."""
    place = len(words)
    code = COMPLETE.format(script=script, words=" ".join(["pipelinerl", *words]), place=place, before=place - 1)
    done = subprocess.run(["/bin/bash", "-c", code], capture_output=True, text=True, check=True, cwd=script.parent)
    return done.stdout.split()


def test_bash_completes_commands_flags_keys_choices_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "completion.sh"
    script.write_text(capsys.readouterr().out)
    (tmp_path / "run.yaml").touch()
    assert completions(script, "tra") == ["train"]
    assert completions(script, "train", "--res") == ["--resume"]
    assert completions(script, "train", "--trainer.learn") == ["--trainer.learning_rate"]
    assert completions(script, "train", "--schedule.kind", "con") == ["conventional"]
    assert completions(script, "train", "run") == ["run.yaml"]
    assert completions(script, "sweep", "--trainer.learn") == ["--trainer.learning_rate"]
    assert completions(script, "eval", "--trainer.learn") == []
    assert completions(script, "eval", "--evaluation.temp") == ["--evaluation.temperature"]


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "cmd"]) == 2
    assert "invalid choice: 'cmd'" in capsys.readouterr().err


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
