"""What a new user begins with: the wheel in a clean environment, containers, and the example project, which runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pipelinerl.cli import COMMANDS, main, project
from pipelinerl.config.keys import run_keys
from pipelinerl.config.load import load_config
from tests.integration.runs import assert_conserved, command, groups, summary

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


SMALL = (
    *("--trainer.steps=2", "--trainer.batch_size=16", "--trainer.threads=1", "--engine.slots=16", "--engine.threads=1"),
    *("--actor.group_size=8", "--evaluation.problems=8", "--metrics.plot=false", "--run_dir=r"),
)


def test_what_is_there_stays_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "task"
    assert main(["init", str(folder)]) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "problems.jsonl", "rewards.py", "run.yaml"]
    assert f"cd {folder} && pipelinerl train run.yaml" in capsys.readouterr().out
    (folder / "rewards.py").write_text("mine")
    (folder / "run.yaml").unlink()
    assert main(["init", str(folder)]) == 2
    assert "already has README.md, problems.jsonl, rewards.py" in capsys.readouterr().err
    assert (folder / "rewards.py").read_text() == "mine"
    assert not (folder / "run.yaml").exists()
    assert main(["init", str(folder / "rewards.py" / "below")]) == 2
    assert "can't write the project into" in capsys.readouterr().err


@pytest.mark.parametrize("template", project.TEMPLATES)
def test_every_template_has_a_run_file_that_loads(template: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(tmp_path), "--template", template]) == 0
    config = load_config(tmp_path / "run.yaml")
    assert config.evaluation.problems
    files = [word for line in capsys.readouterr().out.splitlines()[:1] for word in line.replace(",", "").split()[2:]]
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    for path in tmp_path.glob("*.py"):
        compile(path.read_text(), path, "exec")


@pytest.mark.slow
@pytest.mark.parametrize(
    "template", ["function", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("class", "tools", "agent"))]
)
def test_every_template_runs(template: str, tmp_path: Path) -> None:
    main(["init", str(tmp_path), "--template", template])
    ended = command("train", "run.yaml", *SMALL, "--actor.max_tokens=60", "--engine.max_length=128", cwd=tmp_path)
    assert ended.status == 0, ended.error
    assert_conserved(summary(tmp_path / "r"))
    if template == "function":
        rewards = {rollout.reward for group in groups(tmp_path / "r") for rollout in group.rollouts}
        assert 1.0 in rewards, "the model gets it right now and then"
