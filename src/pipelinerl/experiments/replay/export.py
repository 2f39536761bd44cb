"""`pipelinerl lab export`: what a run recorded, in one tar file that can be replayed, browsed and evaluated anywhere.

    NAME/config.yaml, sessions.jsonl        without secrets and paths
    NAME/summary.json                       without paths
    NAME/metrics.jsonl, rollouts/, ...      as they are
    NAME/checkpoints/, weights/             without `--no-weights`
    NAME/model/                             the initial model, if it is a folder on this machine

Everything else stays out of it: logs, streams, links, and the control files, which have the session's keys.
"""

from __future__ import annotations

import io
import os
import secrets
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.config import yaml_text
from pipelinerl.config.load import config_of_file
from pipelinerl.config.schema import PACKAGED_MODELS, RunConfig
from pipelinerl.config.secrets import without_paths, without_secrets
from pipelinerl.errors import RunDirectoryError, UserError
from pipelinerl.metrics.reading import read_lines
from pipelinerl.report import writing_to
from pipelinerl.report.series import read_summary
from pipelinerl.run_directory import RunDirectory

RECORDS = ("metrics.jsonl", "evaluations.jsonl", "published.jsonl", "curves.png", "timeline-*.jsonl")
MODEL = "model"


def export_run(run_dir: Path, out: Path, *, weights: bool = True) -> list[Path]:
    """Write the export to the new file `out`, under a temporary name that is then changed. Returns links that are left out.

    Raises UserError if `out` exists, RunDirectoryError if a file can't be read or written.
    """
    if out.exists():
        raise UserError(f"{out} already exists; choose another file")
    run = RunDirectory(run_dir)
    config = config_of_file(run.config)
    name, links = run.root.resolve().name, []
    hidden = out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")
    with writing_to(out):
        try:
            with tarfile.open(hidden, "w") as tar:
                for member, source in _members(run, config, weights=weights):
                    if isinstance(source, Path) and source.is_symlink():
                        links.append(source)
                    else:
                        _add(tar, f"{name}/{member}", source)
            os.rename(hidden, out)
        finally:
            hidden.unlink(missing_ok=True)
    return links


def _add(tar: tarfile.TarFile, name: str, source: Path | bytes) -> None:
    """Add a file without an owner. Raises RunDirectoryError if it can't be read."""
    entry = tarfile.TarInfo(name)
    entry.mode = 0o644
    try:
        file = io.BytesIO(source) if isinstance(source, bytes) else source.open("rb")
    except OSError as error:
        raise RunDirectoryError(f"can't read {source!r}: {error.strerror} (is the run in progress?)") from error
    with file:
        entry.size = file.seek(0, os.SEEK_END)
        file.seek(0)
        tar.addfile(entry, file)


def _members(run: RunDirectory, config: RunConfig, *, weights: bool) -> Iterator[tuple[str, Path | bytes]]:
    """The files of the export, by their name there: contents that are made portable, and paths."""
    candidates = (run.root / config.model.path, Path(config.model.path).expanduser())
    packaged = config.model.path in PACKAGED_MODELS
    model = None if packaged else next((folder for folder in candidates if folder.is_dir()), None)

    def portable(found: dict[str, Any]) -> dict[str, Any]:
        shown: dict[str, Any] = without_paths(found) | {"run_dir": None}
        return shown | ({"model": shown["model"] | {"path": MODEL}} if model else {})

    yield "config.yaml", yaml_text.dump(portable(without_secrets(config))).encode()
    if run.sessions.exists():
        sessions = [{**one, "config": portable(one["config"])} for one in read_lines(run.sessions, dict[str, Any])]
        yield run.sessions.name, b"".join(msgspec.json.encode(session) + b"\n" for session in sessions)
    if (summary := read_summary(run.root)) is not None:
        yield run.summary.name, msgspec.json.encode(without_paths(summary))
    for pattern in RECORDS:
        yield from ((path.name, path) for path in sorted(run.root.glob(pattern)))
    folders = {name: run.root / name for name in ("rollouts", *(("checkpoints", "weights") if weights else ()))}
    for name, folder in (folders | ({MODEL: model} if model else {})).items():
        if folder.is_symlink() and name != MODEL:
            yield name, folder
            continue
        for path in sorted(folder.rglob("*")):
            parts = path.relative_to(folder).parts
            if (path.is_file() or path.is_symlink()) and not any(part.startswith(".") for part in parts):
                yield "/".join((name, *parts)), path
