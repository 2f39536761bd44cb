"""Continuing a run from its latest checkpoint: rewinds the streams and plans the session before any process starts."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, cast

import msgspec

from pipelinerl.checkpoint import QueuePosition, latest_checkpoint, load_checkpoint
from pipelinerl.config.keys import differences, show
from pipelinerl.config.load import load_config, merged
from pipelinerl.config.schema import RunConfig
from pipelinerl.config.secrets import without_secrets
from pipelinerl.errors import RunDirectoryError
from pipelinerl.files import JsonLines
from pipelinerl.hub.stream import GroupStream
from pipelinerl.hub.wire import decoded
from pipelinerl.launch.checks import inputs_of
from pipelinerl.launch.hosts.host import open_stream
from pipelinerl.launch.run_lock import last_plan
from pipelinerl.launch.session import KeptGroup, StartPlan
from pipelinerl.metrics.evaluations import EvaluationRecord
from pipelinerl.metrics.reading import read_lines, read_records
from pipelinerl.metrics.records import PublishedRecord, SessionRecord, StepRecord
from pipelinerl.run_directory import RunDirectory, existing_run
from pipelinerl.types import Group, GroupLedger

Overrides = Sequence[str] | Mapping[str, Any]

FIXED = {
    "run_dir": "a run goes on in its own folder",
    "model.path": "its checkpoints are of that model",
    "model.dtype": "its checkpoints and its published weights have that type",
    "model.lora": "its checkpoints depend on it",
    "environment.kind": "its groups are of that environment",
    "stream.kind": "its groups are there",
}
"""The settings that a resume from a checkpoint can't change, and why."""
OF_DATA = ("seed", "environment.", "evaluation.sets")
"""How the names of settings begin that decide which problems are held out."""


def resumed_config(root: Path, overrides: Overrides = ()) -> RunConfig:
    """The settings of a run's next session: those in its `config.yaml` with `overrides` (see `load_config`) on top.

    Raises RunDirectoryError if this is no run directory.
    """
    return load_config(existing_run(root.absolute()).config, overrides)


def changed_settings(config: RunConfig, run: RunDirectory) -> list[str]:
    """A line for each setting, and each file of the environment, that is not as in the last session.

    Raises RunDirectoryError for a setting that can't be changed.
    """
    sessions = read_lines(run.sessions, SessionRecord)
    if not sessions:
        return []
    before, now = merged(RunConfig().model_dump(mode="json"), sessions[-1].config), without_secrets(config)
    for key, why in FIXED.items() if latest_checkpoint(run.root) is not None else ():
        was, wanted = (reduce(getitem, key.split("."), cast(Any, settings)) for settings in (before, now))
        own = key == "run_dir" and (wanted is None or Path(wanted).resolve() == run.root.resolve())
        moved = key == "model.path" and os.path.isabs(was) and not os.path.exists(was)
        if was != wanted and not own and not moved:
            shown = was if isinstance(was, str) else msgspec.json.encode(was).decode()
            raise RunDirectoryError(f"{run.root} was run with {key} {shown}, and {why}: set it to that again")
    changes = [(key, f"{key} {show(was)} -> {show(value)}") for key, was, value in differences(before, now)]
    lines = [f"changed: {line}" for key, line in changes if key != "run_dir"]
    found, recorded = inputs_of(config), sessions[-1].inputs
    files = [f"changed: the content of {path}" for path in found if recorded.get(path, found[path]) != found[path]]
    if files or any(key.startswith(OF_DATA) for key, _ in changes):
        files.append("warning: problems that are held out now may have been trained on before")
    return lines + files


def plan_resume(config: RunConfig, run: RunDirectory) -> tuple[StartPlan, str | None]:
    """Rewind the run's files to its latest checkpoint. Returns the plan of the session that continues there.

    Without a checkpoint, its records are moved into a folder and it starts again from the beginning; a message says so.

    Groups in the stream are kept if no token has a version above the checkpoint's. Groups with tokens of
    later weights, which are lost, are started again. Raises RunDirectoryError if the stream of the run is lost, or the
    checkpoint is beyond `trainer.steps`; raises CheckpointError and StreamError if files are damaged.
    """
    before = last_plan(run)
    if (path := latest_checkpoint(run.root)) is None:
        if config.stream.kind == "redis":  # one in a file is removed with `run.streams`
            with closing(open_stream(config, run, before.run if before else "")) as stream:
                stream.keep(0, lambda _: False)
        done = len(read_records(run.metrics, StepRecord))
        aside = next(path for number in itertools.count(1) if not (path := run.root / f"before-{number}").exists())
        aside.mkdir()
        for path in run.records():
            if path in (run.streams, run.control):  # the latter has the keys of a session
                shutil.rmtree(path)
            else:
                path.rename(aside / path.name)
        shutil.copy(run.config, aside)
        run.make_folders()
        records = f"; the records of its first {done} steps are in {aside}" if done else ""
        return StartPlan(), f"{run.root} has no checkpoint: it starts again from the beginning{records}"
    if config.stream.kind == "memory":
        raise RunDirectoryError(
            f"{run.root} can't be resumed: its stream was in memory and ended with its process, including partly "
            "trained groups; set stream.kind to files for runs that may be resumed"
        )
    state = load_checkpoint(path).state
    if state.version > config.trainer.steps:
        raise RunDirectoryError(
            f"{run.root} is at version {state.version}, beyond trainer.steps {config.trainer.steps}: set --trainer.steps to "
            f"more than {state.version} to continue"
        )
    position, counts, ledger = state.positions, state.counters.queue, state.positions.ledger.copy()
    with closing(open_stream(config, run, before.run if before else "")) as stream:
        kept = take_back(stream, position, ledger, state.version)
    steps = [step for step in read_records(run.metrics, StepRecord) if step.version <= state.version]
    published = {record.version: record.checksum for record in read_lines(run.published, PublishedRecord)}
    # Groups of a session whose trainer ended before it recorded the session are those of the next one: they were sampled
    # with the weights of the checkpoint, and are kept.
    recorded = read_lines(run.sessions, SessionRecord)[-1:]
    begun = before.rollouts_bytes if before and recorded and recorded[0].rollouts_bytes != before.rollouts_bytes else 0
    evaluated = [one for one in read_records(run.evaluations, EvaluationRecord) if one.newest_version <= state.version]
    plan = StartPlan(
        checkpoint=str(path),
        version=state.version,
        checksum=published.get(state.version),
        taken=ledger,
        kept=tuple(kept),
        settled=counts.trained + sum(counts.dropped.values()),
        evaluated=max((one.version for one in evaluated), default=0),
        elapsed_s=steps[-1].time_s if steps else 0.0,
        rollouts_bytes=begun or _size(run.recorded),
        trained_bytes=_size(run.trained),
    )
    return plan, None


_GROUP = msgspec.json.Decoder(Group)


def _size(path: Path) -> int:
    """The size of a file of records, without a partial last line, which a killed process may have left."""
    if not path.exists():
        return 0
    JsonLines(path).close()
    return path.stat().st_size


def take_back(stream: GroupStream, position: QueuePosition, ledger: GroupLedger, version: int) -> list[KeptGroup]:
    """Rewind the stream to the checkpoint of `version`. Returns the kept groups, which are also added to `ledger`.

    `position` is the trainer's position in the stream.
    """
    settled_ids = frozenset(position.settled_ids)
    kept: list[KeptGroup] = []

    def wanted(json: bytes) -> bool:
        group = decoded(_GROUP, 0, json)
        if group.index in ledger or newest_version(group) > version:
            return False
        kept.append(KeptGroup(group.index, sum(rollout.id not in settled_ids for rollout in group.rollouts)))
        ledger.add(group.index)
        return True

    stream.keep(position.offset, wanted)
    return kept


def newest_version(group: Group) -> int:
    """The newest version that computed any token of the group, including prompts."""
    spans = (
        span
        for rollout in group.rollouts
        for turn in rollout.turns
        for span in (*turn.completion.weight_versions, *turn.completion.prompt_versions)
    )
    return max((span.version for span in spans), default=group.started_version)
