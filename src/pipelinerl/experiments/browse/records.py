"""Reads the recorded rollouts and training steps of a run, line by line."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from pipelinerl.errors import INVALID_DATA, RunDirectoryError
from pipelinerl.metrics.reading import without_repeated
from pipelinerl.run_directory import RunDirectory
from pipelinerl.status.screen import printable
from pipelinerl.types import Group, Skip

T = TypeVar("T")

_BUFFER_BYTES = 1 << 20
_NAME = re.compile(r"g?(\d{1,18})(?:\.a\d+)?")
_INDEX = re.compile(rb'\{"index": ?(\d{1,18}),')


def one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def skip_text(skip: Skip) -> str:
    """Why `actor.online_filter` skipped a problem."""
    times = f"{skip.equal_groups} groups in a row" if skip.equal_groups > 1 else "its latest group"
    return f"skipped: equal rewards in {times}, up to group {skip.last_group}; mean reward {skip.reward_mean:.3g}"


class IndexedLines:
    """The complete lines of the large file `path`. Their contents are read on demand.

    A last line without a newline is ignored: it is still being written, or partial. The file need not exist yet. Methods
    raise RunDirectoryError if it can't be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ends = array("Q")
        if path.exists():
            with _reading(path, _BUFFER_BYTES) as file:
                self._ends.extend(accumulate(len(line) for line in file if line.endswith(b"\n")))

    def __len__(self) -> int:
        return len(self._ends)

    def read(self, i: int, most: int | None = None) -> bytes:
        """Line `i` (from 0) with its newline, or its first `most` bytes."""
        start = self._ends[i - 1] if i else 0
        size = self._ends[i] - start
        with _reading(self.path, 0) as file:
            file.seek(start)
            return file.read(size if most is None else min(most, size))

    def decoded(self, i: int, decoder: msgspec.json.Decoder[T]) -> T:
        """Line `i` (from 0) as a record. Raises RunDirectoryError if it is damaged."""
        try:
            return decoder.decode(self.read(i))
        except INVALID_DATA as error:
            raise RunDirectoryError(f"{self.path}, line {i + 1} is damaged: {one_line(str(error))}") from error


def group_indices(lines: IndexedLines) -> list[int | None]:
    """The group index of each line of `rollouts.jsonl`; None for a damaged line."""
    found = [_INDEX.match(lines.read(i, 32)) for i in range(len(lines))]
    return [int(match[1]) if match else None for match in found]


@contextmanager
def _reading(path: Path, buffer_bytes: int) -> Iterator[BinaryIO]:
    try:
        with open(path, "rb", buffer_bytes) as file:
            yield file
    except OSError as error:
        raise RunDirectoryError(f"can't read {path}: {error.strerror}") from error


Fate = Mapping[str, Any]
"""The fields of a `RolloutRow` that say what the trainer did with a rollout."""


class RunRollouts:
    """The groups of `rollouts.jsonl`, by place in the file (from 0), and their training records, as they are now.

    Raises RunDirectoryError if the folder has no rollouts or a file can't be read.
    """

    def __init__(self, run_dir: Path) -> None:
        run = RunDirectory(run_dir)
        if not run.rollouts.is_dir():
            raise RunDirectoryError(f"{run_dir} is not a run directory (there is no {run.rollouts})")
        self.path = run.recorded
        self._lines = IndexedLines(run.recorded)
        self.damage: list[str] = []
        """Descriptions of damaged lines other than groups."""
        self._fates = self._read_fates(IndexedLines(run.trained))
        self._indices = group_indices(self._lines)
        self._place = {index: place for place, index in enumerate(self._indices)}
        self._decoder = msgspec.json.Decoder(Group)

    def __len__(self) -> int:
        return len(self._lines)

    def group(self, place: int) -> Group:
        """The group at a place. Raises RunDirectoryError if its line is damaged."""
        return self._lines.decoded(place, self._decoder)

    def find(self, name: str) -> int | None:
        """The place of a group (`12`) or of a rollout's group (`g12.a3`), the last one if there are several; else None."""
        match = _NAME.fullmatch(name)
        return self._place.get(int(match[1])) if match else None

    def is_replaced(self, place: int) -> bool:
        """Whether a resumed run started this group again, so that a later line replaces it."""
        index = self._indices[place]
        return index is not None and self._place[index] != place

    def fate(self, place: int, rollout_id: str) -> Fate:
        """What the trainer did with a rollout; empty: nothing (yet) that is recorded."""
        return {} if self.is_replaced(place) else self._fates.get(rollout_id, {})

    def _read_fates(self, lines: IndexedLines) -> dict[str, Fate]:
        """By rollout id. A resumed run repeats steps; the later lines count."""
        decoder = msgspec.json.Decoder(_TrainedStep)
        steps = []
        for i in range(len(lines)):
            try:
                steps.append(lines.decoded(i, decoder))
            except RunDirectoryError as error:
                self.damage.append(str(error))
        fates: dict[str, Fate] = {}
        for step in without_repeated(steps, lambda old, new: old.version >= new.version):
            for reason, ids in step.dropped_ids.items():
                fates |= {one: {"left_out": reason} for one in ids}
            for one in step.samples:
                lags = {"lag_min": one.lag_min, "lag_max": one.lag_max}
                fates[one.id] = {"step": step.version, "advantage": one.advantage, **lags}
        return fates


class _TrainedSample(msgspec.Struct, frozen=True):
    id: str
    lag_min: int
    lag_max: int
    advantage: float = 0.0


class _TrainedStep(msgspec.Struct, frozen=True):
    version: int
    samples: tuple[_TrainedSample, ...]
    dropped_ids: dict[str, list[str]] = {}
