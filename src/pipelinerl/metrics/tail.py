"""Follows the records of a run while it writes them, and shows samples of its rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from pipelinerl.errors import INVALID_DATA
from pipelinerl.metrics.evaluations import EvaluatedProblem, EvaluationRecord
from pipelinerl.metrics.records import StepRecord
from pipelinerl.metrics.sinks import EVALUATIONS_FILE, METRICS_FILE, Record
from pipelinerl.metrics.trackers import Row
from pipelinerl.types import Group

T = TypeVar("T", StepRecord, EvaluationRecord)

SAMPLES = 16
"""The most rows of a table."""
NEWEST_BYTES = 1 << 22
"""How far before the end of the rollouts' file the newest group is looked for."""


class Place(msgspec.Struct, frozen=True):
    """The bytes that were read of the files of steps and of evaluations."""

    steps: int = 0
    evaluations: int = 0


class Tail:
    """The records of a run from `place` on, in the order of their times. A run that is resumed repeats some versions."""

    def __init__(self, run_dir: Path, place: Place | None = None) -> None:
        self._steps = _File(run_dir / METRICS_FILE, StepRecord)
        self._evaluations = _File(run_dir / EVALUATIONS_FILE, EvaluationRecord)
        self.place = place or Place()

    def read(self) -> list[Record]:
        """The complete records that were written since the last call. Raises OSError."""
        steps, new_steps = self._steps.read(self.place.steps)
        evaluations, new_evaluations = self._evaluations.read(self.place.evaluations)
        self.place = Place(steps, evaluations)
        return sorted([*new_steps, *new_evaluations], key=lambda record: record.time_s)


class _File(Generic[T]):
    def __init__(self, path: Path, kind: type[T]) -> None:
        self._path = path
        self._decoder: msgspec.json.Decoder[T] = msgspec.json.Decoder(kind)

    def read(self, start: int) -> tuple[int, list[T]]:
        """The records in the complete lines from `start` on, and where the last one ends. Damaged lines are left out."""
        try:
            with self._path.open("rb") as file:
                file.seek(start)
                complete, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return 0, []
        records = []
        for line in complete.split(b"\n") if newline else []:
            try:
                records.append(self._decoder.decode(line))
            except INVALID_DATA:
                continue
        return start + len(complete) + len(newline), records


def samples(run_dir: Path, record: Record) -> list[Row]:
    """Answers of the evaluation, or those of the newest group when a step was taken. Raises OSError."""
    if isinstance(record, EvaluationRecord):
        name = f"v{record.version}" if record.when == "online" else record.when
        decoder = msgspec.json.Decoder(EvaluatedProblem)
        with (run_dir / "rollouts" / f"evaluation-{name}.jsonl").open("rb") as file:
            problems = [decoder.decode(line) for line, _ in zip(file, range(SAMPLES), strict=False)]
        return [(record.version, one.prompt, one.completion, one.reward, one.length) for one in problems]
    group = _newest_group(run_dir / "rollouts" / "rollouts.jsonl")
    if group is None:
        return []
    problem = msgspec.json.encode(group.problem.payload).decode()
    return [
        (
            record.version,
            problem,
            "\n".join(turn.text for turn in rollout.turns),
            rollout.reward,
            sum(len(turn.completion.token_ids) for turn in rollout.turns),
        )
        for rollout in group.rollouts[:SAMPLES]
    ]


def _newest_group(path: Path) -> Group | None:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - NEWEST_BYTES))
        lines = file.read().split(b"\n")[:-1]  # the last one is not complete
    return msgspec.json.decode(lines[-1], type=Group) if lines else None
