"""Reads the recorded rollouts, training steps and evaluations of a run lazily, line by line. Files may still be growing."""

from __future__ import annotations

import os
import re
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

import msgspec

from pipelinerl.errors import INVALID_DATA, RunDirectoryError
from pipelinerl.metrics.evaluations import EvaluatedProblem
from pipelinerl.status.screen import printable
from pipelinerl.types import Completion, FinishReason, Group, Problem, Rollout, Skip, Turn, VersionSpan

T = TypeVar("T")

LOOK_BYTES = 1 << 25
"""Bytes that one `look` scans, up to the end of a line: some ten milliseconds, so that the screen stays responsive."""
MAX_LINE_BYTES = 1 << 28

_TRAINED_LOOK_BYTES = 1 << 22
_CACHED_GROUPS = 512
_INDEX = re.compile(rb'\{"index":(\d{1,18}),')
_EVALUATION = re.compile(r"evaluation-(before|after|v(\d{1,18}))\.jsonl")


def one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def reasons_text(dropped: Mapping[str, int]) -> str:
    return ", ".join(f"{one_line(reason)} {count}" for reason, count in sorted(dropped.items()) if count)


def skip_text(skip: Skip) -> str:
    """Why `actor.online_filter` skipped a problem."""
    times = f"{skip.equal_groups} groups in a row" if skip.equal_groups > 1 else "its latest group"
    return f"skipped: equal rewards in {times}, up to group {skip.last_group}; mean reward {skip.reward_mean:.3g}"


class Lines:
    """An index of the complete lines of the large file `path`, found by `look`. Their contents are read on demand.

    A last line without a newline is ignored: it is still being written, or partial. The file need not exist yet. Methods
    raise RunDirectoryError if it can't be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ends = array("Q")
        self._size = 0

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def share(self) -> float:
        """The fraction of the file that was scanned, 0 to 1."""
        return self._end / self._size if self._size else 1.0

    def look(self, budget: int = LOOK_BYTES) -> bool:
        """Find further lines in about the next `budget` bytes. Returns whether there is more of the file."""
        if not self.path.exists():
            return False
        with _reading(self.path, LOOK_BYTES >> 5) as file:
            self._size = os.fstat(file.fileno()).st_size
            if self._size < self._end:
                raise RunDirectoryError(f"{self.path} was replaced while it was being read; start again")
            # Start at the last newline: a resumed run truncates a partial line and writes another one in its place.
            start = file.seek(self._end)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._ends.append(self._end + len(line))
                if self._end - start >= budget:
                    return self._end < self._size
        return False

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

    @property
    def _end(self) -> int:
        return self._ends[-1] if self._ends else 0


@contextmanager
def _reading(path: Path, buffer_bytes: int) -> Iterator[BinaryIO]:
    try:
        with open(path, "rb", buffer_bytes) as file:
            yield file
    except OSError as error:
        raise RunDirectoryError(f"can't read {path}: {error.strerror}") from error


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
    """A group with what lists and searches need. `dropped`: failed attempts by reason. A `skipped` problem has none."""

    index: int
    problem: Problem
    rollouts: tuple[Attempt, ...]
    started: int
    dropped: dict[str, int] = {}
    skipped: Skip | None = None

    @property
    def note(self) -> str:
        """What became of attempts that it does not have; empty if it has all."""
        if self.skipped is not None:
            return skip_text(self.skipped)
        return f"dropped: {reasons_text(self.dropped)}" if self.dropped else ""

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


class RunRollouts:
    """The groups of `rollouts.jsonl`, by place in the file (from 0), and the training records of `trained.jsonl`.

    Nothing is read before `look`, which may be called at any time while the run continues. Raises RunDirectoryError if the
    folder has no rollouts or a file can't be read.
    """

    def __init__(self, run_dir: Path) -> None:
        folder = _rollouts_folder(run_dir)
        self.path = folder / "rollouts.jsonl"
        """The file or folder that groups are read from."""
        self.lines = Lines(self.path)
        self.steps = TrainedSteps(folder / "trained.jsonl")
        self._place: dict[int, int] = {}
        self._indices: list[int | None] = []
        summaries, groups = msgspec.json.Decoder(Attempts), msgspec.json.Decoder(Group)
        self.summary = lru_cache(_CACHED_GROUPS)(lambda place: self.lines.decoded(place, summaries))
        """The group at a place without token ids and log-probs, or what is wrong with its line."""
        self.group = lru_cache(2)(lambda place: self.lines.decoded(place, groups))
        """The complete group at a place, or what is wrong with its line."""

    def __len__(self) -> int:
        return len(self.lines)

    @property
    def share(self) -> float:
        """The fraction of the files that was read, 0 to 1."""
        return self.lines.share

    @property
    def facts(self) -> list[str]:
        """Short texts for the title."""
        left_out = reasons_text(self.steps.dropped) or "none"
        damaged = [f"trained.jsonl {self.steps.damaged[0]}"] if self.steps.damaged else []
        return [f"{len(self)} groups", f"the trainer left out: {left_out}", *damaged]

    @property
    def damage(self) -> list[str]:
        """Descriptions of damaged lines other than groups."""
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
        fate = None if self.is_replaced(place) else self.steps.fates.get(rollout_id)
        return fate if isinstance(fate, Trained) else None

    def left_out(self, place: int, rollout_id: str) -> str | None:
        """The trainer's reason for dropping the rollout. None if it was not dropped, or the run did not record the ids."""
        fate = None if self.is_replaced(place) else self.steps.fates.get(rollout_id)
        return fate if isinstance(fate, str) else None


def _rollouts_folder(run_dir: Path) -> Path:
    folder = run_dir / "rollouts"
    if not folder.is_dir():
        raise RunDirectoryError(f"{run_dir} is not a run directory (there is no {folder})")
    return folder


class _TrainedSample(msgspec.Struct, frozen=True):
    id: str
    lag_min: int
    lag_max: int


class _TrainedStep(msgspec.Struct, frozen=True):
    version: int
    samples: tuple[_TrainedSample, ...]
    dropped_lengths: dict[str, list[int]] = {}
    dropped_ids: dict[str, list[str]] = {}

    @property
    def fates(self) -> dict[str, Trained | str]:
        found: dict[str, Trained | str] = {one: reason for reason, ids in self.dropped_ids.items() for one in ids}
        return found | {one.id: Trained(self.version, one.lag_min, one.lag_max) for one in self.samples}

    @property
    def dropped(self) -> dict[str, int]:
        return {reason: len(lengths) for reason, lengths in self.dropped_lengths.items()}


class TrainedSteps:
    """Which rollouts the trainer trained on or dropped, from `trained.jsonl`; empty if the file does not exist yet.

    A resumed run repeats the steps after its checkpoint; repeated steps replace the earlier ones. `fates`: rollout id ->
    when it was trained on, or why it was dropped. `dropped`: how many rollouts were dropped, by reason.
    """

    def __init__(self, path: Path) -> None:
        self.lines = Lines(path)
        self.fates: dict[str, Trained | str] = {}
        self.dropped: Counter[str] = Counter()
        self.damaged: list[Damaged] = []
        self._decoder = msgspec.json.Decoder(_TrainedStep)
        self._read = 0
        self._steps: list[_TrainedStep] = []

    def look(self) -> bool:
        more = self.lines.look(_TRAINED_LOOK_BYTES)
        for i in range(self._read, len(self.lines)):
            step = self.lines.decoded(i, self._decoder)
            if isinstance(step, Damaged):
                self.damaged.append(step)
            else:
                self._add(step)
        self._read = len(self.lines)
        return more

    def _add(self, step: _TrainedStep) -> None:
        while self._steps and self._steps[-1].version >= step.version:
            repeated = self._steps.pop()
            self.dropped.subtract(repeated.dropped)
            for rollout_id in repeated.fates:
                self.fates.pop(rollout_id, None)
        self._steps.append(step)
        self.dropped.update(step.dropped)
        self.fates.update(step.fates)


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
        self._files: dict[str, Lines] = {}
        self._read: dict[str, int] = {}
        self._answers: dict[str, dict[str, int]] = {}  # problem id -> evaluation -> line number
        self._problems: list[str] = []
        self._decoder = msgspec.json.Decoder(EvaluatedProblem)
        self.summary = lru_cache(_CACHED_GROUPS)(self._summary)
        self.group = lru_cache(2)(self._group)
        if not self._names():
            raise RunDirectoryError(f"{run_dir} holds no evaluation; runs with evaluation.problems above 0 write some")

    def __len__(self) -> int:
        return len(self._problems)

    @property
    def share(self) -> float:
        return min((lines.share for lines in self._files.values()), default=1.0)

    @property
    def facts(self) -> list[str]:
        return [f"{len(self)} held-out problems", f"evaluations: {', '.join(self._files) or 'none'}", *self.damage[:1]]

    def look(self) -> bool:
        self._files = {
            name: self._files.get(name) or Lines(self.path / f"evaluation-{name}.jsonl") for name in self._names()
        }
        more = False
        for name, lines in self._files.items():
            more = lines.look() or more
            for i in range(self._read.get(name, 0), len(lines)):
                self._add(name, lines, i)
            self._read[name] = len(lines)
        return more

    def place_of(self, index: int) -> int | None:
        return index if index < len(self) else None

    def is_replaced(self, _place: int) -> bool:
        return False

    def trained(self, _place: int, _rollout_id: str) -> None:
        return None

    def left_out(self, _place: int, _rollout_id: str) -> None:
        return None

    def _names(self) -> list[str]:
        """Names of the evaluations on disk, in order."""
        found = [match for path in self.path.glob("evaluation-*.jsonl") if (match := _EVALUATION.fullmatch(path.name))]
        return [match[1] for match in sorted(found, key=lambda match: (match[1] == "after", int(match[2] or 0)))]

    def _add(self, name: str, lines: Lines, i: int) -> None:
        answer = lines.decoded(i, self._decoder)
        if isinstance(answer, Damaged):
            self.damage.append(f"{lines.path}, {answer}")
            return
        if answer.problem_id not in self._answers:
            self._answers[answer.problem_id] = {}
            self._problems.append(answer.problem_id)
        self._answers[answer.problem_id][name] = i  # the last line counts, in a run continued after its end
        self.summary.cache_clear()
        self.group.cache_clear()

    def _answers_at(self, place: int) -> dict[str, EvaluatedProblem]:
        lines = self._answers[self._problems[place]]
        return {name: self._decoder.decode(self._files[name].read(lines[name])) for name in self._files if name in lines}

    def _summary(self, place: int) -> Attempts:
        names = list(self._answers_at(place))
        group = msgspec.convert(self._group(place), Attempts, from_attributes=True)
        labelled = (msgspec.structs.replace(one, label=names[one.attempt]) for one in group.rollouts)
        return msgspec.structs.replace(group, rollouts=tuple(labelled))

    def _group(self, place: int) -> Group:
        answers = self._answers_at(place)
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
