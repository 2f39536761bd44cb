"""Continuing a run from its latest checkpoint: rewinds the streams and plans the session before any process starts."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
from pydantic import ValidationError

from pipelinerl.checkpoint import CheckpointState, QueuePosition, latest_checkpoint, load_checkpoint
from pipelinerl.config.keys import differences, show
from pipelinerl.config.load import keys_set, load_config, merged
from pipelinerl.config.schema import RunConfig
from pipelinerl.config.secrets import without_secrets
from pipelinerl.errors import RunDirectoryError
from pipelinerl.files import JsonLines
from pipelinerl.hub.wire import decoded
from pipelinerl.launch.run_lock import last_plan
from pipelinerl.launch.session import KeptGroup, StartPlan
from pipelinerl.launch.streams import PREPARED, ROLLOUTS, open_stream
from pipelinerl.ledger import GroupLedger
from pipelinerl.metrics.evaluations import EvaluationRecord
from pipelinerl.metrics.reading import read_lines, read_records
from pipelinerl.metrics.records import SessionRecord, StepRecord
from pipelinerl.preprocess import newest_version
from pipelinerl.run_directory import RunDirectory
from pipelinerl.stream import GroupStream
from pipelinerl.types import Group, Prepared

T = TypeVar("T")
Overrides = Sequence[str] | Mapping[str, Any]

FIXED = {
    "run_dir": "a run goes on in its own folder",
    "model.path": "its checkpoints are of that model",
    "model.dtype": "its checkpoints and its published weights have that type",
    "model.lora": "its checkpoints depend on it",
    "environment.kind": "its groups are of that environment",
    "stream.kind": "its groups are there",
    "launch.preprocessor": "its groups are there",
}
"""The settings that a resume from a checkpoint can't change, and why."""


def resumed_config(root: Path, overrides: Overrides = ()) -> RunConfig:
    """The settings of a run's next session: those in its `config.yaml` with `overrides` (see `load_config`) on top.

    Raises RunDirectoryError if this is no run directory, and if `config.yaml` is not as the run has left it: each setting
    that differs from the last session's must be in `overrides`.
    """
    run = RunDirectory(root.absolute())
    if not run.config.is_file():
        raise RunDirectoryError(f"{root} is not a run directory (there is no {root / 'config.yaml'})")
    found, last = without_secrets(load_config(run.config)), _last_settings(run)
    left = [last, _begun_settings(run)]  # an interrupted resume may have written the second one
    if last is not None and not any(before is not None and not list(differences(before, found)) for before in left):
        given = [f"{key}." for key in keys_set(overrides)]
        odd = [line for key, line in _changes(last, found) if not any(f"{key}.".startswith(name) for name in given)]
        if odd:
            raise RunDirectoryError(
                "\n  ".join([f"{run.config} is not as the run left it; its last session had other settings:", *odd])
                + "\nset these in the command (--KEY VALUE) if you have changed them, or restore the file, for example with "
                f"cp {run.settings} {run.config}"
            )
    return load_config(run.config, overrides)


def changed_settings(config: RunConfig, run: RunDirectory) -> list[str]:
    """A line for each setting, and each file of the environment, that is not as in the last session.

    Raises RunDirectoryError for a setting that can't be changed.
    """
    before, now = _last_settings(run), without_secrets(config)
    if before is None:
        return []
    for key, why in FIXED.items() if latest_checkpoint(run.root) is not None else ():
        was, wanted = (reduce(getitem, key.split("."), cast(Any, settings)) for settings in (before, now))
        own = key == "run_dir" and (wanted is None or Path(wanted).resolve() == run.root.resolve())
        moved = key == "model.path" and os.path.isabs(was) and not os.path.exists(was)
        if was != wanted and not own and not moved:
            shown = was if isinstance(was, str) else msgspec.json.encode(was).decode()
            raise RunDirectoryError(f"{run.root} was run with {key} {shown}, and {why}: set it to that again")
    lines = [f"changed: {line}" for key, line in _changes(before, now) if key != "run_dir"]
    recorded = next((session.inputs for session in reversed(_lines(run.sessions, SessionRecord))), {})
    from pipelinerl.launch.checks import inputs_of  # noqa: PLC0415 - not after a loss

    found = inputs_of(config)
    return lines + [f"changed: the content of {path}" for path in found if recorded.get(path, found[path]) != found[path]]


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, str]]:
    """Each dotted key whose value differs, and a line on it."""
    return [(key, f"{key} {show(was)} -> {show(value)}") for key, was, value in differences(before, now)]


def _last_settings(run: RunDirectory) -> dict[str, Any] | None:
    """The settings of the last session that trained, without secrets. Before the first one: of the start that failed."""
    sessions = _lines(run.sessions, SessionRecord)
    if not sessions:
        return _begun_settings(run)
    return cast("dict[str, Any]", merged(RunConfig().model_dump(mode="json"), sessions[-1].config))


def _begun_settings(run: RunDirectory) -> dict[str, Any] | None:
    """The settings of the last session that was begun, without secrets; None if they can't be read."""
    try:
        return without_secrets(RunConfig.model_validate_json(run.settings.read_bytes()))
    except (OSError, ValidationError):
        return None


def _set_aside(run: RunDirectory) -> Path:
    """Prepare the directory for a start from the beginning.

    Records move into a new folder, which is returned; streams and control files are removed.
    """
    kept = next(path for number in itertools.count(1) if not (path := run.root / f"before-{number}").exists())
    kept.mkdir()
    records = (
        run.metrics,
        run.evaluations,
        run.sessions,
        run.published,
        run.summary,
        run.curves,
        run.rollouts,
        run.trackers,
    )
    for path in (*records, run.root / "tensorboard", *run.root.glob("timeline-*.jsonl")):
        if path.exists():
            path.rename(kept / path.name)
    shutil.copy(run.config, kept)
    shutil.rmtree(run.streams, ignore_errors=True)
    for path in run.control.iterdir():
        if not path.match("*.ready.json"):  # engine servers may have been kept: the session removes what others left
            path.unlink()
    run.make_folders()
    return kept


def plan_resume(config: RunConfig, run: RunDirectory) -> tuple[StartPlan, str | None]:
    """Rewind the run's files to its latest checkpoint. Returns the plan of the session that continues there.

    Without a checkpoint, the run starts again from the beginning; a message says so.

    Groups in the streams are kept if the checkpoint's version is at least that of all their tokens. Groups with tokens of
    later weights, which are lost, are started again. Raises RunDirectoryError if the stream of the run is lost, or the
    checkpoint is beyond `trainer.steps`; raises CheckpointError and StreamError if files are damaged.
    """
    if (path := latest_checkpoint(run.root)) is None:
        done = len(read_records(run.metrics, StepRecord))
        aside = _set_aside(run)
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
    checksum = _checked_records(run, path, state)
    names = [ROLLOUTS, *([PREPARED] if config.launch.preprocessor == "process" else [])]
    with ExitStack() as opened:
        run_id = before.run if (before := last_plan(run)) else ""
        streams = {name: opened.enter_context(closing(open_stream(config, run, run_id, name))) for name in names}
        kept = take_back(streams, position, ledger, state.version)
    steps = [step for step in read_records(run.metrics, StepRecord) if step.version <= state.version]
    evaluated = [one for one in read_records(run.evaluations, EvaluationRecord) if one.newest_version <= state.version]
    plan = StartPlan(
        checkpoint=str(path),
        version=state.version,
        checksum=checksum,
        taken=ledger,
        kept=tuple(kept),
        settled=counts.trained + sum(counts.dropped.values()),
        evaluated=max((one.version for one in evaluated), default=0),
        elapsed_s=steps[-1].time_s if steps else 0.0,
        rollouts_bytes=_unrecorded(run) or _size(run.recorded),
        trained_bytes=_size(run.trained),
    )
    return plan, None


_GROUP, _PREPARED = msgspec.json.Decoder(Group), msgspec.json.Decoder(Prepared)


class _Published(msgspec.Struct):
    version: int
    checksum: str = ""


class _Sample(msgspec.Struct):
    group_index: int


class _Trained(msgspec.Struct):
    version: int
    samples: list[_Sample]


class _GroupLine(msgspec.Struct):
    index: int


def _lines(path: Path, kind: type[T]) -> list[T]:
    return read_lines(path, kind) if path.exists() else []


def _checked_records(run: RunDirectory, checkpoint: Path, state: CheckpointState) -> str | None:
    """The published checksum of the checkpoint's version, if there is one.

    Raises RunDirectoryError if the records lack a part of what led to the checkpoint, or are damaged.
    """

    def require(whole: bool, file: Path, what: str) -> None:
        if not whole:
            raise RunDirectoryError(
                f"{file} lacks {what}, which led to {checkpoint.name}: restore it from a copy, or start a new run from the "
                f"checkpoint with --model.path {checkpoint}"
            )

    groups = {group.index for group in _lines(run.recorded, _GroupLine)}
    sessions = _lines(run.sessions, SessionRecord)
    require(bool(sessions) and sessions[0].version == 0, run.sessions, "the first session")
    require(state.session in ("", *(session.id for session in sessions)), run.sessions, f"session {state.session}")
    metrics = {step.version for step in read_records(run.metrics, StepRecord)}
    trained = {step.version: step for step in _lines(run.trained, _Trained)}
    published = {record.version: record.checksum for record in _lines(run.published, _Published)}
    for version in range(1, state.version + 1):
        require(version in metrics, run.metrics, f"step {version}")
        require(version in trained, run.trained, f"step {version}")
        lost = next((sample.group_index for sample in trained[version].samples if sample.group_index not in groups), None)
        require(lost is None, run.recorded, f"group {lost} of step {version}")
        made = [session for session in sessions if session.version < version][-1].config
        # The weights of the last version of a session are published again by the next one.
        every = made.get("schedule", {}).get("kind") == "pipeline" and version < state.version
        require(version in published or not every, run.published, f"version {version}")
    require(0 in published, run.published, "version 0")
    return published.get(state.version)


def _unrecorded(run: RunDirectory) -> int | None:
    """Where the groups begin of a session whose trainer ended before it recorded the session: they are the next one's.

    They were sampled with the weights of the checkpoint, and are kept.
    """
    recorded, planned = _lines(run.sessions, SessionRecord)[-1:], last_plan(run)
    if planned is None or not recorded or recorded[0].rollouts_bytes == planned.rollouts_bytes:
        return None
    return planned.rollouts_bytes


def _size(path: Path) -> int:
    """The size of a file of records, without a partial last line, which a killed process may have left."""
    if not path.exists():
        return 0
    JsonLines(path).close()
    return path.stat().st_size


def take_back(
    streams: Mapping[str, GroupStream], position: QueuePosition, ledger: GroupLedger, version: int
) -> list[KeptGroup]:
    """Rewind the streams to the checkpoint of `version`. Returns the kept groups, which are also added to `ledger`.

    `position` is the trainer's position in the stream that it reads: the prepared one, if there is one. A group may then be
    in both streams, if the launcher was killed between writing it to one and removing it from the other; it is kept once.
    """
    settled_ids = frozenset(position.settled_ids)
    kept: list[KeptGroup] = []

    def keep(index: int, newest: int, ids: Iterable[str]) -> bool:
        wanted = index not in ledger and newest <= version
        if wanted:
            kept.append(KeptGroup(index, sum(rollout_id not in settled_ids for rollout_id in ids)))
            ledger.add(index)
        return wanted

    def keep_prepared(json: bytes) -> bool:
        item = decoded(_PREPARED, 0, json)
        return keep(item.index, item.newest_version, item.ids)

    def keep_group(json: bytes) -> bool:
        group = decoded(_GROUP, 0, json)
        return keep(group.index, newest_version(group), [rollout.id for rollout in group.rollouts])

    if PREPARED in streams:
        streams[PREPARED].keep(position.offset, keep_prepared)
    streams[ROLLOUTS].keep(0 if PREPARED in streams else position.offset, keep_group)
    return kept
