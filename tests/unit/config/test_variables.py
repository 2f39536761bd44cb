"""Environment variables in run files."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelinerl.config.load import config_from_yaml, config_to_yaml, load_config
from pipelinerl.errors import ConfigError

TEXT = """
run_dir: runs/${JOB}
trainer: {steps: "${STEPS}", betas: ["${BETA}", 0.99]}
environment:
  kind: gcd
  args: {level: "${STEPS}", prompt: "$${JOB} ${JOB} ${not a name} $5"}
"""


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JOB", "77")
    monkeypatch.setenv("STEPS", "12")
    monkeypatch.setenv("BETA", "0.5")
    (tmp_path / "run.yaml").write_text(TEXT)
    return tmp_path / "run.yaml"


def test_a_reference_stands_for_the_value_with_the_type_of_its_text(run_file: Path) -> None:
    config = load_config(run_file)
    assert (config.run_dir, config.trainer.steps, config.trainer.betas) == ("runs/77", 12, (0.5, 0.99))
    assert config.environment.args == {"level": 12, "prompt": "${JOB} 77 ${not a name} $5"}
    run_file.write_text("run_dir: ${JOB}")
    assert load_config(run_file).run_dir == "77"


def test_a_variable_that_is_not_set_is_one_line(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BETA")
    with pytest.raises(ConfigError) as refused:
        load_config(run_file)
    assert str(refused.value).startswith(f"{run_file}:3: trainer.betas")
    assert "the environment variable BETA is not set" in str(refused.value)
    assert "\n" not in str(refused.value)
    monkeypatch.setenv("BETA", "many")
    with pytest.raises(ConfigError, match=r"run.yaml:3: trainer.betas: .*many.* is not allowed here"):
        load_config(run_file)


def test_a_default_stands_for_a_variable_that_is_not_set_or_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_file = tmp_path / "run.yaml"
    run_file.write_text("run_dir: runs/${JOB:-mine}\ntrainer: {steps: '${STEPS:-7}'}\nmodel: {path: '$${A:-b}'}")
    monkeypatch.delenv("JOB", raising=False)
    monkeypatch.setenv("STEPS", "")
    config = load_config(run_file)
    assert (config.run_dir, config.trainer.steps, config.model.path) == ("runs/mine", 7, "${A:-b}")
    assert config_from_yaml(config_to_yaml(config)) == config
    monkeypatch.setenv("JOB", "9")
    monkeypatch.setenv("STEPS", "8")
    config = load_config(run_file)
    assert (config.run_dir, config.trainer.steps) == ("runs/9", 8)
