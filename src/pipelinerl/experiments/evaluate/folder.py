"""The output folder of an evaluation.

OUT/summary.json              settings, and a row per model
OUT/NAME/attempts.jsonl       one line per attempt, written when it ends, so in order of completion
OUT/NAME/pass_rates.jsonl     one line per problem, in order
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from pipelinerl.errors import RunDirectoryError
from pipelinerl.experiments.evaluate.records import AttemptRecord, EvaluationSummary, PassRate
from pipelinerl.files import JsonLines, write_atomically

SUMMARY = "summary.json"
ATTEMPTS = "attempts.jsonl"
PASS_RATES = "pass_rates.jsonl"


class EvaluationFolder:
    """The folder of one evaluation. All methods raise RunDirectoryError if it can't be written to."""

    def __init__(self, root: Path, *, overwrite: bool) -> None:
        """Create the folder, or replace the evaluation in it.

        An evaluation is replaced if `overwrite` is set, or if it has no attempts (for example because its model could not
        be loaded). Raises RunDirectoryError if the folder is not empty otherwise.
        """
        self.root = root
        with _write_errors(root):
            if root.exists() and (not root.is_dir() or any(root.iterdir())):
                _clear(root, overwrite)
            root.mkdir(parents=True, exist_ok=True)

    def write_summary(self, summary: EvaluationSummary) -> None:
        with _write_errors(self.root):
            write_atomically(self.root / SUMMARY, msgspec.json.format(msgspec.json.encode(summary), indent=1) + b"\n")

    def write_pass_rates(self, folder: str, rates: Sequence[PassRate]) -> None:
        with _write_errors(self.root):
            write_atomically(self.root / folder / PASS_RATES, b"".join(msgspec.json.encode(rate) + b"\n" for rate in rates))

    @contextmanager
    def attempts(self, folder: str) -> Iterator[AttemptsFile]:
        with _write_errors(self.root):
            (self.root / folder).mkdir(exist_ok=True)
            lines = JsonLines(self.root / folder / ATTEMPTS)
        with lines:
            yield AttemptsFile(self.root, lines)


class AttemptsFile:
    """`attempts.jsonl` of one model, while it is being written."""

    def __init__(self, root: Path, lines: JsonLines) -> None:
        self._root = root
        self._lines = lines

    def write(self, record: AttemptRecord) -> None:
        with _write_errors(self._root):
            self._lines.write(record)


def _clear(root: Path, overwrite: bool) -> None:
    """Remove an evaluation, but no other files in the folder."""
    if not (root / SUMMARY).is_file() or not _is_summary(root / SUMMARY):
        raise RunDirectoryError(f"{root} exists and is not an evaluation; choose another --out")
    if not overwrite and any(path.stat().st_size for path in root.glob(f"*/{ATTEMPTS}")):
        raise RunDirectoryError(f"{root} already holds an evaluation; choose another --out, or replace it with --overwrite")
    for path in (*root.glob(f"*/{ATTEMPTS}"), *root.glob(f"*/{PASS_RATES}"), root / SUMMARY):
        path.unlink()
    for path in root.iterdir():
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def _is_summary(path: Path) -> bool:
    try:
        msgspec.json.decode(path.read_bytes(), type=EvaluationSummary)
    except msgspec.DecodeError:
        return False
    return True


@contextmanager
def _write_errors(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunDirectoryError(f"can't write to {root}: {error.strerror}; free space, or choose another --out") from error
