"""Decides which generation process may start the next group, and when. Decisions are serialised over all processes.

    claim ─▶ begin ─▶ read the record, read the trainer's counts ─▶ schedule.may_start ─▶ write the record ─▶ commit

The record (`Outstanding`) is in a database that every generation process opens, or in Redis if they are on several machines
(`admission_redis`). The schedule therefore decides on exact counts: a round has the right number of rollouts, the lag bound
counts the work of all engines, and no index is used twice. Repeating a denied claim costs one or two microseconds until
something has changed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from pipelinerl.actor.outstanding import SCHEMA, Outstanding
from pipelinerl.database import Database
from pipelinerl.errors import RunDirectoryError, StalledError
from pipelinerl.files import remedy
from pipelinerl.interfaces import Board, PipelineState, Schedule, Verdict
from pipelinerl.ledger import GroupLedger
from pipelinerl.types import ACTOR, TRAINER, StageStatus, TrainerProgress, trainer_progress


class Admitted(NamedTuple):
    """`group` is the index of the group to start. If it is None, the verdict says why."""

    group: int | None
    verdict: Verdict


class Asked(NamedTuple):
    """A claim: the asking engine's version, its rollouts in progress, and the attempts of the group."""

    engine_version: int
    own: int
    rollouts: int


class _Denial(NamedTuple):
    """A denial with the inputs it was based on. It stays valid while these do not change."""

    record: tuple[int, int]
    trainer: StageStatus | None
    asked: Asked
    verdict: Verdict


class Admission(ABC):
    """One generation process's access to the shared record."""

    def __init__(self, schedule: Schedule, taken: GroupLedger | None, processes: int) -> None:
        """`taken`: the groups that must not be started again."""
        self._schedule = schedule
        self._taken = taken or GroupLedger()
        self._processes = processes
        self._opened = False

    @property
    def in_rounds(self) -> bool:
        """Whether the schedule generates in rounds of fixed size."""
        return self._schedule.trains_in_rounds()

    @property
    def opened(self) -> bool:
        """Whether groups may be started, that is, whether the evaluation before training is over."""
        self._opened = self._opened or self.read().opened
        return self._opened

    @abstractmethod
    def open(self) -> None:
        """Allow groups to be started from now on."""

    @abstractmethod
    def claim(self, engine_version: int, own: int, rollouts: int) -> Admitted:
        """Count a group of `rollouts` attempts as started, if the schedule allows it now.

        `engine_version` is the version of the asking engine's weights, `own` the number of its rollouts in progress.
        """

    @abstractmethod
    def hand_over(
        self, index: int, version: int, *, started: int, rollouts: int, write: Callable[[], bool], skipped: bool = False
    ) -> bool:
        """Call `write`, which writes group `index` to the stream, and count the group as handed over.

        Returns False if `write` does. The record and the stream have groups in the same order. `skipped`: without attempts.
        """

    @abstractmethod
    def stream_dropped(self, rollouts: int) -> None:
        """Count rollouts that the stream replaced by newer ones. Call it within the `write` of `hand_over`."""

    @abstractmethod
    def may_take(self, version: int) -> Verdict:
        """Whether an engine may apply the weights of `version` now. If so, it must: the record counts them as applied."""

    @abstractmethod
    def read(self) -> Outstanding:
        """The current record."""

    @abstractmethod
    def close(self) -> None: ...

    def _decide(self, state: Outstanding, trainer: StageStatus | None, asked: Asked) -> Admitted:
        """Whether and which group may be started. It is then counted in `state`, as is what the trainer has settled."""
        progress = trainer_progress(trainer) or TrainerProgress(version=asked.engine_version)
        state.settle(progress.trained + sum(progress.dropped.values()))
        verdict = self._verdict(state, progress, asked)
        if not verdict.allowed:
            return Admitted(None, verdict)
        index = state.returned.pop(0) if state.returned else next(self._taken.missing_from(state.next_index))
        state.start(index, asked.engine_version, asked.rollouts)
        return Admitted(index, verdict)

    def _take(self, state: Outstanding, version: int) -> Verdict:
        """Whether weights may be applied. They are then counted in `state`."""
        verdict = self._schedule.may_take_weights(state.in_progress_before(version))
        if verdict.allowed:
            state.newest_version = max(version, state.newest_version)
        return verdict

    def _verdict(self, state: Outstanding, trainer: TrainerProgress, asked: Asked) -> Verdict:
        if trainer.goal_reached:
            return Verdict(False, "the end of the run: the trainer has reached its goal")
        if not state.opened:
            return Verdict(False, "the evaluation before training", (ACTOR,))
        oldest = state.oldest_in_progress
        seen = PipelineState(
            engine_version=asked.engine_version,
            trainer_version=trainer.version,
            oldest_in_progress=asked.engine_version if oldest is None else oldest,
            outstanding=state.rollouts,
            handed_over=state.handed_over,
            latency=state.latency,
            most_in_progress=state.most_in_progress,
            newest_version=max(state.newest_version, asked.engine_version),
            own=asked.own,
            processes=self._processes,
        )
        return self._schedule.may_start(seen, asked.rollouts)


class LocalAdmission(Admission):
    """With the record in a database of this machine, which `launch.run.make_record` creates once per session."""

    def __init__(
        self,
        path: Path,
        schedule: Schedule,
        board: Board,
        *,
        taken: GroupLedger | None = None,
        processes: int = 1,
        process: int = 0,
    ) -> None:
        """For generation process number `process`. Raises OSError if `path` can't be opened."""
        super().__init__(schedule, taken, processes)
        self._process = process
        self._board = board
        self._database = Database(path, SCHEMA, temporary=True)
        self._decoder = msgspec.json.Decoder(Outstanding)
        self._encoder = msgspec.json.Encoder()
        self._denial: _Denial | None = None

    def open(self) -> None:
        with self._locked():
            state = self.read()
            state.opened = True
            self._write(state)

    def claim(self, engine_version: int, own: int, rollouts: int) -> Admitted:
        asked = Asked(engine_version, own, rollouts)
        last, trainer = self._denial, self._board.read(TRAINER)
        if last and last.asked == asked and last.trainer is trainer and last.record == self._database.changes():
            return Admitted(None, last.verdict)
        with self._locked():
            state = self.read()
            # Read under the lock, so that the trainer's counts are not older than those in the record.
            trainer = self._board.read(TRAINER)
            admitted = self._decide(state, trainer, asked)
            if (index := admitted.group) is not None:
                self._write(state)
                row = (index, self._process, engine_version, rollouts)
                self._database.rows("INSERT INTO groups VALUES (?, ?, ?, ?, NULL)", *row)
            else:
                self._denial = _Denial(self._database.changes(), trainer, asked, admitted.verdict)
        return admitted

    def hand_over(
        self, index: int, version: int, *, started: int, rollouts: int, write: Callable[[], bool], skipped: bool = False
    ) -> bool:
        with self._locked():
            if not write():
                return False
            state = self.read()
            state.hand_over(version, started=started, rollouts=rollouts)
            self._write(state)
            attempts = 0 if skipped else started
            self._database.rows("UPDATE groups SET kept = ?, started = ? WHERE number = ?", rollouts, attempts, index)
        return True

    def stream_dropped(self, rollouts: int) -> None:
        state = self.read()
        state.drop(rollouts)
        self._write(state)
        self._database.rows("INSERT INTO drops VALUES (?, ?)", self._process, rollouts)

    def may_take(self, version: int) -> Verdict:
        with self._locked():
            state = self.read()
            newest = state.newest_version
            verdict = self._take(state, version)
            if state.newest_version > newest:
                self._write(state)
        return verdict

    def read(self) -> Outstanding:
        ((json,),) = self._database.rows("SELECT json FROM record")
        return self._decoder.decode(json)

    def close(self) -> None:
        self._database.close()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with self._database.transaction():
                yield
        except TimeoutError as error:
            raise StalledError(str(error)) from error
        except OSError as error:
            why = f"{error.strerror or error}; {remedy(error)} and resume"
            raise RunDirectoryError(f"can't write {error.filename}: {why}") from error

    def _write(self, state: Outstanding) -> None:
        self._database.rows("UPDATE record SET json = ?", self._encoder.encode(state))
