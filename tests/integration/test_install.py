"""The wheel in a clean environment, outside the repository: the base install is enough for the packaged models."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pipelinerl.cli import COMMANDS
from pipelinerl.config.keys import run_keys

ROOT = Path(__file__).parents[2]


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_the_wheel_runs_the_demo_in_a_clean_environment(tmp_path: Path) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-compile", "--constraint", str(ROOT / "constraints.txt")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: str) -> str:
        return subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True).stdout

    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", "wheels", str(ROOT))
    run(sys.executable, "-m", "venv", "venv")
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    run(*pip, "torch")
    run(*pip, str(wheel))
    settings = ["--trainer.steps", "2", "--trainer.batch_size", "32", "--evaluation.problems", "8"]
    run(str(python), "-m", "pipelinerl", "train", "--run_dir", "a-run", *settings)
    assert json.loads((tmp_path / "a-run" / "summary.json").read_text())["status"] == "finished"
    assert (tmp_path / "a-run" / "curves.png").is_file()
    assert run(str(tmp_path / "venv/bin/pipelinerl"), "--version").startswith("pipelinerl ")


def test_containers_name_commands_flags_and_files_that_exist() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    ours = {name: one["command"].split() for name, one in services.items() if one["image"] == "pipelinerl"}
    assert {command[0] for command in ours.values()} == {"serve", "train"} <= COMMANDS.keys()
    flags = {word[2:] for command in ours.values() for word in command if word.startswith("--") and "." in word}
    assert flags <= run_keys().keys()
    serve_help = (ROOT / "src/pipelinerl/cli/project.py").read_text()
    assert all(f'"{word}"' in serve_help for word in ours["engine-0"] if word.startswith("--") and "." not in word)
    assert (ROOT / ours["train"][1]).is_file()
    hosts = re.findall(r"//(?:[^/@]*@)?([\w-]+):", " ".join(ours["train"]))
    assert set(hosts) == services.keys() - {"train"}
    copied = re.findall(r"^COPY (.*) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert all((ROOT / name).exists() for names in copied for name in names.split())
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {name for names in copied for name in names.split()} == allowed
