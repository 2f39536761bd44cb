"""A process that follows a run's records for its trackers and its callback, out of the way of the run.

    the run ──▶ metrics.jsonl, evaluations.jsonl, rollouts, summary.json ──▶ a thread for each tracker, and for the callback
                                                          launcher ◀── messages for the user

It reads what the run has written, so that nothing in it can slow the run down or end it. A tracker that fails is tried again
from where it was, with pauses. What each one has been sent, and the id of its run, are in `trackers.json`: a resumed run
continues there.

    python -m pipelinerl.report.following RUN_DIR MESSAGES_FD
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.child import ChildProcess, stop_all
from pipelinerl.config.schema import RunConfig
from pipelinerl.config.secrets import without_secrets
from pipelinerl.errors import INVALID_DATA, StopRun
from pipelinerl.files import write_atomically
from pipelinerl.metrics.records import StepRecord
from pipelinerl.metrics.sinks import Record
from pipelinerl.metrics.tail import RecordPlace, Records
from pipelinerl.metrics.trackers import Row, Tracked, Tracker, open_tracker, samples
from pipelinerl.process import LOG_FORMAT, counted_interrupts, lower_priority, take_stdin, when_closed
from pipelinerl.run_directory import RunDirectory

EVERY_S = 0.5
LONGEST_PAUSE_S = 60.0
SAVE_EVERY_S = 5.0
FINISH_S = 60.0
"""Time, after the run, to send what is left."""
TABLES = 10
"""Tables of training samples in a run."""

_log = logging.getLogger(__name__)


# ---- in the launcher


@contextmanager
def followed(run: RunDirectory, say: Callable[[str], None]) -> Iterator[None]:
    """While inside, the run is followed. At the end, what follows it has `FINISH_S` to finish, or until Ctrl-C."""
    ours, theirs = os.pipe()
    log = run.log("trackers")
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # for the process, until it can obey
    try:
        command = [sys.executable, "-m", "pipelinerl.report.following", str(run.root), str(theirs)]
        process = ChildProcess(command, log=log, fds=[theirs], watches_parent=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(theirs)

    def pass_on() -> None:
        with open(ours, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                say(line.rstrip("\n"))

    messages = threading.Thread(target=pass_on, daemon=True)
    messages.start()
    try:
        yield
    finally:
        with counted_interrupts() as interrupts:
            late = stop_all([process], FINISH_S, lambda: interrupts.count > 0)
        messages.join(1.0)
        if late:
            say(f"the trackers had not finished; `pipelinerl train --resume` sends the rest (log: {log})")
        elif process.status:
            say(f"the process of the trackers {process.how_it_ended()} (log: {log})")


# ---- in the process


class Sent(msgspec.Struct, frozen=True):
    """What a tracker has been sent, and the id of the tracked run."""

    place: RecordPlace = RecordPlace()
    id: str | None = None


class Notes:
    """`trackers.json`: a `Sent` for each name. Any thread may use it."""

    def __init__(self, path: Path) -> None:
        self._path, self._one = path, threading.Lock()
        try:
            self._sent = msgspec.json.decode(path.read_bytes(), type=dict[str, Sent])
        except (OSError, *INVALID_DATA):
            self._sent = {}

    def __getitem__(self, name: str) -> Sent:
        return self._sent.get(name, Sent())

    def write(self, name: str, sent: Sent) -> None:
        """Raises OSError."""
        with self._one:
            self._sent[name] = sent
            write_atomically(self._path, msgspec.json.encode(self._sent))


class Callback:
    """Calls the user's function with every record. `failed` gets its errors, `stop` its requests to end the run."""

    id: str | None = None

    def __init__(
        self, function: Callable[[Record], object], failed: Callable[[BaseException], None], stop: Callable[[object], None]
    ) -> None:
        self._function, self._failed, self._stop = function, failed, stop

    def write(self, record: Record) -> None:
        try:
            self._function(record)
        except StopRun as why:
            self._stop(why)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything
            self._failed(error)

    def table(self, name: str, version: int, rows: Sequence[Row]) -> None:
        """Not for functions."""

    def close(self, summary: Mapping[str, Any]) -> None:
        """Nothing to do."""


class Follower:
    """Sends a run's records to one tracker, in the thread that calls `follow`."""

    def __init__(
        self,
        name: str,
        make: Callable[[str | None, Callable[[BaseException], None]], Tracker],
        run: RunDirectory,
        notes: Notes,
        *,
        steps: int,
        say: Callable[[str], None],
    ) -> None:
        """`make` opens the tracker, given the id of its run, and what to call with an error that is not to be repeated."""
        self.errors = 0
        self._name, self._make, self._run, self._notes, self._say = name, make, run, notes, say
        self._records = Records(run.root, notes[name].place)
        self._table_every = max(1, steps // TABLES)
        self._tracker: Tracker | None = None
        self._saved_s = 0.0

    def follow(self, stopping: threading.Event) -> None:
        """Send records until `stopping` is set, and then the last ones and the summary. Raises nothing."""
        pause_s = EVERY_S
        while True:
            last = stopping.is_set()
            try:
                self._send(last=last)
                pause_s = EVERY_S
            except (Exception, SystemExit) as error:  # noqa: BLE001 - clients may raise anything
                self._failed(error)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            if last:
                return
            stopping.wait(pause_s)

    def _send(self, *, last: bool) -> None:
        if self._tracker is None:
            self._tracker = self._make(self._notes[self._name].id, self._failed)
            self._notes.write(self._name, Sent(self._records.place, self._tracker.id))
        before = self._records.place
        try:
            for record in self._records.read():
                self._tracker.write(record)
                self._table(self._tracker, record)
        except BaseException:
            self._records.place = before
            raise
        if last:
            self._tracker.close(_summary(self._run))
        now = time.monotonic()
        if last or (self._records.place != before and now - self._saved_s > SAVE_EVERY_S):
            self._saved_s = now
            self._notes.write(self._name, Sent(self._records.place, self._tracker.id))

    def _table(self, tracker: Tracker, record: Record) -> None:
        trained = isinstance(record, StepRecord)
        if trained and record.version % self._table_every:
            return
        try:
            rows = samples(self._run, record)
        except (OSError, *INVALID_DATA) as error:
            _log.warning("no samples of version %d: %s", record.version, error)
            return
        if rows:
            tracker.table("training" if trained else "held_out", record.version, rows)

    def _failed(self, error: BaseException) -> None:
        self.errors += 1
        _log.error("%s", self._name, exc_info=error)
        if self.errors == 1:
            text = " ".join(str(error).split())
            log = self._run.log("trackers")
            self._say(f"{self._name}: {type(error).__name__}: {text}; training goes on (log: {log})")


def _summary(run: RunDirectory) -> dict[str, Any]:
    try:
        return msgspec.json.decode(run.summary.read_bytes(), type=dict[str, Any])
    except (OSError, *INVALID_DATA):
        return {}


def follow_all(run: RunDirectory, stopping: threading.Event, say: Callable[[str], None]) -> None:
    """Follow the run for all its trackers and its callback, until `stopping` is set and they have finished."""
    config = RunConfig.model_validate_json(run.settings.read_bytes())
    shown, notes = without_secrets(config), Notes(run.trackers)
    callback = config.metrics.callback

    def make(name: str, known: str | None, failed: Callable[[BaseException], None]) -> Tracker:
        if name != callback:
            return open_tracker(name, Tracked(run.root, shown, known))
        from pipelinerl.environments.user.code import find_function  # noqa: PLC0415 - few runs have one

        return Callback(find_function(name), failed, lambda why: say(run.request_stop(why)))

    names = dict.fromkeys([*config.metrics.trackers, *([callback] if callback is not None else [])])
    steps = config.trainer.steps
    followers = {name: Follower(name, partial(make, name), run, notes, steps=steps, say=say) for name in names}
    threads = [threading.Thread(target=one.follow, args=(stopping,), daemon=True) for one in followers.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(EVERY_S)
    for name, follower in followers.items():
        if follower.errors > 1:
            say(f"{name}: {follower.errors} errors")


def main(arguments: Sequence[str]) -> int:
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    run, messages = RunDirectory(Path(arguments[0])), int(arguments[1])
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    when_closed(take_stdin(), stopping.set, FINISH_S)
    lower_priority()

    def say(text: str) -> None:
        try:
            os.write(messages, f"{text}\n".encode())
        except OSError:  # the launcher has ended
            _log.warning("%s", text)

    follow_all(run, stopping, say)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
