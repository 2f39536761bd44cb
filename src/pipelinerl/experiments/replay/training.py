"""Repeats the training side of a run: the run's own trainer, which reads recorded batches instead of groups from a stream.

sessions.jsonl            ─▶ SessionSegment: the steps that one session took, and its configuration
rollouts/trained.jsonl    ─▶ Batch: the rollouts of a step, in order, and whether the ESS guard rejected it
rollouts/rollouts.jsonl   ─▶ the rollouts themselves, read from the file as they are needed
published.jsonl           ─▶ the checksum and the digests of every published version

recorded batch ──▶ TrainingReplay.read ──▶ SampleQueue ──▶ Trainer.pump ──▶ TrainingReplay.send, write
                                                                            (compared with the records)

A session that was resumed from a checkpoint is repeated the same way: the replay's trainer writes a checkpoint where the
session began, and the next trainer resumes from it.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
import torch
from pydantic import ValidationError
from torch import Tensor

from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import (
    PolicyMismatchError,
    ReplayDifferenceError,
    RolloutError,
    RunDirectoryError,
    RunInterruptedError,
    TrainingDivergedError,
)
from pipelinerl.experiments.browse import RecordedGroups
from pipelinerl.experiments.recompute import SavedWeights
from pipelinerl.experiments.replay.generation import GenerationResult
from pipelinerl.files import JsonLines
from pipelinerl.interfaces import Board, Verdict
from pipelinerl.launch.hosts.embedded import torch_threads
from pipelinerl.launch.hosts.host import LocalWorker
from pipelinerl.launch.session import Session, StartPlan, WorkerSpec, write_session
from pipelinerl.launch.stages.preprocessing import make_preprocessor
from pipelinerl.launch.stages.training import Policy, lead_ranks, load_policy, open_trainer
from pipelinerl.metrics.reading import read_lines, read_records
from pipelinerl.metrics.records import FORMAT, PublishedRecord, SessionRecord, StepRecord, TrainedRecord, TrainedSample
from pipelinerl.models.state import checksum, digests_of
from pipelinerl.process.child import stop_all
from pipelinerl.resources.roles import PREPROCESSING_THREADS, TRAINING, rank_roles
from pipelinerl.run_directory import RunDirectory
from pipelinerl.schedule import Schedule, make_schedule
from pipelinerl.status.board import MemoryBoard
from pipelinerl.trainer.saving import restore_rng
from pipelinerl.trainer.status import trained_sample
from pipelinerl.trainer.trainer import Trainer
from pipelinerl.types import Group, Prepared, TrainingSample, UpdateReceipt, WeightTransfer

if TYPE_CHECKING:
    from pipelinerl.trainer.sharding.ranks import Team

RANKS_PATIENCE_S = 10.0
SAY_EVERY_S = 10.0
OF_THE_COURSE = {
    *("time_s", "train_s", "wait_s", "publish_s", "saving_s", "cpu_s", "update", "engine", "queued", "dropped"),
    *("actor_dropped", "actor_dropped_tokens", "sampled_length_mean", "started_length_mean", "reward_read_mean"),
}
"""The metrics of a step that do not follow from its batch. All others must be the run's to the bit."""

COLUMNS = {"gradient norm": "grad_norm", "ESS": "ess", "clipped": "masked_fraction", "truncated": "truncated_fraction"}
"""Column of the table -> metric of a step. `clipped` includes tokens that the correction masks."""
METRICS = (*COLUMNS.values(), "kl_behaviour_policy", "loss", "learning_rate")
NAMED = 3
"""Number of differences, and of rollouts in one, that a message names."""


# ---- the records of a run


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """The rollouts of step `version - 1` to `version`, in order. `refused`: the ESS guard rejected them, before the step."""

    version: int
    samples: tuple[TrainedSample, ...]
    refused: bool = False


class SessionSegment(NamedTuple):
    """The steps of one session that count: from the weights of `record.version` to those of version `end`."""

    record: SessionRecord
    config: RunConfig
    end: int
    batches: Sequence[Batch]


class RecordedRun:
    """The records of a run directory. Raises RunDirectoryError if they are missing, damaged or of another format."""

    def __init__(self, run_dir: Path) -> None:
        self.run = RunDirectory(run_dir)
        formats = {session.get("format", 0) for session in read_lines(self.run.sessions, dict[str, Any])}
        if other := sorted(formats - {FORMAT}):
            named = ", ".join(map(str, other))
            raise RunDirectoryError(f"{run_dir} has records of format {named}; this version of pipelinerl replays {FORMAT}")
        if lacks := [path.name for path in (self.run.sessions, self.run.trained, self.run.published) if not path.exists()]:
            raise RunDirectoryError(
                f"{run_dir} can't be replayed: it has no {lacks[0]}, so it took no step, an earlier version of pipelinerl "
                "made it, or parts of it are missing"
            )
        sessions = read_lines(self.run.sessions, SessionRecord)
        trained = read_lines(self.run.trained, TrainedRecord, lambda old, new: old.version >= new.version)
        published = read_lines(self.run.published, PublishedRecord, lambda old, new: old.version >= new.version)
        if not sessions or sessions[0].version != 0:
            raise RunDirectoryError(f"{self.run.sessions} lacks the first session of the run")
        if [record.version for record in trained] != list(range(1, len(trained) + 1)):
            raise RunDirectoryError(f"{self.run.trained} lacks steps: its versions are not 1, 2, 3, ...")
        self.steps = len(trained)
        self.published = {record.version: record for record in published}
        self.metrics = {record.version: record for record in read_records(self.run.metrics, StepRecord)}
        self.segments = tuple(_segments(self.run, sessions, trained))
        self.groups = RecordedGroups(self.run.recorded)


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
        yield SessionSegment(record, config, end, batches)


def recorded_samples(
    run: RecordedRun,
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
    path, parts = run.run.recorded, {"tokens or versions": "tokens_digest", "log-probs": "logprobs_digest"}
    of_credit = {"advantages": "advantage", "advantages of tokens": "advantages_digest"}
    parts |= of_credit

    def sample_of(recorded: TrainedSample, version: int) -> TrainingSample:
        index = recorded.group_index
        if index not in prepared:
            try:
                samples = [prepare(group).samples for group in run.groups.read(index)]
            except RolloutError as error:
                raise RunDirectoryError(f"step {version} can't be repeated: {path}: {error}") from error
            prepared[index] = [{sample.id: sample for sample in some} for some in samples]
        choices = []
        for sample in (samples[recorded.id] for samples in prepared[index] if recorded.id in samples):
            again = trained_sample(sample, version - 1)
            choices.append(([what for what, of in parts.items() if getattr(again, of) != getattr(recorded, of)], sample))
        left[index] -= 1
        if not left[index]:
            del prepared[index]
        if not choices:
            raise RunDirectoryError(f"step {version} trained on rollout {recorded.id}, which is not in {path}")
        odd, sample = next((pair for pair in choices if not {*pair[0]} - of_credit.keys()), choices[0])
        if changed is not None and odd:
            changed(recorded.id, version, " and ".join(odd))
        return sample

    for batch in batches:
        yield batch, [sample_of(recorded, batch.version) for recorded in batch.samples]


# ---- the replay


class ReplayResult(msgspec.Struct, kw_only=True):
    """The results, as written to `replay.json`. The parts of a replay fill them in.

    exact          the run was repeated as it was; otherwise `settings` were changed
    compared       published versions whose checksum the run recorded and the replay has, too
    saved          number of checkpoints and copies of weights that have the recorded checksum of their version
    unrecorded     published versions whose checksum the run did not record: it was ending when it published them
    differences    empty if everything was repeated; the first one is the first in the run
    warnings       what is other here than where the run trained
    metrics        counterfactuals: for the step to each version, pairs of metrics in the run and in the replay
    tolerance      of the log-probs of `generation`
    """

    run: str
    exact: bool
    steps: int
    settings: dict[str, Any] = {}
    compared: set[int] = set()
    saved: int = 0
    unrecorded: set[int] = set()
    time_s: float = 0.0
    differences: list[str] = []
    warnings: list[str] = []
    metrics: list[dict[str, Any]] = []
    generation: GenerationResult | None = None
    tolerance: float = 0.0


@dataclass(kw_only=True)
class TrainingReplay:
    """A replay of the first `result.steps` steps of `run`. It is the stream and the weight sender of the trainer.

    folder        gets the checkpoints and records of the replay; with `keep_last` also a checkpoint at the end
    change        changes a session's configuration. If the replay is not `exact`, the ESS guard is off, batches that it
                  rejected are left out, and advantages may differ
    weights       gets the published weights of the versions in `needed`
    result        gets what was compared, and the differences
    """

    run: RecordedRun
    result: ReplayResult
    folder: RunDirectory
    weights: SavedWeights
    stop: Callable[[], bool]
    say: Callable[[str], None]
    change: Callable[[RunConfig], RunConfig]
    keep_last: bool
    needed: set[int]
    _first_step: str = ""
    _changed: dict[tuple[int, str], list[str]] = field(default_factory=dict)
    _batches: int = 0
    _offered: Prepared | None = None
    _said_s: float = field(default_factory=time.monotonic)
    _metrics: JsonLines = field(init=False)

    def repeat(self) -> None:
        """Repeat training. The differences are the first one from the run, and all rollouts that were changed.

        Raises RunInterruptedError once `stop` returns True and, in a counterfactual, errors of training.
        """
        found, checkpoint = self.result.differences, None
        segments = [segment for segment in self.run.segments if segment.record.version < self.result.steps]
        try:
            for segment in segments:
                checkpoint = self._replay(segment, checkpoint, save=self.keep_last or segment is not segments[-1])
            found += [self._first_step] if self._first_step else []
        except ReplayDifferenceError as error:
            found.append(str(error))
        except (PolicyMismatchError, TrainingDivergedError) as error:
            if not self.result.exact:
                raise
            found.append(f"training ended, which the run's did not: {error}")
        for (version, what), rollouts in self._changed.items():
            more = f" and {len(rollouts) - NAMED} more" if len(rollouts) > NAMED else ""
            names = ", ".join(rollouts[:NAMED]) + more
            found.append(f"the batch of step {version} has other {what} than were trained on, in {names}")

    def _replay(self, segment: SessionSegment, checkpoint: Path | None, *, save: bool) -> Path | None:
        """Repeat one session, from a checkpoint of the one before. Returns its last checkpoint if it is to `save` one."""
        session = self._session(segment, checkpoint)
        config, board = session.config, MemoryBoard()
        with ExitStack() as stack:
            stack.enter_context(torch_threads(config.trainer.threads or 1))
            team = stack.enter_context(_rank_processes(session, board)) if config.trainer.ranks > 1 else None
            policy = load_policy(session, team)
            self._metrics = stack.enter_context(JsonLines(self.folder.metrics))
            trainer = stack.enter_context(open_trainer(session, board, policy, self, self, record=self.record))
            restore_rng(segment.record.rng)
            trainer.start()
            self._feed(trainer, segment, _prepare(config, policy))
            if not save:
                return None
            trainer.finish()
            return self.folder.checkpoints / f"step_{trainer.version:08d}"

    def _session(self, segment: SessionSegment, checkpoint: Path | None) -> Session:
        """The segment's session, in the replay's folder. Only what changes no result is different."""
        config = self.change(segment.config)
        changes: dict[str, Any] = {
            "checkpoint_every": 0,
            "weights_every": 0,
            "keep_checkpoints": 1,
            "threads": config.trainer.threads or segment.record.threads,
        }
        if not self.result.exact:
            changes["ess_threshold"] = 0.0
        launch = config.launch.model_copy(update={"kind": "processes"})  # all ranks are on this machine
        config = config.model_copy(update={"trainer": config.trainer.model_copy(update=changes), "launch": launch})
        plan = StartPlan(checkpoint=None if checkpoint is None else str(checkpoint), version=segment.record.version)
        schedule = cast("Schedule", _OneBatch(make_schedule(config), config.trainer.batch_size))
        session = Session(config, self.folder, plan, schedule, time.monotonic())
        write_session(session)
        return session

    def _feed(self, trainer: Trainer, segment: SessionSegment, prepare: Callable[[Group], Prepared]) -> None:
        """Give the trainer one recorded batch after another. Each is one group, so that batches stay as they are."""
        exact, steps = self.result.exact, self.result.steps
        wanted = [one for one in segment.batches if one.version <= steps and (exact or not one.refused)]

        def changed(rollout: str, version: int, what: str) -> None:
            self._changed.setdefault((version, what), []).append(rollout)

        for batch, samples in recorded_samples(self.run, wanted, prepare, changed if exact else None):
            if self.stop():
                raise RunInterruptedError(f"the replay was stopped at version {trainer.version}")
            self._batches, number = self._batches + 1, self._batches  # which the replay has not used before
            renamed = tuple(msgspec.structs.replace(sample, group_index=number) for sample in samples)
            ids = tuple(sample.id for sample in samples)
            self._offered = Prepared(index=number, ids=ids, samples=renamed)
            stopped: PolicyMismatchError | None = None
            try:
                trainer.pump()
            except PolicyMismatchError as error:
                stopped = error
            refused = stopped is not None or trainer.version < batch.version
            if refused != batch.refused and exact:
                did = {True: "rejected", False: "accepted"}
                raise ReplayDifferenceError(
                    f"the ESS guard {did[refused]} a batch of step {batch.version}, which the run's {did[batch.refused]}"
                )
            if stopped is not None:
                raise stopped

    # ---- the stream that the trainer reads

    def read(self, limit: int) -> Sequence[tuple[int, Prepared]]:  # noqa: ARG002 - there is at most one
        offered, self._offered = self._offered, None
        return [] if offered is None else [(offered.index, offered)]

    def commit(self, offset: int) -> None:
        """Nothing is stored."""

    # ---- the sender of its weights, without engines

    transfer: WeightTransfer | None = None
    digests: Mapping[str, str] = field(default_factory=dict)

    def send(self, version: int, tensors: Mapping[str, Tensor], _: Mapping[str, Tensor]) -> str:
        """Raises ReplayDifferenceError, with the first parameter, for other weights than the run published."""
        self.digests = digests_of(tensors)
        whole = checksum(tensors, self.digests)
        if version in self.needed:
            self.weights.save(version, tensors)
        recorded = self.run.published.get(version)
        if self.result.exact and recorded is None:
            self.result.unrecorded.add(version)
        elif self.result.exact and recorded is not None:
            if recorded.checksum != whole:
                found = {name: digest[:16] for name, digest in self.digests.items()}
                odd = [name for name in {**recorded.digests, **found} if recorded.digests.get(name) != found.get(name)]
                first = f"{self._first_step}; " if self._first_step else ""
                what = f"first in parameter {odd[0]} ({len(odd)} of {len(found)} differ)" if odd else "but in no parameter"
                raise ReplayDifferenceError(f"{first}the weights of version {version} differ from the run's, {what}")
            self.result.compared.add(version)
        return whole

    def unanswered(self) -> Sequence[str]:
        return ()

    def receipts(self) -> Sequence[UpdateReceipt]:
        return ()

    # ---- its metrics

    def record(self, record: StepRecord) -> None:
        """Raises RunDirectoryError if the run has no metrics of this step."""
        self._metrics.write(record)
        recorded = self.run.metrics.get(record.version)
        if recorded is None:
            raise RunDirectoryError(f"{self.run.run.metrics} lacks step {record.version}")
        if not self.result.exact:
            pairs = {name: (getattr(recorded, name), getattr(record, name)) for name in METRICS}
            self.result.metrics.append({"version": record.version} | pairs)
        elif not self._first_step:
            written = msgspec.json.decode(msgspec.json.encode(record), type=StepRecord)  # what is not finite is null there
            names = [name for name in recorded.__struct_fields__ if name not in OF_THE_COURSE]
            odd = next((name for name in names if getattr(recorded, name) != getattr(written, name)), None)
            if odd is not None:
                now, before = getattr(written, odd), getattr(recorded, odd)
                self._first_step = f"step {record.version} has {odd} {now}, the run's had {before}"
        if time.monotonic() - self._said_s > SAY_EVERY_S:
            self._said_s = time.monotonic()
            self.say(f"step {record.version} of {self.result.steps}")

    def close(self) -> None:
        """Nothing is open."""


class _OneBatch:
    """The run's schedule, for a trainer that gets one batch at a time: it need not wait for a whole round."""

    in_rounds = False

    def __init__(self, schedule: Schedule, batch_size: int) -> None:
        self._schedule = schedule
        self._batch_size = batch_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._schedule, name)

    def may_train(self, version: int, queued: int) -> Verdict:  # noqa: ARG002 - as in every schedule
        return Verdict(queued >= self._batch_size, "a recorded batch")


def _prepare(config: RunConfig, policy: Policy) -> Callable[[Group], Prepared]:
    """Prepares groups as the run did: a preprocessor in a process of its own had its own reference model, and one thread."""
    apart = config.launch.preprocessor == "process"
    prepare_one = make_preprocessor(config) if apart else make_preprocessor(config, policy.lora)
    threads = PREPROCESSING_THREADS if apart else torch.get_num_threads()

    def prepare(group: Group) -> Prepared:
        with torch_threads(threads):
            return prepare_one(group)

    return prepare


@contextlib.contextmanager
def _rank_processes(session: Session, board: Board) -> Iterator[Team]:
    """The other ranks of a sharded trainer, as processes of their own; this process is rank 0."""
    session.run.ready_file(TRAINING).unlink(missing_ok=True)  # of the session before
    spec = WorkerSpec(threads=session.config.trainer.threads or 1)
    workers: list[LocalWorker] = []
    try:
        workers += (LocalWorker(session.run, role, spec) for role in rank_roles(session.config))
        with lead_ranks(session, board) as team:
            yield team
        for worker in workers:
            worker.wait(RANKS_PATIENCE_S)
    finally:
        stop_all(workers, RANKS_PATIENCE_S)
