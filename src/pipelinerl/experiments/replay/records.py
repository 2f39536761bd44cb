"""A run's records as a replay needs them: its sessions, the batch of every step in order, and the checksums of its weights.

sessions.jsonl            ─▶ Segment: the steps that one session took, and its configuration
rollouts/trained.jsonl    ─▶ Batch: the rollouts of a step, in order, and whether the ESS guard rejected it
rollouts/rollouts.jsonl   ─▶ Groups: the rollouts themselves, read from the file as they are needed
published.jsonl           ─▶ the checksum and the digests of every published version
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
from pydantic import ValidationError

from pipelinerl.config.load import with_own_model
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import RolloutError, RunDirectoryError
from pipelinerl.experiments.browse.records import IndexedLines, group_indices
from pipelinerl.metrics.reading import read_lines, read_records
from pipelinerl.metrics.records import StepRecord
from pipelinerl.metrics.sessions import FORMAT, SessionRecord
from pipelinerl.run_directory import RunDirectory
from pipelinerl.trainer.records import PublishedRecord, TrainedRecord, TrainedSample
from pipelinerl.types import Group, Prepared, TrainingSample

_RecordT = TypeVar("_RecordT", TrainedRecord, PublishedRecord)


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """The rollouts of step `version - 1` to `version`, in order. `refused`: the ESS guard rejected them, before the step."""

    version: int
    samples: tuple[TrainedSample, ...]
    refused: bool = False


@dataclass(frozen=True, kw_only=True)
class SessionSegment:
    """The steps of one session that count: from the weights of version `start` to those of `end`."""

    record: SessionRecord
    config: RunConfig
    start: int
    end: int
    batches: Sequence[Batch]


class RecordedRun:
    """The records of a run directory. Raises RunDirectoryError if they are missing, damaged or of another format."""

    def __init__(self, run_dir: Path) -> None:
        self.run = RunDirectory(run_dir)
        if not self.run.config.is_file():
            raise RunDirectoryError(f"{run_dir} is not a run directory (there is no {self.run.config})")
        sessions = _read_sessions(self.run)
        trained = self._lines(self.run.trained, TrainedRecord, _repeats)
        if [record.version for record in trained] != list(range(1, len(trained) + 1)):
            raise RunDirectoryError(f"{self.run.trained} lacks steps: its versions are not 1, 2, 3, ...")
        published = self._lines(self.run.published, PublishedRecord, _repeats)
        self.published = {record.version: record for record in published}
        self.metrics = {record.version: record for record in read_records(self.run.metrics, StepRecord)}
        self.segments = tuple(_segments(self.run, sessions, trained))
        self.groups = Groups(self.run.rollouts / "rollouts.jsonl")

    @property
    def steps(self) -> int:
        return self.segments[-1].end

    def trained_groups(self) -> list[int]:
        """Indices of the groups with a rollout that was trained on, ascending."""
        batches = (batch for segment in self.segments for batch in segment.batches)
        return sorted({sample.group_index for batch in batches for sample in batch.samples})

    def _lines(self, path: Path, kind: type[_RecordT], repeats: Callable[[_RecordT, _RecordT], bool]) -> list[_RecordT]:
        try:
            return read_lines(path, kind, repeats)
        except FileNotFoundError as error:
            raise RunDirectoryError(
                f"{self.run.root} has no {path.name}: it took no step, or parts of it are missing"
            ) from error


def _repeats(old: _RecordT, new: _RecordT) -> bool:
    return old.version >= new.version


class _RecordFormat(msgspec.Struct):
    format: int = 0


def _read_sessions(run: RunDirectory) -> list[SessionRecord]:
    try:
        found = {session.format for session in read_lines(run.sessions, _RecordFormat)}
    except FileNotFoundError as error:
        raise RunDirectoryError(
            f"{run.root} can't be replayed: it has no {run.sessions.name}, so it did not begin, or an earlier version of "
            "pipelinerl made it, which did not record what a replay needs"
        ) from error
    if found - {FORMAT}:
        other = ", ".join(map(str, sorted(found - {FORMAT})))
        raise RunDirectoryError(f"{run.root} has records of format {other}; this version of pipelinerl replays {FORMAT}")
    sessions = read_lines(run.sessions, SessionRecord)
    if not sessions or sessions[0].version != 0:
        raise RunDirectoryError(f"{run.sessions} lacks the first session of the run")
    return sessions


def _segments(
    run: RunDirectory, sessions: Sequence[SessionRecord], trained: Sequence[TrainedRecord]
) -> Iterator[SessionSegment]:
    ends = [min(later.version for later in sessions[number:]) for number in range(1, len(sessions))]
    for record, end in zip(sessions, [*ends, len(trained)], strict=True):
        if end <= record.version and trained:
            continue
        config = _config_of(run, record)
        batches = [batch for step in trained[record.version : end] for batch in _batches(step)]
        for batch in batches:
            if len(batch.samples) != config.trainer.batch_size:
                raise RunDirectoryError(
                    f"{run.trained}: a batch of step {batch.version} has {len(batch.samples)} rollouts, not "
                    f"{config.trainer.batch_size} (trainer.batch_size)"
                )
        yield SessionSegment(record=record, config=config, start=record.version, end=end, batches=batches)


def _batches(step: TrainedRecord) -> Iterator[Batch]:
    for samples in step.refused:
        yield Batch(version=step.version, samples=samples, refused=True)
    yield Batch(version=step.version, samples=step.samples)


def _config_of(run: RunDirectory, record: SessionRecord) -> RunConfig:
    """The configuration of a session. Raises RunDirectoryError if it is none."""
    try:
        config = RunConfig.model_validate(record.config)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise RunDirectoryError(f"{run.sessions}: {place}: {first['msg']}: made by another version of pipelinerl") from error
    return with_own_model(config, run.root)


# ---- rollouts


class Groups:
    """The groups in `rollouts.jsonl`, found by index. Only their places in the file are kept in memory.

    A resumed run generates a group that it lost once more, under the same index. So an index may have several groups.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines = IndexedLines(path)
        self._decoder = msgspec.json.Decoder(Group)
        self._places: dict[int, list[int]] = {}
        for place, index in enumerate(group_indices(self._lines)):
            if index is None:
                raise RunDirectoryError(f"damaged records: {path}, line {place + 1}")
            self._places.setdefault(index, []).append(place)

    def read(self, index: int) -> list[Group]:
        """The groups of this index, the latest first. Raises RunDirectoryError if a line is not a group."""
        return [self._lines.decoded(place, self._decoder) for place in reversed(self._places.get(index, []))]


class RecordedSamples:
    """The samples of recorded batches, prepared again from the recorded groups.

    `prepare` is the preprocessor's. `changed` is called for a sample that is not what the run trained on: with the rollout's
    id, the version and what differs. None: advantages may differ.
    """

    def __init__(
        self,
        run: RecordedRun,
        segment: SessionSegment,
        prepare: Callable[[Group], Prepared],
        changed: Callable[[str, int, str], None] | None,
    ) -> None:
        self._groups = run.groups
        self._prepare = prepare
        self._changed = changed
        self._prepared: dict[int, list[dict[str, TrainingSample]]] = {}
        self._left = Counter(sample.group_index for batch in segment.batches for sample in batch.samples)

    def of(self, batch: Batch) -> list[TrainingSample]:
        """Raises RunDirectoryError for a rollout that is not recorded."""
        return [self._sample(recorded, batch) for recorded in batch.samples]

    def _sample(self, recorded: TrainedSample, batch: Batch) -> TrainingSample:
        index = recorded.group_index
        if index not in self._prepared:
            self._prepared[index] = [self._samples(group, batch) for group in self._groups.read(index)]
        choices = [samples[recorded.id] for samples in self._prepared[index] if recorded.id in samples]
        self._left[index] -= 1
        if not self._left[index]:
            del self._prepared[index]
        if not choices:
            raise RunDirectoryError(
                f"step {batch.version} trained on rollout {recorded.id}, which is not in {self._groups.path}"
            )
        versions = [(sample, TrainedSample.of(sample, batch.version - 1)) for sample in choices]
        sample, again = next((pair for pair in versions if _same(pair[1], recorded)), versions[0])
        if self._changed is not None and (odd := _differences(again, recorded)):
            self._changed(recorded.id, batch.version, " and ".join(odd))
        return sample

    def _samples(self, group: Group, batch: Batch) -> dict[str, TrainingSample]:
        try:
            return {sample.id: sample for sample in self._prepare(group).samples}
        except RolloutError as error:
            raise RunDirectoryError(f"step {batch.version} can't be repeated: {self._groups.path}: {error}") from error


def _same(again: TrainedSample, recorded: TrainedSample) -> bool:
    return (again.tokens_digest, again.logprobs_digest) == (recorded.tokens_digest, recorded.logprobs_digest)


def _differences(again: TrainedSample, recorded: TrainedSample) -> list[str]:
    parts = {"tokens or versions": "tokens_digest", "log-probs": "logprobs_digest", "advantages": "advantage"}
    return [name for name, field in parts.items() if getattr(again, field) != getattr(recorded, field)]
