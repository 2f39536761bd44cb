"""What a resume may change, what it says of it, and what it refuses, before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

import pipelinerl
from pipelinerl.config.load import load_config
from pipelinerl.config.schema import RunConfig
from pipelinerl.config.secrets import without_secrets
from pipelinerl.errors import RunDirectoryError, UserError
from pipelinerl.files import JsonLines
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
    record(run, config)
    (run.checkpoints / "step_00000004").mkdir()
    return run


RECORD = {"version": 0, "threads": 1, "machine": {"processor": "", "instructions": "", "packages": {}}, "rng": {}}


def record(run: RunDirectory, config: RunConfig) -> None:
    with JsonLines(run.sessions) as lines:
        lines.write(RECORD | {"config": without_secrets(config)})


@pytest.mark.parametrize("given", [["--trainer.steps", "6"], {"trainer.steps": 6}, {"trainer": {"steps": 6}}])
def test_a_resume_changes_what_is_given_by_flags_and_in_python(run: RunDirectory, given: Any) -> None:
    config = resumed_config(run.root, given)
    before = resumed_config(run.root)
    assert config == before.model_copy(update={"trainer": before.trainer.model_copy(update={"steps": 6})})
    assert changed_settings(config, run) == ["changed: trainer.steps 4 -> 6"]
    assert config.stream.url == SETTINGS["stream.url"]


def test_every_change_is_a_line(run: RunDirectory) -> None:
    run.config.write_text(run.config.read_text().replace("batch_size: 32", "batch_size: 64"))  # the user edited it
    config = resumed_config(run.root, {"trainer.learning_rate": 1e-6, "environment.args": {"x": 2}, "seed": 9})
    assert changed_settings(config, run) == [
        "changed: seed 0 -> 9",
        "changed: environment.args.x null -> 2",
        "changed: trainer.batch_size 32 -> 64",
        "changed: trainer.learning_rate 0.0003 -> 1e-06",
        "warning: problems that are held out now may have been trained on before",
    ]


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
        {"environment.kind": "reasoning_gym"},
        {"stream.kind": "files", "stream.url": None},
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


def test_only_this_user_can_read_settings_with_secrets(run: RunDirectory) -> None:
    for steps in (6, 8):
        keep_settings(resumed_config(run.root, {"trainer.steps": steps}), run)
    assert "steps: 8" in run.config.read_text()
    secret = [path for path in run.root.rglob("*") if path.is_file() and b"secret" in path.read_bytes()]
    assert secret == [run.config]
    assert {path.stat().st_mode & 0o077 for path in secret} == {0}


def test_records_of_an_earlier_version_of_the_package_lack_newer_keys(run: RunDirectory) -> None:
    config = resumed_config(run.root)
    settings = without_secrets(config)
    del settings["trainer"]["betas"]
    run.sessions.write_bytes(msgspec.json.encode(RECORD | {"config": settings}) + b"\n")
    assert changed_settings(config, run) == []
