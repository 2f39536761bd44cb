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
from typing import Any

import msgspec
from pydantic import ValidationError

from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import RolloutError, RunDirectoryError
from pipelinerl.experiments.browse import RecordedGroups
from pipelinerl.metrics.reading import read_lines, read_records
from pipelinerl.metrics.records import FORMAT, SessionRecord, StepRecord
from pipelinerl.run_directory import RunDirectory
from pipelinerl.trainer.status import PublishedRecord, TrainedRecord, TrainedSample
from pipelinerl.types import Group, Prepared, TrainingSample


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
        try:
            formats = {session.get("format", 0) for session in read_lines(self.run.sessions, dict[str, Any])}
            if other := sorted(formats - {FORMAT}):
                named = ", ".join(map(str, other))
                raise RunDirectoryError(
                    f"{run_dir} has records of format {named}; this version of pipelinerl replays {FORMAT}"
                )
            sessions = read_lines(self.run.sessions, SessionRecord)
            trained = read_lines(self.run.trained, TrainedRecord, lambda old, new: old.version >= new.version)
            published = read_lines(self.run.published, PublishedRecord, lambda old, new: old.version >= new.version)
        except FileNotFoundError as error:
            raise RunDirectoryError(
                f"{run_dir} can't be replayed: it has no {Path(error.filename).name}, so it took no step, an earlier "
                "version of pipelinerl made it, or parts of it are missing"
            ) from error
        if not sessions or sessions[0].version != 0:
            raise RunDirectoryError(f"{self.run.sessions} lacks the first session of the run")
        if [record.version for record in trained] != list(range(1, len(trained) + 1)):
            raise RunDirectoryError(f"{self.run.trained} lacks steps: its versions are not 1, 2, 3, ...")
        self.published = {record.version: record for record in published}
        self.metrics = {record.version: record for record in read_records(self.run.metrics, StepRecord)}
        self.segments = tuple(_segments(self.run, sessions, trained))
        self.groups = Groups(self.run.recorded)

    @property
    def steps(self) -> int:
        return self.segments[-1].end

    def trained_groups(self) -> list[int]:
        """Indices of the groups with a rollout that was trained on, ascending."""
        batches = (batch for segment in self.segments for batch in segment.batches)
        return sorted({sample.group_index for batch in batches for sample in batch.samples})


def _segments(
    run: RunDirectory, sessions: Sequence[SessionRecord], trained: Sequence[TrainedRecord]
) -> Iterator[SessionSegment]:
    ends = [min(later.version for later in sessions[number:]) for number in range(1, len(sessions))]
    for record, end in zip(sessions, [*ends, len(trained)], strict=True):
        if end <= record.version and trained:
            continue
        try:
            config = RunConfig.model_validate(record.config)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise RunDirectoryError(
                f"{run.sessions}: {place}: {first['msg']}: made by another version of pipelinerl"
            ) from error
        batches = []
        for step in trained[record.version : end]:
            batches += [Batch(version=step.version, samples=samples, refused=True) for samples in step.refused]
            batches.append(Batch(version=step.version, samples=step.samples))
        for batch in batches:
            if len(batch.samples) != config.trainer.batch_size:
                raise RunDirectoryError(
                    f"{run.trained}: a batch of step {batch.version} has {len(batch.samples)} rollouts, not "
                    f"{config.trainer.batch_size} (trainer.batch_size)"
                )
        yield SessionSegment(record=record, config=config, start=record.version, end=end, batches=batches)


# ---- rollouts


class Groups:
    """The groups in `rollouts.jsonl`, found by index. Only their places in the file are kept in memory.

    A resumed run generates a group that it lost once more, under the same index. So an index may have several groups.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._groups = RecordedGroups(path)
        self._places: dict[int, list[int]] = {}
        for place, index in enumerate(self._groups.indices):
            if index is None:
                raise RunDirectoryError(f"damaged records: {path}, line {place + 1}")
            self._places.setdefault(index, []).append(place)

    def read(self, index: int) -> list[Group]:
        """The groups of this index, the latest first. Raises RunDirectoryError if a line is not a group."""
        return [self._groups.read(place) for place in reversed(self._places.get(index, []))]


def recorded_samples(
    groups: Groups,
    batches: Sequence[Batch],
    prepare: Callable[[Group], Prepared],
    changed: Callable[[str, int, str], None] | None,
) -> Iterator[tuple[Batch, list[TrainingSample]]]:
    """The samples of recorded batches, prepared again from the recorded groups when the batch is asked for.

    `prepare` is the preprocessor's. `changed` is called for a sample that is not what the run trained on: with the rollout's
    id, the version and what differs. None: advantages may differ. Raises RunDirectoryError for a rollout that is not
    recorded.
    """
    prepared: dict[int, list[dict[str, TrainingSample]]] = {}
    left = Counter(sample.group_index for batch in batches for sample in batch.samples)

    def sample_of(recorded: TrainedSample, version: int) -> TrainingSample:
        index = recorded.group_index
        if index not in prepared:
            try:
                samples = [prepare(group).samples for group in groups.read(index)]
            except RolloutError as error:
                raise RunDirectoryError(f"step {version} can't be repeated: {groups.path}: {error}") from error
            prepared[index] = [{sample.id: sample for sample in some} for some in samples]
        choices = [samples[recorded.id] for samples in prepared[index] if recorded.id in samples]
        left[index] -= 1
        if not left[index]:
            del prepared[index]
        if not choices:
            raise RunDirectoryError(f"step {version} trained on rollout {recorded.id}, which is not in {groups.path}")
        versions = [(_differences(TrainedSample.of(sample, version - 1), recorded), sample) for sample in choices]
        odd, sample = next((pair for pair in versions if not {*pair[0]} - {"advantages"}), versions[0])
        if changed is not None and odd:
            changed(recorded.id, version, " and ".join(odd))
        return sample

    for batch in batches:
        yield batch, [sample_of(recorded, batch.version) for recorded in batch.samples]


def _differences(again: TrainedSample, recorded: TrainedSample) -> list[str]:
    parts = {"tokens or versions": "tokens_digest", "log-probs": "logprobs_digest", "advantages": "advantage"}
    return [name for name, field in parts.items() if getattr(again, field) != getattr(recorded, field)]
