"""Environment variables in run files, and secrets, which no record of a session has."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelinerl.config.load import config_from_yaml, config_to_yaml, load_config
from pipelinerl.config.schema import RunConfig
from pipelinerl.config.secrets import REMOVED, without_secrets
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


def test_passwords_and_keys_are_removed_and_nothing_else() -> None:
    args = {
        "api_key": "a",
        "judge": {"token": "b", "OPENAI_API_KEY": "c", "max_tokens": 12, "stop": ["https://me:d@host/x", "plain @ text"]},
        "key": 7,
        "accessToken": 123,
        "apiKeys": ["a", "b"],
        "login": {"passwords": ["x"], "secret": None},
        "page": "https://host/x?api_key=abc&n=3",
        "monkey": "banana",
    }
    config = load_config(
        None,
        {
            "stream.kind": "redis",
            "stream.url": "rediss://user:pass@10.0.0.5:6379/0",
            "environment.args": args,
            "engine.kind": "http",
            "engine.urls": ["http://admin:pw@host:8000"],
            "engine.api_key_env": "MY_KEY",
            "correction.token": "tv",
        },
    )
    found = without_secrets(config)
    assert found["environment"]["args"] == {
        "api_key": REMOVED,
        "judge": {"token": REMOVED, "OPENAI_API_KEY": REMOVED, "max_tokens": 12, "stop": ["https://host/x", "plain @ text"]},
        "key": REMOVED,
        "accessToken": REMOVED,
        "apiKeys": REMOVED,
        "login": {"passwords": REMOVED, "secret": None},
        "page": f"https://host/x?api_key={REMOVED}&n=3",
        "monkey": "banana",
    }
    assert found["correction"] == config.correction.model_dump()
    assert found["stream"]["url"] == "rediss://10.0.0.5:6379/0"
    assert found["engine"]["urls"] == ["http://host:8000"]
    assert found["engine"]["api_key_env"] == "MY_KEY", "the name of a variable is no secret"
    assert RunConfig.model_validate(found).trainer == config.trainer
