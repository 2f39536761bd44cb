"""Writes result files. Separate from the drawing, so that a command without figures does not import matplotlib."""

from __future__ import annotations

from pathlib import Path

from pipelinerl.errors import RunDirectoryError
from pipelinerl.files import write_atomically


def write_file(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically. Raises RunDirectoryError if `path` can't be written."""
    try:
        write_atomically(path, data)
    except OSError as error:
        raise RunDirectoryError(f"can't write {path}: {error.strerror}") from error
