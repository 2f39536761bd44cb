"""Repeats the training side of a run: the run's own trainer, which reads recorded batches instead of groups from a stream.

RecordedSamples ──batch──▶ BatchStream ──▶ SampleQueue ──▶ Trainer.pump ──▶ Observer: weights and metrics of every step

A session that was resumed from a checkpoint is repeated the same way: the replay's trainer writes a checkpoint where the
session began, and the next trainer resumes from it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec
import torch
from torch import Tensor

from pipelinerl.checkpoint import restore_rng
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import PolicyMismatchError, RunInterruptedError
from pipelinerl.experiments.replay.records import Batch, RecordedRun, RecordedSamples, SessionSegment
from pipelinerl.experiments.runs import rank_processes
from pipelinerl.files import JsonLines
from pipelinerl.interfaces import Schedule, Verdict
from pipelinerl.launch.hosts.embedded import torch_threads
from pipelinerl.launch.run import write_session
from pipelinerl.launch.session import Session, StartPlan
from pipelinerl.launch.stages.preprocessing import make_preprocessor
from pipelinerl.launch.stages.training import Policy, TrainingLogs, build_trainer, load_policy
from pipelinerl.metrics.records import StepRecord
from pipelinerl.metrics.sinks import JsonlSink, Record, Sink
from pipelinerl.models.state import checksum, digests_of
from pipelinerl.resources.share import PREPROCESSING_THREADS
from pipelinerl.run_directory import RunDirectory
from pipelinerl.schedule import make_schedule
from pipelinerl.status.board import MemoryBoard
from pipelinerl.trainer import Trainer
from pipelinerl.types import Group, Prepared, TrainingSample, UpdateReceipt, WeightTransfer


class Observer(Protocol):
    """What is told of a replay's progress. An exception ends the replay."""

    def published(self, version: int, tensors: Mapping[str, Tensor], checksum: str, digests: Mapping[str, str]) -> None:
        """The run published the weights of `version`, and these are the replay's."""

    def stepped(self, record: StepRecord) -> None: ...

    def refused(self, batch: Batch, refused: bool) -> None:
        """What the ESS guard did with a batch."""

    def changed(self, rollout: str, version: int, what: str) -> None:
        """`what` of this rollout, as recorded, is not what the step to `version` trained on."""


@dataclass(frozen=True, kw_only=True)
class TrainingReplay:
    """A replay of the first `steps` steps of `run`.

    `change` changes a session's configuration. `exact`: the results should be those of the run. Otherwise the ESS guard is
    off, batches that it rejected are left out, and advantages may differ. `keep_last`: write a checkpoint at the end.
    """

    run: RecordedRun
    steps: int
    folder: RunDirectory
    observer: Observer
    stop: Callable[[], bool]
    change: Callable[[RunConfig], RunConfig] = lambda config: config
    exact: bool = True
    keep_last: bool = False

    def __call__(self) -> None:
        """Raises what the observer raises, errors of training, and RunInterruptedError when `stop` returns True."""
        checkpoint: Path | None = None
        numbers = itertools.count()
        segments = [segment for segment in self.run.segments if segment.start < self.steps]
        for segment in segments:
            last = segment is segments[-1]
            checkpoint = self._replay(segment, checkpoint, numbers, save=self.keep_last or not last)

    def _replay(
        self, segment: SessionSegment, checkpoint: Path | None, numbers: Iterator[int], *, save: bool
    ) -> Path | None:
        session = self._session(segment, checkpoint)
        config, board = session.config, MemoryBoard()
        with ExitStack() as stack:
            stack.enter_context(torch_threads(config.trainer.threads or 1))
            team = stack.enter_context(rank_processes(session, board)) if config.trainer.ranks > 1 else None
            policy = load_policy(session, team)
            logs = stack.enter_context(self._logs())
            stream = BatchStream(numbers)
            sender = _ObservedSender(self.observer)
            trainer = build_trainer(session, board, policy, reader=stream, sender=sender, logs=logs)
            restore_rng(segment.record.rng)
            found = self.observer.changed if self.exact else None
            samples = RecordedSamples(self.run, segment, _prepare(config, policy), found)
            self._drive(trainer, segment, stream, samples)
            if not save:
                return None
            trainer.finish()
            return self.folder.checkpoints / f"step_{trainer.version:08d}"

    def _drive(self, trainer: Trainer, segment: SessionSegment, stream: BatchStream, samples: RecordedSamples) -> None:
        trainer.start()
        for batch in segment.batches:
            if batch.version > self.steps or (batch.refused and not self.exact):
                continue
            if self.stop():
                raise RunInterruptedError(f"the replay was stopped at version {trainer.version}")
            stream.offer(samples.of(batch))
            try:
                trainer.pump()
            except PolicyMismatchError:
                if not batch.refused:
                    self.observer.refused(batch, True)
                raise
            self.observer.refused(batch, trainer.version < batch.version)

    def _session(self, segment: SessionSegment, checkpoint: Path | None) -> Session:
        """The segment's session, in the replay's folder. Only what changes no result is different."""
        config = self.change(segment.config)
        changes: dict[str, Any] = {
            "checkpoint_every": 0,
            "weights_every": 0,
            "keep_versions": None,
            "keep_checkpoints": 1,
            "threads": config.trainer.threads or segment.record.threads,
        }
        if not self.exact:
            changes["ess_threshold"] = 0.0
        launch = config.launch.model_copy(update={"kind": "processes"})  # all ranks are on this machine
        config = config.model_copy(update={"trainer": config.trainer.model_copy(update=changes), "launch": launch})
        plan = StartPlan(checkpoint=None if checkpoint is None else str(checkpoint), version=segment.start)
        schedule = cast("Schedule", _OneBatch(make_schedule(config), config.trainer.batch_size))
        session = Session(config, self.folder, plan, schedule, time.monotonic())
        write_session(session)
        return session

    @contextmanager
    def _logs(self) -> Iterator[TrainingLogs]:
        with (
            closing(_ObservedSink(JsonlSink(self.folder.root), self.observer)) as metrics,
            JsonLines(self.folder.trained) as trained,
            JsonLines(self.folder.published) as published,
        ):
            yield TrainingLogs(metrics, trained, published, JsonLines, lambda: None)


# ---- the trainer's surroundings


class BatchStream:
    """The stream that the trainer reads: each recorded batch is one group, so that batches stay as they are.

    `numbers` gives each a number that the replay has not used before.
    """

    def __init__(self, numbers: Iterator[int]) -> None:
        self._numbers = numbers
        self._offered: Prepared | None = None

    def offer(self, samples: Sequence[TrainingSample]) -> None:
        ids = tuple(sample.id for sample in samples)
        number = next(self._numbers)
        renamed = tuple(msgspec.structs.replace(sample, group_index=number) for sample in samples)
        self._offered = Prepared(index=number, newest_version=0, ids=ids, samples=renamed)

    def read(self, limit: int) -> Sequence[tuple[int, Prepared]]:  # noqa: ARG002 - there is at most one
        offered, self._offered = self._offered, None
        return [] if offered is None else [(offered.index, offered)]

    def commit(self, offset: int) -> None:
        """Nothing is stored."""


class _OneBatch:
    """The run's schedule, for a trainer that gets one batch at a time: it need not wait for a whole round."""

    def __init__(self, schedule: Schedule, batch_size: int) -> None:
        self._schedule = schedule
        self._batch_size = batch_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._schedule, name)

    def may_train(self, version: int, queued: int) -> Verdict:  # noqa: ARG002 - as in every schedule
        return Verdict(queued >= self._batch_size, "a recorded batch")

    def trains_in_rounds(self) -> bool:
        return False


class _ObservedSender:
    """A sender without engines."""

    transfer: WeightTransfer | None = None

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.digests: Mapping[str, str] = {}

    def send(self, version: int, tensors: Mapping[str, Tensor]) -> str:
        self.digests = digests_of(tensors)
        whole = checksum(tensors, self.digests)
        self._observer.published(version, tensors, whole, self.digests)
        return whole

    def unanswered(self) -> Sequence[str]:
        return ()

    def receipts(self) -> Sequence[UpdateReceipt]:
        return ()

    def close(self) -> None:
        """Nothing is open."""


@dataclass(frozen=True)
class _ObservedSink:
    sink: Sink
    observer: Observer

    def write(self, record: Record) -> None:
        self.sink.write(record)
        if isinstance(record, StepRecord):
            self.observer.stepped(record)

    def close(self) -> None:
        self.sink.close()


def _prepare(config: RunConfig, policy: Policy) -> Callable[[Group], Prepared]:
    """Prepares groups as the run did: a preprocessor in a process of its own had its own reference model, and one thread."""
    apart = config.launch.preprocessor == "process"
    preprocessor = make_preprocessor(config) if apart else make_preprocessor(config, policy.lora)
    threads = PREPROCESSING_THREADS if apart else torch.get_num_threads()

    def prepare(group: Group) -> Prepared:
        with torch_threads(threads):
            return preprocessor.process(group)

    return prepare
