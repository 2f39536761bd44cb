"""What a resume may change, what it says of it, and what it refuses, before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

import pipelinerl
from pipelinerl.api import _changes, _prepare
from pipelinerl.config.load import load_config
from pipelinerl.config.schema import RunConfig, TrainerConfig
from pipelinerl.config.secrets import without_secrets
from pipelinerl.environments.tasks.gcd import Gcd
from pipelinerl.errors import RunDirectoryError, UserError
from pipelinerl.files import JsonLines, write_atomically
from pipelinerl.launch.resume import FIXED, changed_settings, resumed_config
from pipelinerl.launch.run_lock import keep_settings
from pipelinerl.run_directory import RunDirectory

SETTINGS = {
    "trainer.steps": 4,
    "trainer.learning_rate": 3e-4,
    "trainer.batch_size": 32,
    "actor.max_tokens": 48,
    "stream.kind": "redis",
    "stream.url": "redis://me:secret@10.0.0.5:6379/0",
}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run of one session with a checkpoint, as far as a resume looks at it before it loads anything."""
    run = RunDirectory(tmp_path / "r")
    run.make_folders()
    config = load_config(None, {**SETTINGS, "run_dir": str(run.root)})
    keep_settings(config, run)
    write_atomically(run.settings, config.model_dump_json().encode(), mode=0o600)
    record(run, config)
    (run.checkpoints / "step_00000004").mkdir()
    return run


RECORD = {"version": 0, "threads": 1, "machine": {"processor": "", "instructions": "", "packages": {}}, "rng": {}}


def record(run: RunDirectory, config: RunConfig) -> None:
    with JsonLines(run.sessions) as lines:
        lines.write(RECORD | {"config": without_secrets(config)})


@pytest.mark.parametrize(
    "given",
    [
        ["--trainer.steps", "6"],
        {"trainer.steps": 6},
        {"trainer": {"steps": 6}},
        RunConfig(trainer=TrainerConfig(steps=6)),
    ],
)
def test_a_resume_from_python_changes_what_is_given_as_on_the_command_line(run: RunDirectory, given: Any) -> None:
    config = resumed_config(run.root, given if isinstance(given, list) else _changes(given, run.root))
    before = resumed_config(run.root)
    assert config == before.model_copy(update={"trainer": before.trainer.model_copy(update={"steps": 6})})
    assert changed_settings(config, run) == ["changed: trainer.steps 4 -> 6"]
    assert config.stream.url == SETTINGS["stream.url"]


def test_every_change_is_a_line(run: RunDirectory) -> None:
    config = resumed_config(run.root, {"trainer.learning_rate": 1e-6, "environment.args": {"x": 2}, "seed": 9})
    assert changed_settings(config, run) == [
        "changed: seed 0 -> 9",
        "changed: environment.args.x null -> 2",
        "changed: trainer.learning_rate 0.0003 -> 1e-06",
    ]
    assert changed_settings(resumed_config(run.root), run) == []


def test_a_run_file_is_refused_as_on_the_command_line(run: RunDirectory) -> None:
    with pytest.raises(UserError, match=r"takes the configuration from .*config\.yaml; leave out other\.yaml"):
        pipelinerl.train("other.yaml", resume=run.root)


@pytest.mark.parametrize(
    "change",
    [
        {"run_dir": "elsewhere"},
        {"model.path": "demo-tools"},
        {"model.dtype": "bfloat16"},
        {"model.lora": {"rank": 4}},
        {"environment.kind": "calculator"},
        {"stream.kind": "files", "stream.url": None},
        {"launch.preprocessor": "process"},
    ],
    ids=str,
)
def test_what_the_checkpoint_depends_on_can_not_be_changed(run: RunDirectory, change: dict[str, Any]) -> None:
    (key,) = change.keys() & FIXED.keys()
    config = resumed_config(run.root, change)
    with pytest.raises(RunDirectoryError, match=rf"was run with {key} .*{FIXED[key]}: set it to that again$"):
        changed_settings(config, run)
    (run.checkpoints / "step_00000004").rmdir()  # then the run starts again from the beginning
    changed_settings(config, run)


def test_a_model_folder_may_have_moved(run: RunDirectory, tmp_path: Path) -> None:
    config = resumed_config(run.root)
    recorded = config.model_copy(update={"model": config.model.model_copy(update={"path": str(tmp_path / "gone")})})
    record(run, recorded)
    line = f"changed: model.path {str(tmp_path / 'gone')!r}"
    assert changed_settings(config, run)[0].startswith(line[:40])


def cut(text: str) -> str:
    return text[: text.index("trainer:")]


@pytest.mark.parametrize(
    ("damage", "lines"),
    [
        (lambda _: "", ["trainer.batch_size 32 -> 64", "actor.max_tokens 48 -> 256"]),
        (cut, ["trainer.batch_size 32 -> 64", "trainer.learning_rate 0.0003 -> 1e-06"]),
        (lambda text: text.replace("batch_size: 32", "batch_size: 64"), ["trainer.batch_size 32 -> 64"]),
    ],
    ids=["empty", "cut", "edited"],
)
def test_a_config_that_is_not_as_the_run_left_it_is_refused(run: RunDirectory, damage: Any, lines: list[str]) -> None:
    text = run.config.read_text()
    run.config.write_text(damage(text))
    with pytest.raises(RunDirectoryError) as raised:
        resumed_config(run.root, {"trainer.steps": 6})
    found = [line.strip() for line in str(raised.value).splitlines()]
    assert set(lines) <= set(found)
    command = found[-1].partition("for example with ")[2].split()
    assert command == ["cp", str(run.settings), str(run.config)]
    run.config.write_bytes(run.settings.read_bytes())
    assert resumed_config(run.root).trainer.batch_size == 32


def test_an_edit_is_accepted_if_it_is_also_in_the_command(run: RunDirectory) -> None:
    run.config.write_text(run.config.read_text().replace("batch_size: 32", "batch_size: 64"))
    config = resumed_config(run.root, ["--trainer.batch_size", "64"])
    assert changed_settings(config, run) == ["changed: trainer.batch_size 32 -> 64"]
    assert resumed_config(run.root, {"trainer": {"batch_size": 32}}).trainer.batch_size == 32


def test_settings_of_a_resume_that_ended_before_its_first_step_are_no_edit(run: RunDirectory) -> None:
    """It had loaded, so they are in config.yaml; its trainer had not recorded it yet."""
    config = resumed_config(run.root, {"trainer.steps": 9})
    write_atomically(run.settings, config.model_dump_json().encode(), mode=0o600)
    keep_settings(config, run)
    assert resumed_config(run.root).trainer.steps == 9
    assert changed_settings(resumed_config(run.root), run) == ["changed: trainer.steps 4 -> 9"]


def test_only_this_user_can_read_settings_with_secrets(run: RunDirectory) -> None:
    for steps in (6, 8):
        keep_settings(resumed_config(run.root, {"trainer.steps": steps}), run)
    assert "steps: 8" in run.config.read_text()
    secret = [path for path in run.root.rglob("*") if path.is_file() and b"secret" in path.read_bytes()]
    assert len(secret) == 2
    assert {path.stat().st_mode & 0o077 for path in secret} == {0}


def test_records_of_an_earlier_version_of_the_package_lack_newer_keys(run: RunDirectory) -> None:
    config = resumed_config(run.root)
    settings = without_secrets(config)
    del settings["trainer"]["betas"]
    run.sessions.write_bytes(msgspec.json.encode(RECORD | {"config": settings}) + b"\n")
    assert changed_settings(config, run) == []


def scored(completion: str, example: dict[str, Any]) -> float:
    return float(len(completion) + len(example))


class Sums(Gcd):
    pass


@pytest.mark.parametrize(
    ("given", "name"),
    [({"reward": scored, "data": [{"prompt": "1+1="}]}, "function"), ({"environment": Sums}, "Sums"), ({}, "gcd")],
)
def test_a_run_from_python_is_named_after_its_environment(
    given: dict[str, Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = {"model": None, "environment": None, "reward": None, "data": None} | given
    _, inputs = _prepare(None, *arguments.values())
    assert inputs.parent.name.endswith(f"-{name}-pipeline")
