"""What a study leaves behind: its numbers and its picture."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from pipelinerl.errors import RunDirectoryError
from pipelinerl.files import write_atomically
from pipelinerl.study.figure import draw_study
from pipelinerl.study.result import StudyRecord


def write_study(study: StudyRecord, out: Path) -> tuple[Path, Path]:
    """Write `kv-cache.json` and `kv-cache.png` into the folder `out`; the paths. Raises RunDirectoryError."""
    numbers, picture = out / "kv-cache.json", out / "kv-cache.png"
    with _explained(out):
        write_atomically(numbers, msgspec.json.encode(study) + b"\n")
        write_atomically(picture, draw_study(study))
    return numbers, picture


def make_folder(out: Path) -> None:
    """Make `out` if need be, and see that it can be written to. Raises RunDirectoryError, before there is much to lose."""
    with _explained(out):
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@contextmanager
def _explained(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunDirectoryError(f"can't write to {out}: {error.strerror}; choose another --out") from error
