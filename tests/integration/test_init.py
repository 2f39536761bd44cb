"""The example project: written once, and it runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelinerl.cli import main, project
from pipelinerl.config.load import load_config

from .runs import assert_conserved, command, groups, summary

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
