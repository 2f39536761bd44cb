"""Reads all records of a run directory that the figures need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from pipelinerl.config import RunConfig, config_from_yaml
from pipelinerl.errors import RunDirectoryError
from pipelinerl.files import read_json_lines
from pipelinerl.metrics.records import (
    EVALUATIONS_FILE,
    METRICS_FILE,
    EvaluationRecord,
    StepRecord,
    TimelineRecord,
    read_records,
)
from pipelinerl.metrics.timeline import read_timeline
from pipelinerl.report.series import LagByPosition, VersionRun, begin_s, lag_by_position
from pipelinerl.types import VersionSpan

T = TypeVar("T")


class RunRecords(NamedTuple):
    """The records of a run. `summary` is None if the run did not write one, `lag` if it has no rollout records."""

    root: Path
    config: RunConfig
    steps: list[StepRecord]
    evaluations: list[EvaluationRecord]
    summary: dict[str, Any] | None
    timeline: list[TimelineRecord]
    lag: LagByPosition | None

    @property
    def begin_s(self) -> float:
        """When all stages were ready and nothing had been generated; see `series.begin_s`."""
        return begin_s(self.steps, self.timeline, self.evaluations)

    @property
    def slots(self) -> int:
        """H, over all engines."""
        return self.config.engine.slots * self.config.engine.processes


# The fields of rollouts.jsonl and trained.jsonl that the figures need; most of a line is token ids and log-probs.
class _Sampled(msgspec.Struct):
    weight_versions: tuple[VersionSpan, ...]


class _Turn(msgspec.Struct):
    completion: _Sampled


class _Rollout(msgspec.Struct):
    id: str
    turns: tuple[_Turn, ...]


class _Group(msgspec.Struct):
    rollouts: tuple[_Rollout, ...]


class _TrainedSample(msgspec.Struct):
    id: str


class _Trained(msgspec.Struct):
    version: int
    samples: tuple[_TrainedSample, ...]


def read_run(run_dir: Path) -> RunRecords:
    """The records of a run with at least one optimizer step.

    Raises RunDirectoryError for a folder that is not a run, that has no step, or that is damaged.
    """
    config_file = run_dir / "config.yaml"
    if not config_file.is_file():
        missing = "it has no config.yaml" if run_dir.is_dir() else "there is no such folder"
        raise RunDirectoryError(f"{run_dir} is not a run directory: {missing}")
    steps = read_records(run_dir / METRICS_FILE, StepRecord)
    if not steps:
        raise RunDirectoryError(f"nothing to draw: {run_dir / METRICS_FILE} holds no optimizer step")
    try:
        config = config_from_yaml(config_file.read_text(encoding="utf-8"), str(config_file))
    except (OSError, UnicodeDecodeError) as error:
        raise RunDirectoryError(f"can't read {config_file}: {error}") from error
    return RunRecords(
        root=run_dir,
        config=config,
        steps=steps,
        evaluations=read_records(run_dir / EVALUATIONS_FILE, EvaluationRecord),
        summary=read_summary(run_dir),
        timeline=read_timeline(run_dir),
        lag=_read_lag(run_dir / "rollouts"),
    )


def read_summary(run_dir: Path) -> dict[str, Any] | None:
    """The contents of `summary.json`, None if the file is missing. Raises RunDirectoryError if it is damaged."""
    path = run_dir / "summary.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunDirectoryError(f"can't read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise RunDirectoryError(f"{path} is damaged: {error}; delete it") from error


def _read_lag(rollouts: Path) -> LagByPosition | None:
    groups, trained = _read_lines(rollouts / "rollouts.jsonl", _Group), _read_lines(rollouts / "trained.jsonl", _Trained)
    if groups is None or trained is None:
        return None
    runs_of = {rollout.id: _version_runs(rollout) for group in groups for rollout in group.rollouts}
    return lag_by_position([(step.version - 1, [s.id for s in step.samples]) for step in _kept(trained)], runs_of)


def _version_runs(rollout: _Rollout) -> list[VersionRun]:
    """The spans of all turns, in positions of the rollout's sampled tokens."""
    runs: list[VersionRun] = []
    offset = 0
    for turn in rollout.turns:
        spans = turn.completion.weight_versions
        runs += [VersionRun(span.version, offset + span.start, offset + span.end) for span in spans]
        offset += spans[-1].end if spans else 0
    return runs


def _kept(trained: Iterable[_Trained]) -> list[_Trained]:
    """The records without those that were replaced: a resumed run repeats the steps after its checkpoint."""
    kept: list[_Trained] = []
    for record in trained:
        while kept and kept[-1].version >= record.version:
            kept.pop()
        kept.append(record)
    return kept


def _read_lines(path: Path, kind: type[T]) -> Sequence[T] | None:
    """The records of a JSONL file, None if the file is missing. Raises RunDirectoryError if it is damaged."""
    try:
        return read_json_lines(path, kind)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunDirectoryError(f"can't read {path}: {error.strerror}") from error
    except ValueError as error:
        raise RunDirectoryError(f"damaged records: {error}; repair or delete the line") from error
