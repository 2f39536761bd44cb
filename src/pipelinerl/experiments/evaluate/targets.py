"""Resolves MODEL arguments: a folder, a hub id, `demo`, a run directory, or versions of a run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pipelinerl.checkpoint import saved_versions
from pipelinerl.config import config_from_yaml
from pipelinerl.config.schema import ModelConfig, RunConfig
from pipelinerl.errors import RunDirectoryError
from pipelinerl.models.loading import resolve_path


class Target(NamedTuple):
    """A model to evaluate. `checkpoint`: its folder was written by a run and has checksums to verify.

    `name` is for human readers and `folder` is derived from it; each is unique. `version` is only known for models of a
    run.
    """

    name: str
    folder: str
    model: ModelConfig
    version: int | None = None
    checkpoint: bool = False


def find_targets(texts: Sequence[str]) -> list[Target]:
    """All models that `texts` name, in order. No model is loaded.

        RUN_DIR, RUN_DIR@all, RUN_DIR@7    its last checkpoint, all of them, version 7 (0: the model it started from)
        DIR, owner/name, demo              as in `model.path` of a run file

    Raises RunDirectoryError or ModelLoadError for any other text.
    """
    names: set[str] = set()
    found = []
    for target in (target for text in texts for target in _targets_of(text)):
        resolve_path(target.model.path)
        name, number = target.name, 1
        while name in names:
            number += 1
            name = f"{target.name}#{number}"
        names.add(name)
        found.append(target._replace(name=name, folder=re.sub(r"[^\w.@#-]", "-", name)))
    return found


def run_config_of(text: str) -> RunConfig | None:
    """The configuration of the run that `text` names; None if it is not a run. Raises ConfigError, RunDirectoryError."""
    run_dir, _ = _split(text)
    if run_dir is None:
        return None
    path = run_dir / "config.yaml"
    try:
        return config_from_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise RunDirectoryError(f"can't read {path}: {error}") from error


def _split(text: str) -> tuple[Path | None, str]:
    """The run directory (None if `text` does not name one), and the text after `@`."""
    whole = Path(text).expanduser()
    if _is_run(whole):
        return whole, ""
    front, at, wanted = text.rpartition("@")
    path = Path(front).expanduser()
    if at and not whole.exists() and path.is_dir():
        if not _is_run(path):
            raise RunDirectoryError(f"{text}: {path} is not a run directory (it has no config.yaml)")
        return path, wanted or "?"
    return None, ""


def _is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file() and not (path / "config.json").exists()


def _targets_of(text: str) -> Iterator[Target]:
    config = run_config_of(text)
    run_dir, wanted = _split(text)
    if config is None or run_dir is None:
        path = Path(text).expanduser()
        yield Target(path.resolve().name if path.is_dir() else text, "", ModelConfig(path=text))
        return
    name = run_dir.resolve().name
    saved = saved_versions(run_dir)
    if wanted == "0" and 0 not in saved:
        yield Target(f"{name}@0", "", config.model, 0)
        return
    if not saved:
        raise RunDirectoryError(f"{run_dir} has no checkpoints; {run_dir}@0 is the model that it started from")
    if wanted not in ("", "all") and not (wanted.isdecimal() and int(wanted) in saved):
        versions = ", ".join(map(str, saved))
        raise RunDirectoryError(f"{text}: give {run_dir}@all, or one of the versions that it has: 0, {versions}")
    for version in saved if wanted == "all" else [int(wanted) if wanted else max(saved)]:
        model = config.model.model_copy(update={"path": str(saved[version])})
        yield Target(f"{name}@{version}", "", model, version, checkpoint=True)
