"""Reads the recorded rollouts, training steps and evaluations of a run, line by line."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

import msgspec

from pipelinerl.errors import INVALID_DATA, RunDirectoryError
from pipelinerl.metrics.evaluations import EvaluatedProblem
from pipelinerl.status.screen import printable
from pipelinerl.types import Completion, Group, Problem, Rollout, Skip, Turn

T = TypeVar("T")

MAX_LINE_BYTES = 1 << 28
_BUFFER_BYTES = 1 << 20
_NAME = re.compile(r"g?(\d{1,18})(?:\.a\d+)?")
_INDEX = re.compile(rb'\{"index": ?(\d{1,18}),')
_EVALUATION = re.compile(r"evaluation-(before|after|v(\d{1,18}))\.jsonl")


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
                ends = accumulate(len(line) for line in file if line.endswith(b"\n"))
                self._ends.extend(ends)

    def __len__(self) -> int:
        return len(self._ends)

    def read(self, i: int, most: int = MAX_LINE_BYTES) -> bytes:
        """The first `most` bytes of line `i` (from 0), including its newline."""
        start = self._ends[i - 1] if i else 0
        with _reading(self.path, 0) as file:
            file.seek(start)
            return file.read(min(most, self._ends[i] - start))

    def decoded(self, i: int, decoder: msgspec.json.Decoder[T]) -> T | Damaged:
        """Line `i` (from 0) as a record, or what is wrong with it."""
        line = self.read(i)
        if not line.endswith(b"\n"):
            return Damaged(i + 1, f"longer than {MAX_LINE_BYTES >> 20} MiB")
        try:
            return decoder.decode(line)
        except INVALID_DATA as error:
            return Damaged(i + 1, one_line(str(error)))


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


class Damaged(NamedTuple):
    """A line that can't be decoded. `line` counts from 1, as in editors."""

    line: int
    why: str

    def __str__(self) -> str:
        return f"line {self.line} is damaged: {self.why}"


class Trained(NamedTuple):
    """When a rollout was trained on: the step (the version after it), its lags (smallest and largest) and its advantage."""

    step: int
    lag_min: int
    lag_max: int
    advantage: float


Fate = Trained | str | None
"""What the trainer did with a rollout: trained on it, dropped it for this reason, or nothing (yet) that is recorded."""


class RunRollouts:
    """The groups of `rollouts.jsonl`, by place in the file (from 0), and their training records, as they are now.

    Raises RunDirectoryError if the folder has no rollouts or a file can't be read.
    """

    def __init__(self, run_dir: Path) -> None:
        folder = _rollouts_folder(run_dir)
        self.path = folder / "rollouts.jsonl"
        """The file or folder that groups are read from."""
        self.trained_path = folder / "trained.jsonl"
        self._lines = IndexedLines(self.path)
        self._fates, damaged = _fates(IndexedLines(self.trained_path))
        self.damage = [f"{self.trained_path}, {one}" for one in damaged]
        """Descriptions of damaged lines other than groups."""
        self._indices = group_indices(self._lines)
        self._place = {index: place for place, index in enumerate(self._indices)}
        self._decoder = msgspec.json.Decoder(Group)

    def __len__(self) -> int:
        return len(self._lines)

    def group(self, place: int) -> Group | Damaged:
        """The group at a place, or what is wrong with its line."""
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
        return None if self.is_replaced(place) else self._fates.get(rollout_id)


def _rollouts_folder(run_dir: Path) -> Path:
    folder = run_dir / "rollouts"
    if not folder.is_dir():
        raise RunDirectoryError(f"{run_dir} is not a run directory (there is no {folder})")
    return folder


class _TrainedSample(msgspec.Struct, frozen=True):
    id: str
    lag_min: int
    lag_max: int
    advantage: float = 0.0


class _TrainedStep(msgspec.Struct, frozen=True):
    version: int
    samples: tuple[_TrainedSample, ...]
    dropped_ids: dict[str, list[str]] = {}


def _fates(lines: IndexedLines) -> tuple[dict[str, Fate], list[Damaged]]:
    """What the trainer did with each rollout id, and damaged lines.

    A resumed run repeats the steps after its checkpoint; repeated steps replace the earlier ones.
    """
    decoder = msgspec.json.Decoder(_TrainedStep)
    steps: list[_TrainedStep] = []
    damaged = []
    for i in range(len(lines)):
        step = lines.decoded(i, decoder)
        if isinstance(step, Damaged):
            damaged.append(step)
            continue
        while steps and steps[-1].version >= step.version:
            steps.pop()
        steps.append(step)
    fates: dict[str, Fate] = {}
    for step in steps:
        fates |= {one: reason for reason, ids in step.dropped_ids.items() for one in ids}
        fates |= {one.id: Trained(step.version, one.lag_min, one.lag_max, one.advantage) for one in step.samples}
    return fates, damaged


class RunEvaluations:
    """The answers in `rollouts/evaluation-*.jsonl`, by problem: before, during and after training.

    Has the interface of `RunRollouts`. Group n is the n-th problem and attempt n the n-th evaluation; none was trained on.
    Log-probs and prompt ids are not recorded; the prompt's text is part of the problem. Failed answers count in the group's
    `dropped`.
    """

    def __init__(self, run_dir: Path) -> None:
        """Raises RunDirectoryError if the folder has no evaluation."""
        self.path = _rollouts_folder(run_dir)
        self.damage: list[str] = []
        self._decoder = msgspec.json.Decoder(EvaluatedProblem)
        self._files = {name: IndexedLines(self.path / f"evaluation-{name}.jsonl") for name in self._names()}
        self._answers: dict[str, dict[str, int]] = {}  # problem id -> evaluation -> line number
        for name, lines in self._files.items():
            for i in range(len(lines)):
                answer = lines.decoded(i, self._decoder)
                if isinstance(answer, Damaged):
                    self.damage.append(f"{lines.path}, {answer}")
                else:  # the last line counts, in a run continued after its end
                    self._answers.setdefault(answer.problem_id, {})[name] = i
        self._problems = list(self._answers)
        if not self._files:
            raise RunDirectoryError(f"{run_dir} holds no evaluation; runs with evaluation.problems above 0 write some")

    def __len__(self) -> int:
        return len(self._problems)

    def find(self, name: str) -> int | None:
        """The place of a group (`12`), or of an answer's (`PROBLEM v20`); else None."""
        problem = name.rpartition(" ")[0]
        if problem in self._answers:
            return self._problems.index(problem)
        return int(name) if name.isdecimal() and int(name) < len(self) else None

    def is_replaced(self, _place: int) -> bool:
        return False

    def fate(self, _place: int, _rollout_id: str) -> Fate:
        return None

    def group(self, place: int) -> Group:
        lines = self._answers[self._problems[place]]
        answers = {name: self._decoder.decode(self._files[name].read(i)) for name, i in lines.items()}
        prompt = next((answer.prompt for answer in answers.values() if answer.prompt), "")
        return Group(
            index=place,
            problem=Problem(id=self._problems[place], payload={"prompt": prompt}),
            rollouts=tuple(
                _answered(name, number, answer)
                for number, (name, answer) in enumerate(answers.items())
                if answer.failure is None
            ),
            started=len(answers),
            dropped=Counter(answer.failure.partition(":")[0] for answer in answers.values() if answer.failure is not None),
        )

    def _names(self) -> list[str]:
        """Names of the evaluations on disk, in order."""
        found = [match for path in self.path.glob("evaluation-*.jsonl") if (match := _EVALUATION.fullmatch(path.name))]
        return [match[1] for match in sorted(found, key=lambda match: (match[1] == "after", int(match[2] or 0)))]


def _answered(name: str, number: int, answer: EvaluatedProblem) -> Rollout:
    """The answer as a rollout of a single turn: turn boundaries are not recorded."""
    completion = Completion(
        request_id=answer.problem_id,
        token_ids=answer.token_ids,
        logprobs=(),
        weight_versions=answer.weight_versions,
        finish_reason=answer.finish_reason or "stop",
    )
    turn = Turn(prompt_ids=(), completion=completion, text=answer.completion)
    rollout_id = f"{answer.problem_id} {name}"
    return Rollout(turns=(turn,), reward=answer.reward, metrics=answer.metrics, id=rollout_id, attempt=number)


Browsed = RunRollouts | RunEvaluations
