"""Where an evaluation is written.

OUT/summary.json              all models, and what was asked of them
OUT/NAME/attempts.jsonl       one line an attempt, in order of completion, written as each one ends
OUT/NAME/pass_rates.jsonl     one line a problem, in order
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
        """Make it. Raises RunDirectoryError if there is something in it, unless that is an evaluation to be replaced.

        One that never got to an attempt (its model could not be loaded, say) is replaced without asking.
        """
        self.root = root
        with _explained(root):
            if root.exists() and (not root.is_dir() or any(root.iterdir())):
                _clear(root, overwrite)
            root.mkdir(parents=True, exist_ok=True)

    def write_summary(self, summary: EvaluationSummary) -> None:
        with _explained(self.root):
            write_atomically(self.root / SUMMARY, msgspec.json.format(msgspec.json.encode(summary), indent=1) + b"\n")

    def write_pass_rates(self, folder: str, rates: Sequence[PassRate]) -> None:
        with _explained(self.root):
            write_atomically(self.root / folder / PASS_RATES, b"".join(msgspec.json.encode(rate) + b"\n" for rate in rates))

    @contextmanager
    def attempts(self, folder: str) -> Iterator[AttemptsFile]:
        with _explained(self.root):
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
        with _explained(self._root):
            self._lines.write(record)


def _clear(root: Path, overwrite: bool) -> None:
    """Remove an evaluation, and nothing else that may be there."""
    if not (root / SUMMARY).is_file() or not _is_summary(root / SUMMARY):
        raise RunDirectoryError(f"{root} exists and is no evaluation; choose another --out")
    if not overwrite and any(path.stat().st_size for path in root.glob(f"*/{ATTEMPTS}")):
        raise RunDirectoryError(f"{root} holds an evaluation already; choose another --out, or replace it with --overwrite")
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
def _explained(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunDirectoryError(f"can't write to {root}: {error.strerror}; make room, or choose another --out") from error
