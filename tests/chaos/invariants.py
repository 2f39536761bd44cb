"""What the records of a finished run must say, however often it was killed and resumed. Nothing here looks at a process.

`check` returns one line for each violation. A stronger check of the same records is `pipelinerl replay`, which repeats the
training to the bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.errors import PipelineRLError
from pipelinerl.experiments.replay.training import RecordedRun, recorded_samples
from pipelinerl.launch.resume import newest_version
from pipelinerl.metrics.reading import read_lines, read_records, without_repeated
from pipelinerl.metrics.records import PublishedRecord, SessionRecord, StepRecord, TrainedRecord, TrainedSample
from pipelinerl.preprocess.preprocessor import prepare
from pipelinerl.run_directory import RunDirectory
from pipelinerl.types import Group, TrainingSample

MOST_SAID = 3
"""Violations of one kind that are listed; the others are counted."""


def check(run_dir: Path) -> list[str]:
    """The violations."""
    try:
        checks = _Records(run_dir)
        found = [
            *checks.steps(),
            *checks.samples(),
            *checks.once(),
            *checks.conserved(),
            *checks.abandoned(),
            *checks.published(),
        ]
    except (PipelineRLError, OSError, ValueError) as error:
        return [f"the records can't be read: {error}"]
    return _shortened(found)


def _shortened(found: Sequence[tuple[str, str]]) -> list[str]:
    counts = Counter(kind for kind, _ in found)
    said: Counter[str] = Counter()
    lines = []
    for kind, text in found:
        said[kind] += 1
        if said[kind] <= MOST_SAID:
            more = counts[kind] - MOST_SAID if said[kind] == MOST_SAID else 0
            lines.append(f"{kind}: {text}" + (f" (and {more} more)" if more > 0 else ""))
    return lines


Found = Iterator[tuple[str, str]]
"""Kind and text of violations."""


@dataclass
class _Records:
    run_dir: Path

    def __post_init__(self) -> None:
        self.run = RunDirectory(self.run_dir)
        self.recorded = RecordedRun(self.run_dir)
        self.groups = read_lines(self.run.rollouts / "rollouts.jsonl", Group)
        self.metrics = read_records(self.run.metrics, StepRecord)
        self.raw = read_lines(self.run.trained, TrainedRecord)
        self.trained = without_repeated(self.raw, lambda old, new: old.version >= new.version)
        self.summary: dict[str, Any] = msgspec.json.decode(self.run.summary.read_bytes(), type=dict[str, Any])
        self.config = self.recorded.segments[-1].config
        self.sessions = read_lines(self.run.sessions, SessionRecord)
        groups = (self.run.rollouts / "rollouts.jsonl").read_bytes()
        self.first_groups = [groups.count(b"\n", 0, session.rollouts_bytes) for session in self.sessions]
        steps = self.run.trained.read_bytes()
        self.first_steps = [steps.count(b"\n", 0, session.trained_bytes) for session in self.sessions]

    def steps(self) -> Found:
        """The run reached its goal, and took each step once, in order of version and time."""
        goal, batch = self.config.trainer.steps, self.config.trainer.batch_size
        if self.summary["status"] != "finished" or self.summary["version"] != goal:
            yield (
                "steps",
                f"the run is {self.summary['status']} at version {self.summary['version']}, not finished at {goal}",
            )
        for name, versions in (
            ("metrics.jsonl", [step.version for step in self.metrics]),
            (self.run.trained.name, [record.version for record in self.trained]),
        ):
            if versions != list(range(1, goal + 1)):
                odd = next((number for number, version in enumerate(versions, 1) if number != version), len(versions) + 1)
                yield "steps", f"{name} has {len(versions)} steps, not 1 to {goal}: the first odd one is at {odd}"
        for before, after in pairwise(self.metrics):
            if after.time_s < before.time_s:
                yield "steps", f"step {after.version} ended {before.time_s - after.time_s:.3f} s before the previous one"
        for record, step in zip(self.trained, self.metrics, strict=False):
            if not len(record.samples) == step.samples == batch:
                yield "steps", f"step {record.version} has {len(record.samples)} rollouts, and {step.samples} in the metrics"

    def samples(self) -> Found:
        """What was trained on is what was handed over, with spans that fit the step and the lag bound."""
        for segment in self.recorded.segments:
            changes: list[tuple[str, str]] = []

            def changed(rollout: str, version: int, what: str, into: list[tuple[str, str]] = changes) -> None:
                into.append(("samples", f"step {version}: {what} of {rollout} are not those that were handed over"))

            config = segment.config
            # A reference model does not change the digests.
            prepared = partial(prepare, config=config.preprocess)
            for batch, samples in recorded_samples(self.recorded, segment.batches, prepared, changed):
                for record, sample in zip(batch.samples, samples, strict=True):
                    yield from self._fits(record, sample, batch.version, config.schedule.max_lag)
            yield from changes

    def _fits(self, record: TrainedSample, sample: TrainingSample, version: int, max_lag: int | None) -> Found:
        versions, name = sample.versions, f"step {version}: {record.id}"
        if list(versions) != sorted(versions):
            yield "versions", f"{name} has tokens of version {versions}: they fall"
        if (version - 1 - max(versions), version - 1 - min(versions)) != (record.lag_min, record.lag_max):
            yield "versions", f"{name} has lags {record.lag_min} to {record.lag_max}, its tokens say otherwise"
        if record.lag_min < 0:
            yield "versions", f"{name} has a token of version {max(versions)}, which did not exist yet"
        if max_lag is not None and version - 1 - min(versions) > max_lag:
            yield "lag", f"{name} has a token of lag {version - 1 - min(versions)}; schedule.max_lag is {max_lag}"

    def once(self) -> Found:
        """No rollout is trained on or dropped twice, and no group handed over twice in a session."""
        handed_over = Counter((_session(line, self.first_groups), group.index) for line, group in enumerate(self.groups))
        for (session, index), times in handed_over.items():
            if times > 1:
                yield "once", f"group {index} was handed over {times} times in session {session + 1}"
        ends = Counter(sample.id for record in self.trained for sample in record.samples)
        ends.update(one.id for record in self.trained for one in record.dropped)
        for rollout, times in ends.items():
            if times > 1:
                yield "once", f"{rollout} was trained on or dropped {times} times"

    def conserved(self) -> Found:
        """Every group that was started is handed over or in progress; every rollout has one end, or waits."""
        if error := self.summary.get("conservation_error"):
            yield "conservation", f"the summary says: {error}"
        latest = {group.index: group for group in self.groups}
        dropped: dict[str, int] = self.summary["rollouts_dropped"]
        settled = {sample.id for record in self.trained for sample in record.samples}
        left_out = {one.id for record in self.trained for one in record.dropped}
        handed_over = {rollout.id for group in latest.values() for rollout in group.rollouts}
        waiting = len(handed_over - settled - left_out)
        queued, late = self.summary["rollouts_queued"], sum(dropped.values()) - len(left_out)
        # A resume starts groups again that ended after its checkpoint. They may be in progress when it ends.
        before = {group.index: group for group in self.groups[: self.first_groups[-1]]}
        open_before = [group for index, group in before.items() if group is latest[index]]
        again = [group for group in open_before if not {rollout.id for rollout in group.rollouts} & (settled | left_out)]
        late += sum(len(group.rollouts) for group in again)
        if not queued <= waiting <= queued + late:
            yield "conservation", f"{waiting} rollouts that were handed over have no end, but {queued} are queued"
        in_progress = self.summary["rollouts_in_progress"]
        missing = [index for index in range(max(latest, default=0)) if index not in latest]
        size = self.config.actor.group_size
        most = in_progress + sum(dropped.values())  # failed attempts of unfinished groups count as dropped
        if self.config.engine.processes > 1:  # one may have groups at hand that it has not begun, before those of another
            most += self.config.engine.processes * self.config.engine.slots
        # A session that begins at the goal starts nothing: groups that a killed one had in progress stay unfinished.
        resumed_at_goal = self.sessions[-1].version >= self.config.trainer.steps
        if len(missing) * size > most and not resumed_at_goal:
            text = f"{len(missing)} groups were started and not handed over ({str(missing[:5])[1:-1]})"
            yield "conservation", f"{text}, but {in_progress} rollouts are in progress"
        for group in latest.values():
            if group.started != len(group.rollouts) + sum(group.dropped.values()):
                yield "conservation", f"group {group.index}: {group.started} attempts are not its rollouts and failures"

    def abandoned(self) -> Found:
        """No token of weights that a resume abandoned is trained on after it."""
        prepared: dict[int, list[tuple[int, Group]]] = {}
        for number, group in enumerate(self.groups):
            prepared.setdefault(group.index, []).append((_session(number, self.first_groups), group))
        kept = {id(record) for record in self.trained}
        for number, record in enumerate(self.raw):
            if id(record) not in kept:
                continue
            now = _session(number, self.first_steps)
            for index in {sample.group_index for sample in record.samples}:
                made = [(session, group) for session, group in prepared.get(index, ()) if session <= now]
                if not made:
                    yield "past", f"step {record.version} trained on group {index}, which was handed over later"
                    continue
                session, group = made[-1]
                resumed = [later.version for later in self.sessions[session + 1 : now + 1]]
                if resumed and newest_version(group) > min(resumed):
                    text = f"step {record.version} trained on group {index} with tokens of version {newest_version(group)}"
                    yield "past", f"{text}, which the resume at version {min(resumed)} abandoned"

    def published(self) -> Found:
        """A version that is published again has the same weights, except after a resume at an earlier one."""
        history: dict[int, str] = {}
        for record in read_lines(self.run.published, PublishedRecord):
            before = history.get(record.version)
            history = {version: checksum for version, checksum in history.items() if version < record.version}
            if before is not None and before != record.checksum:
                yield "published", f"version {record.version} was published with two checksums"
            history[record.version] = record.checksum
        missing = set(range(self.config.trainer.steps)) - history.keys()
        if missing and self.config.schedule.kind == "pipeline":
            yield "published", f"versions {sorted(missing)[:5]} were not published"


def _session(line: int, first: Sequence[int]) -> int:
    """The number of the session that wrote this line. `first`: the first line of each session."""
    return sum(begin <= line for begin in first) - 1
