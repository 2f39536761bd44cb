"""`pipelinerl lab export`: what a run recorded, in one tar file that can be replayed, browsed and evaluated anywhere.

    NAME/config.yaml, sessions.jsonl        without secrets, and with paths in the export
    NAME/summary.json                       without paths
    NAME/metrics.jsonl, rollouts/, ...      as they are
    NAME/checkpoints/, weights/             without `--no-weights`
    NAME/model/                             the initial model, if it is a folder on this machine, without `--no-model`

Everything else in a run directory stays out of it: logs, streams, and the control files, which have the session's keys.
"""

from __future__ import annotations

import io
import os
import secrets
import stat
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.config import yaml_text
from pipelinerl.config.load import config_of_file
from pipelinerl.config.schema import PACKAGED_MODELS, RunConfig
from pipelinerl.config.secrets import without_secrets
from pipelinerl.errors import RunDirectoryError, UserError
from pipelinerl.metrics.reading import read_lines
from pipelinerl.report import writing_to
from pipelinerl.report.series import read_summary
from pipelinerl.run_directory import RunDirectory

RECORDS = ("metrics.jsonl", "evaluations.jsonl", "published.jsonl", "curves.png")
MODEL = "model"


class Exported(msgspec.Struct, frozen=True):
    """What was written. `notices` say what was left out."""

    files: int
    size: int
    notices: tuple[str, ...]


def export_run(run_dir: Path, out: Path, *, weights: bool = True, model: bool = True) -> Exported:
    """Write the export to the new file `out`, under a temporary name that is then changed.

    Raises UserError if `out` exists, RunDirectoryError if a file can't be read or written.
    """
    if out.exists():
        raise UserError(f"{out} already exists; choose another file")
    run = RunDirectory(run_dir)
    config = config_of_file(run.config)
    folder = _model_folder(config, run)
    notices = []
    if folder is not None and not model:
        notices.append(f"the model in {folder} is not in the export: a replay needs it at `model.path`")
    files, name = 0, run.root.resolve().name
    hidden = out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")
    with writing_to(out):
        try:
            with tarfile.open(hidden, "w") as tar:
                for member, source in _members(run, config, weights=weights, model=folder if model else None):
                    if isinstance(source, Path) and source.is_symlink():
                        notices.append(f"{source} is a symbolic link, and is not in the export")
                    else:
                        files += _add(tar, f"{name}/{member}", source)
            size = hidden.stat().st_size
            os.rename(hidden, out)
        finally:
            hidden.unlink(missing_ok=True)
    return Exported(files, size, tuple(notices))


def _members(
    run: RunDirectory, config: RunConfig, *, weights: bool, model: Path | None
) -> Iterator[tuple[str, Path | bytes]]:
    """The files of the export, by their name there: contents that are made portable, and paths. Without hidden files."""

    def portable(found: dict[str, Any]) -> dict[str, Any]:
        """Paths that mean something elsewhere: the model's folder is in the export, code is only named."""
        environment = found["environment"] | {"kind": _named(found["environment"]["kind"])}
        carried = {"model": found["model"] | {"path": MODEL}} if model else {}
        return {**found, "run_dir": None, "environment": environment, **carried}

    yield "config.yaml", yaml_text.dump(portable(without_secrets(config))).encode()
    if run.sessions.exists():
        sessions = [{**one, "config": portable(one["config"])} for one in read_lines(run.sessions, dict[str, Any])]
        yield run.sessions.name, b"".join(msgspec.json.encode(session) + b"\n" for session in sessions)
    if (summary := read_summary(run.root)) is not None:
        yield run.summary.name, msgspec.json.encode({key: _named(value) for key, value in summary.items()})
    for path in (*(run.root / name for name in RECORDS), *sorted(run.root.glob("timeline-*.jsonl"))):
        if path.exists():
            yield path.name, path
    folders = {name: run.root / name for name in ("rollouts", *(("checkpoints", "weights") if weights else ()))}
    for name, folder in (folders | ({MODEL: model} if model else {})).items():
        if folder.is_symlink() and name != MODEL:
            yield name, folder
            continue
        for path in sorted(folder.rglob("*")):
            parts = path.relative_to(folder).parts
            if not any(part.startswith(".") for part in parts) and (path.is_symlink() or not path.is_dir()):
                yield "/".join((name, *parts)), path


def _add(tar: tarfile.TarFile, name: str, source: Path | bytes) -> bool:
    """Add an entry without an owner. Returns False for what is no regular file. Raises RunDirectoryError."""
    entry = tarfile.TarInfo(name)
    entry.mode = 0o644
    if isinstance(source, bytes):
        entry.size, entry.mtime = len(source), int(time.time())
        tar.addfile(entry, io.BytesIO(source))
        return True
    try:
        descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise RunDirectoryError(f"can't read {source}: {error.strerror} (is the run in progress?)") from error
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        entry.size, entry.mtime = status.st_size, int(status.st_mtime)
        regular = stat.S_ISREG(status.st_mode)
        if regular:
            tar.addfile(entry, file)
    return regular


def _model_folder(config: RunConfig, run: RunDirectory) -> Path | None:
    """The folder of the initial model; None for one of the package, and for an id on the hub."""
    if config.model.path in PACKAGED_MODELS:
        return None
    choices = (run.root / config.model.path, Path(config.model.path).expanduser())
    return next((folder for folder in choices if folder.is_dir()), None)


def _named(value: Any) -> Any:
    """The last part of an absolute path; any other value unchanged."""
    return Path(value).name if isinstance(value, str) and os.path.isabs(value) else value
