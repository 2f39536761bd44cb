"""Reads the records of a run's rollouts and training steps lazily, line by line."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from pipelinerl.errors import RunDirectoryError
from pipelinerl.experiments.browse.lines import MAX_LINE_BYTES, Lines
from pipelinerl.experiments.browse.tokens import one_line
from pipelinerl.types import FinishReason, Group, Problem, VersionSpan

T = TypeVar("T")

_TRAINED_LOOK_BYTES = 1 << 22
_CACHED_GROUPS = 512
_INDEX = re.compile(rb'\{"index":(\d{1,18}),')


class Sampled(msgspec.Struct, frozen=True):
    weight_versions: tuple[VersionSpan, ...]
    finish_reason: FinishReason


class SampledTurn(msgspec.Struct, frozen=True):
    completion: Sampled
    text: str = ""


class Attempt(msgspec.Struct, frozen=True):
    """A rollout without token ids and log-probs, which are most of a line. `label`: a name to show instead of the number."""

    turns: tuple[SampledTurn, ...]
    reward: float
    id: str = ""
    attempt: int = 0
    label: str = ""

    @property
    def versions(self) -> list[int]:
        """The versions of its spans, in order."""
        return [span.version for turn in self.turns for span in turn.completion.weight_versions]

    @property
    def tokens(self) -> int:
        """The number of sampled tokens of all turns, which the spans cover exactly."""
        return sum(turn.completion.weight_versions[-1].end for turn in self.turns if turn.completion.weight_versions)

    @property
    def text(self) -> str:
        """The model's text, one turn after another."""
        return "\n".join(turn.text for turn in self.turns)


class Attempts(msgspec.Struct, frozen=True, dict=True):
    """A group with what lists and searches need. `dropped`: failed attempts by reason."""

    index: int
    problem: Problem
    rollouts: tuple[Attempt, ...]
    started: int
    dropped: dict[str, int] = {}

    @property
    def versions(self) -> list[int]:
        return [version for rollout in self.rollouts for version in rollout.versions]

    @cached_property  # a search uses it once per attempt
    def title(self) -> str:
        """The problem: id and payload."""
        return f"{self.problem.id} {msgspec.json.encode(self.problem.payload).decode()}"


class Damaged(NamedTuple):
    """A line that can't be decoded. `line` counts from 1, as in editors."""

    line: int
    why: str

    def __str__(self) -> str:
        return f"line {self.line} is damaged: {self.why}"


class Trained(NamedTuple):
    """When a rollout was trained on: the step (the version after it), and the smallest and largest lag of its tokens."""

    step: int
    lag_min: int
    lag_max: int


class Browsed(Protocol):
    """A source of groups for the browser, by place (from 0). Nothing is read before `look`."""

    @property
    def path(self) -> Path:
        """The file or folder that groups are read from."""
        ...

    @property
    def share(self) -> float:
        """The fraction of the files that was read, 0 to 1."""
        ...

    @property
    def facts(self) -> list[str]:
        """Short texts for the title."""
        ...

    @property
    def damage(self) -> list[str]:
        """Descriptions of damaged lines other than groups."""
        ...

    def __len__(self) -> int: ...

    def look(self) -> bool:
        """Read a part of what is new. Returns whether there is more."""
        ...

    def summary(self, place: int, /) -> Attempts | Damaged: ...

    def group(self, place: int, /) -> Group | Damaged: ...

    def place_of(self, index: int) -> int | None:
        """The place of group `index`, the last one if there are several; None if it was not read yet."""
        ...

    def is_replaced(self, place: int, /) -> bool:
        """Whether a resumed run started this group again, so that a later line replaces it."""
        ...

    def trained(self, place: int, rollout_id: str, /) -> Trained | None:
        """The training record of the rollout; None if it was not, or not yet, trained on."""
        ...

    def left_out(self, place: int, rollout_id: str, /) -> str | None:
        """The trainer's reason for dropping the rollout, if it recorded one."""
        ...


class _TrainedSample(msgspec.Struct, frozen=True):
    id: str
    lag_min: int
    lag_max: int


class _TrainedStep(msgspec.Struct, frozen=True):
    version: int
    samples: tuple[_TrainedSample, ...]
    dropped_lengths: dict[str, list[int]] = {}
    dropped_ids: dict[str, list[str]] = {}


class RunRollouts:
    """The groups of `rollouts.jsonl`, by place in the file (from 0), and the training records of `trained.jsonl`.

    Nothing is read before `look`, which may be called at any time while the run continues. Raises RunDirectoryError if the
    folder has no rollouts or a file can't be read.
    """

    def __init__(self, run_dir: Path) -> None:
        folder = run_dir / "rollouts"
        if not folder.is_dir():
            raise RunDirectoryError(f"{run_dir} is not a run directory (there is no {folder})")
        self.lines = Lines(folder / "rollouts.jsonl")
        self.steps = TrainedSteps(folder / "trained.jsonl")
        self._place: dict[int, int] = {}
        self._indices: list[int | None] = []
        self._summaries = msgspec.json.Decoder(Attempts)
        self._groups = msgspec.json.Decoder(Group)
        self.summary = lru_cache(_CACHED_GROUPS)(self._summary)
        """The group at a place without token ids and log-probs, or what is wrong with its line."""
        self.group = lru_cache(2)(self._group)
        """The complete group at a place, or what is wrong with its line."""

    def __len__(self) -> int:
        return len(self.lines)

    @property
    def path(self) -> Path:
        return self.lines.path

    @property
    def share(self) -> float:
        return self.lines.share

    @property
    def facts(self) -> list[str]:
        left_out = reasons_text(self.steps.dropped) or "none"
        damaged = [f"trained.jsonl {self.steps.damaged[0]}"] if self.steps.damaged else []
        return [f"{len(self)} groups", f"the trainer left out: {left_out}", *damaged]

    @property
    def damage(self) -> list[str]:
        return [f"{self.steps.lines.path}, {damaged}" for damaged in self.steps.damaged]

    def look(self) -> bool:
        """Read a part of what was added to the files since the last call. Returns whether there is more."""
        more = self.lines.look()
        for i in range(len(self._indices), len(self.lines)):
            found = _INDEX.match(self.lines.read(i, 32))
            self._indices.append(int(found[1]) if found else None)
            if found:
                self._place[int(found[1])] = i
        return self.steps.look() or more

    def place_of(self, index: int) -> int | None:
        """The place of group `index`, the last one if there are several; None if it was not read yet."""
        return self._place.get(index)

    def is_replaced(self, place: int) -> bool:
        """Whether a resumed run started this group again, so that a later line replaces it."""
        index = self._indices[place]
        return index is not None and self._place[index] != place

    def trained(self, place: int, rollout_id: str) -> Trained | None:
        """The training record of the rollout; None if it was not, or not yet, trained on."""
        return None if self.is_replaced(place) else self.steps.of(rollout_id)

    def left_out(self, place: int, rollout_id: str) -> str | None:
        """The trainer's reason for dropping the rollout. None if it was not dropped, or the run did not record the ids."""
        return None if self.is_replaced(place) else self.steps.left_out(rollout_id)

    def _summary(self, place: int) -> Attempts | Damaged:
        return self._read(place, self._summaries)

    def _group(self, place: int) -> Group | Damaged:
        return self._read(place, self._groups)

    def _read(self, place: int, decoder: msgspec.json.Decoder[T]) -> T | Damaged:
        line = self.lines.read(place)
        if not line.endswith(b"\n"):
            return Damaged(place + 1, f"longer than {MAX_LINE_BYTES >> 20} MiB")
        try:
            return decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return Damaged(place + 1, one_line(str(error)))


class TrainedSteps:
    """Which rollouts the trainer trained on or dropped, from `trained.jsonl`; empty if the file does not exist yet.

    A resumed run repeats the steps after its checkpoint; repeated steps replace the earlier ones.
    """

    def __init__(self, path: Path) -> None:
        self.damaged: list[Damaged] = []
        self.dropped: Counter[str] = Counter()
        """Number of rollouts that the trainer dropped, by reason."""
        self.lines = Lines(path)
        self._decoder = msgspec.json.Decoder(_TrainedStep)
        self._read = 0
        self._steps: list[_TrainedStep] = []
        self._trained: dict[str, Trained] = {}
        self._left_out: dict[str, str] = {}

    def look(self) -> bool:
        more = self.lines.look(_TRAINED_LOOK_BYTES)
        while self._read < len(self.lines):
            line = self.lines.read(self._read)
            self._read += 1
            try:
                self._add(self._decoder.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                self.damaged.append(Damaged(self._read, one_line(str(error))))
        return more

    def of(self, rollout_id: str) -> Trained | None:
        return self._trained.get(rollout_id)

    def left_out(self, rollout_id: str) -> str | None:
        return self._left_out.get(rollout_id)

    def _add(self, step: _TrainedStep) -> None:
        while self._steps and self._steps[-1].version >= step.version:
            self._remove(self._steps.pop())
        for sample in step.samples:
            self._trained[sample.id] = Trained(step.version, sample.lag_min, sample.lag_max)
        for reason, ids in step.dropped_ids.items():
            self._left_out.update(dict.fromkeys(ids, reason))
        self.dropped.update(_counts(step))
        self._steps.append(step)

    def _remove(self, step: _TrainedStep) -> None:
        self.dropped.subtract(_counts(step))
        for sample in step.samples:
            self._trained.pop(sample.id, None)
        for ids in step.dropped_ids.values():
            for rollout_id in ids:
                self._left_out.pop(rollout_id, None)


def _counts(step: _TrainedStep) -> Counter[str]:
    return Counter({reason: len(lengths) for reason, lengths in step.dropped_lengths.items()})


def reasons_text(dropped: Mapping[str, int]) -> str:
    return ", ".join(f"{one_line(reason)} {count}" for reason, count in sorted(dropped.items()) if count)
