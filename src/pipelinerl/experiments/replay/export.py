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
from collections.abc import Callable, Iterator
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
    hidden = out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")
    with writing_to(out):
        try:
            with tarfile.open(hidden, "w") as tar:
                export = _Export(RunDirectory(run_dir), tar)
                export.write(weights=weights, model=model)
            size = hidden.stat().st_size
            os.rename(hidden, out)
        finally:
            hidden.unlink(missing_ok=True)
    return Exported(export.files, size, tuple(export.notices))


class _Export:
    def __init__(self, run: RunDirectory, tar: tarfile.TarFile) -> None:
        self._run = run
        self._tar = tar
        self._name = run.root.resolve().name
        self.files = 0
        self.notices: list[str] = []

    def write(self, *, weights: bool, model: bool) -> None:
        run = self._run
        config = config_of_file(run.config)
        folder = _model_folder(config, run)
        carried = folder is not None and model
        if folder is not None and not model:
            self.notices.append(f"the model in {folder} is not in the export: a replay needs it at `model.path`")

        def portable(found: dict[str, Any]) -> dict[str, Any]:
            return _portable(found, carried=carried)

        self._add_bytes("config.yaml", yaml_text.dump(portable(without_secrets(config))).encode())
        if run.sessions.exists():
            self._add_bytes("sessions.jsonl", _portable_sessions(run.sessions, portable))
        if (summary := read_summary(run.root)) is not None:
            self._add_bytes(run.summary.name, msgspec.json.encode({key: _named(value) for key, value in summary.items()}))
        for name in (*RECORDS, *(path.name for path in sorted(run.root.glob("timeline-*.jsonl")))):
            if (run.root / name).exists():
                self._add_file(name, run.root / name)
        self._add_folder("rollouts", run.rollouts)
        if weights:
            for name in ("checkpoints", "weights"):
                self._add_folder(name, run.root / name)
        if folder is not None and carried:
            self._add_folder(MODEL, folder)

    def _add_folder(self, name: str, folder: Path) -> None:
        """Add the regular files in `folder`, without hidden ones."""
        if folder.is_symlink() and name != MODEL:
            self.notices.append(f"{folder} is a symbolic link, and is not in the export")
            return
        for place, folders, files in os.walk(folder):
            folders[:] = sorted(one for one in folders if not one.startswith("."))
            for file in sorted(one for one in (*files, *folders) if not one.startswith(".")):
                path = Path(place) / file
                if path.is_symlink() or not path.is_dir():
                    self._add_file(f"{name}/{path.relative_to(folder).as_posix()}", path)

    def _add_file(self, name: str, path: Path) -> None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            if not path.is_symlink():
                raise RunDirectoryError(f"can't read {path}: {error.strerror} (is the run in progress?)") from error
            self.notices.append(f"{path} is a symbolic link, and is not in the export")
            return
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode):
                self._add(name, status.st_size, int(status.st_mtime), file)

    def _add_bytes(self, name: str, data: bytes) -> None:
        self._add(name, len(data), int(self._run.config.stat().st_mtime), io.BytesIO(data))

    def _add(self, name: str, size: int, changed_s: int, file: Any) -> None:
        """Add `size` bytes. The entry has no owner, and its name is relative."""
        entry = tarfile.TarInfo(f"{self._name}/{name}")
        entry.size, entry.mtime, entry.mode = size, changed_s, 0o644
        self._tar.addfile(entry, file)
        self.files += 1


def _model_folder(config: RunConfig, run: RunDirectory) -> Path | None:
    """The folder of the initial model; None for one of the package, and for an id on the hub."""
    if config.model.path in PACKAGED_MODELS:
        return None
    choices = (run.root / config.model.path, Path(config.model.path).expanduser())
    return next((folder for folder in choices if folder.is_dir()), None)


def _portable_sessions(path: Path, portable: Callable[[dict[str, Any]], dict[str, Any]]) -> bytes:
    def lines() -> Iterator[bytes]:
        for record in read_lines(path, dict[str, Any]):
            yield msgspec.json.encode({**record, "config": portable(record["config"])}) + b"\n"

    return b"".join(lines())


def _portable(config: dict[str, Any], *, carried: bool) -> dict[str, Any]:
    """A configuration whose paths mean something elsewhere: the model's folder is in the export, code is only named."""
    environment = config["environment"]
    changed = {**config, "run_dir": None, "environment": {**environment, "kind": _named(environment["kind"])}}
    if carried:
        changed["model"] = {**config["model"], "path": MODEL}
    return changed


def _named(value: Any) -> Any:
    """The last part of an absolute path; any other value unchanged."""
    return Path(value).name if isinstance(value, str) and os.path.isabs(value) else value
