"""Measures for comparing runs, and the records of a run directory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pipelinerl.config.load import config_of_file
from pipelinerl.config.schema import RunConfig, ScheduleConfig
from pipelinerl.errors import INVALID_DATA, RunDirectoryError
from pipelinerl.metrics.evaluations import EvaluationRecord
from pipelinerl.metrics.reading import read_lines, read_records
from pipelinerl.metrics.records import TIMELINE_STEM, StepRecord, TimelineRecord
from pipelinerl.report.curves import begin_s
from pipelinerl.run_directory import RunDirectory, existing_run
from pipelinerl.types import VersionSpan

# ---- measures

FULL = 0.9
"""Share of the largest number of sequences in progress from which on an engine counts as full."""


class Measured(NamedTuple):
    """Rates over a whole run: `training_s` is the time from when all stages were ready to the end of the last step.

    `samples_per_s_later` leaves out the first fifth of the steps, in which a pipeline fills: its first batches consist of
    short completions, which end first.
    """

    training_s: float
    samples: int
    samples_per_s: float
    samples_per_s_later: float | None
    tokens_per_s: float
    length_mean: float


def measure(steps: Sequence[StepRecord], begin: float) -> Measured:
    """Rates of a run of at least one step that began at `begin`."""
    training_s = steps[-1].time_s - begin
    samples = sum(step.samples for step in steps)
    tokens, later = sampled_tokens(steps), rates_after(steps, max(1, len(steps) // 5))
    return Measured(
        training_s,
        samples,
        samples_per_s=_per(samples, training_s),
        samples_per_s_later=later[0] if later else None,
        tokens_per_s=_per(tokens, training_s),
        length_mean=_per(tokens, samples),
    )


def rates_after(steps: Sequence[StepRecord], fill: int) -> tuple[float, float] | None:
    """Samples and sampled tokens per second after the first `fill` steps (at least one); None without any.

    Tokens are fairer for a short run: the short completions of a filling pipeline count by their cost.
    """
    later_s = steps[-1].time_s - steps[fill - 1].time_s if 0 < fill < len(steps) else 0.0
    if later_s <= 0:
        return None
    return sum(step.samples for step in steps[fill:]) / later_s, sampled_tokens(steps[fill:]) / later_s


def reached_held_out(
    points: Sequence[tuple[int, float]], steps: Sequence[StepRecord], begin: float, target: float
) -> tuple[float, int] | None:
    """When the held-out reward was first at least `target`: seconds since `begin`, and samples trained on until then.

    None if it never was.

    points   (version, held-out reward) of the evaluated versions, ascending; the reward is interpolated linearly

    The time of a version is in its step's record: when it was published or, within a round, could have been. So the
    time depends on how fast versions were trained and on their quality, and not on the lag of their data.
    """
    before: tuple[int, float] | None = None
    for version, reward in points:
        if reward >= target:
            first = version
            if before is not None:
                share = (target - before[1]) / (reward - before[1])
                first = before[0] + math.ceil((version - before[0]) * share - 1e-9)  # rounding costs no step
            taken = [step for step in steps if step.version <= first]
            time_s = taken[-1].time_s - begin if taken else 0.0
            return time_s, sum(step.samples for step in taken)
        before = version, reward
    return None


def slots_in_use(timeline: Iterable[TimelineRecord], begin: float, training_s: float, slots: int) -> float | None:
    """Mean share of the slots of all engines in use during training, over the time in which any slot is in use.

    The time in which conventional RL trains does not count, but the time in which its batch drains does. An engine's number
    holds until its next record. None if no slot is ever in use.
    """
    records = sorted(timeline, key=lambda record: record.time_s)
    now: dict[int, int] = {}
    generating_s = slot_s = 0.0
    for record, after in zip_longest(records, records[1:]):
        now[record.worker] = record.in_progress
        end_s = begin + training_s if after is None else min(after.time_s, begin + training_s)
        length_s, size = end_s - max(record.time_s, begin), sum(now.values())
        if length_s > 0 and size:
            generating_s += length_s
            slot_s += length_s * size
    return slot_s / (generating_s * slots) if generating_s > 0 else None


def full_intervals(timeline: Sequence[TimelineRecord]) -> list[tuple[TimelineRecord, TimelineRecord]]:
    """The pairs of consecutive records of an engine between which it sampled tokens and was as full as it gets.

    `timeline` is by time. Full: at least `FULL` of the largest number of sequences between any two records.
    """
    pairs = [
        (before, after)
        for engine in sorted({record.worker for record in timeline})
        for before, after in pairwise(record for record in timeline if record.worker == engine)
        if after.tokens_generated > before.tokens_generated
    ]
    fullest = max((min(before.in_progress, after.in_progress) for before, after in pairs), default=0)
    return [pair for pair in pairs if min(one.in_progress for one in pair) >= FULL * fullest]


def sampled_tokens(steps: Sequence[StepRecord]) -> float:
    """Sampled tokens of the rollouts in `steps`, with and without a gradient."""
    return sum(step.samples * (step.completion_length_mean or 0.0) for step in steps)


def _per(amount: float, unit: float) -> float:
    return amount / unit if unit > 0 else math.nan


# ---- the records of a run directory


class RunRecords(NamedTuple):
    """The records of a run. `summary` is None if the run did not write one."""

    root: Path
    config: RunConfig
    steps: list[StepRecord]
    evaluations: list[EvaluationRecord]
    summary: dict[str, Any] | None
    timeline: list[TimelineRecord]

    @property
    def begin_s(self) -> float:
        """When all stages were ready and nothing had been generated; see `begin_s`."""
        return begin_s(self.steps, self.timeline, self.evaluations)


def read_run(run_dir: Path) -> RunRecords:
    """The records of a run with at least one optimizer step.

    Raises RunDirectoryError for a folder that is not a run, that has no step, or that is damaged.
    """
    config, run = read_config(run_dir), RunDirectory(run_dir)
    steps = read_records(run.metrics, StepRecord)
    if not steps:
        raise RunDirectoryError(f"nothing to draw: {run.metrics} holds no optimizer step")
    return RunRecords(
        root=run_dir,
        config=config,
        steps=steps,
        evaluations=read_records(run.evaluations, EvaluationRecord),
        summary=read_summary(run_dir),
        timeline=read_timeline(run_dir),
    )


def read_timeline(run_dir: Path) -> list[TimelineRecord]:
    """The records of all engines of a run, by time. Raises RunDirectoryError for a file that can't be read or is damaged."""
    records: list[TimelineRecord] = []
    for path in sorted(run_dir.glob(f"{TIMELINE_STEM}*.jsonl")):
        records += read_lines(path, TimelineRecord, lambda old, new: old.time_s >= new.time_s)
    return sorted(records, key=lambda record: (record.time_s, record.worker))


def read_config(run_dir: Path) -> RunConfig:
    """The run file of a run directory. Raises ConfigError, and RunDirectoryError if there is none."""
    return config_of_file(existing_run(run_dir).config)


def read_summary(run_dir: Path) -> dict[str, Any] | None:
    """The contents of `summary.json`, None if the file is missing. Raises RunDirectoryError if it is damaged."""
    path = run_dir / "summary.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunDirectoryError(f"can't read {path}: {error.strerror}") from error
    except INVALID_DATA as error:
        raise RunDirectoryError(f"{path} is damaged: {error}; delete it") from error


def labels_of(run_dirs: Sequence[Path]) -> list[str]:
    """The shortest distinct ends of the paths. Raises RunDirectoryError if a folder is named twice."""
    parts = [run_dir.resolve().parts for run_dir in run_dirs]
    if len(set(parts)) < len(parts):
        twice = next(run_dir for run_dir, part in zip(run_dirs, parts, strict=True) if parts.count(part) > 1)
        raise RunDirectoryError(f"{twice} is named twice; name each run once")
    ends = (["/".join(part[-length:]) for part in parts] for length in range(1, max(map(len, parts)) + 1))
    return next(labels for labels in ends if len(set(labels)) == len(labels))


def name_of(schedule: ScheduleConfig) -> str:
    """The schedule as `compare` names it: `pipeline`, `conventional:4`."""
    return schedule.kind if schedule.kind == "pipeline" else f"{schedule.kind}:{schedule.steps_per_round}"


# The fields of rollouts.jsonl that are needed; most of a line is token ids and log-probs.
class RecordedCompletion(msgspec.Struct, frozen=True):
    """`weight_versions` cover the sampled tokens exactly, so their end is the number of tokens."""

    weight_versions: tuple[VersionSpan, ...]
    finish_reason: str = "stop"

    @property
    def tokens(self) -> int:
        return self.weight_versions[-1].end if self.weight_versions else 0


class RecordedTurn(msgspec.Struct, frozen=True):
    completion: RecordedCompletion
    prompt_ids: tuple[int, ...] = ()


class RecordedRollout(msgspec.Struct, frozen=True):
    turns: tuple[RecordedTurn, ...]
    reward: float = 0.0

    @property
    def tokens(self) -> int:
        """Sampled tokens of all turns."""
        return sum(turn.completion.tokens for turn in self.turns)


class RecordedGroup(msgspec.Struct, frozen=True):
    rollouts: tuple[RecordedRollout, ...]
    index: int = 0


def read_groups(run_dir: Path) -> list[RecordedGroup]:
    """All groups that a run finished, as recorded. Raises RunDirectoryError if there are no records, or damaged ones."""
    path = run_dir / "rollouts" / "rollouts.jsonl"
    groups = read_lines(path, RecordedGroup)
    if not groups and not path.exists():
        raise RunDirectoryError(f"{run_dir} is not a run directory (there is no {path})")
    return groups
