"""A process for each tracker, and one for the callback, follows a run's records, out of the way of the run.

    the run ──▶ metrics.jsonl, evaluations.jsonl, rollouts, summary.json ──▶ the process ──▶ the tracker
                                                   launcher ◀── messages for the user

It reads what the run has written, so that nothing in it can slow the run down or end it. A tracker that fails is tried again
from where it was, with pauses. What it has been sent, and the id of its run, are in `trackers/NAME.json`: a resumed run
continues there.

    python -m pipelinerl.report.following RUN_DIR NAME MESSAGES_FD
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.child import ChildProcess, stop_all
from pipelinerl.config.schema import MetricsConfig, RunConfig
from pipelinerl.config.secrets import without_secrets
from pipelinerl.errors import INVALID_DATA, StopRun
from pipelinerl.files import write_atomically
from pipelinerl.metrics.reading import RecordPlace, Records
from pipelinerl.metrics.records import StepRecord
from pipelinerl.metrics.sinks import Record
from pipelinerl.metrics.trackers import Row, Tracked, Tracker, open_tracker, samples
from pipelinerl.process import LOG_FORMAT, counted_interrupts, lower_priority, take_stdin, when_closed
from pipelinerl.report.series import read_summary
from pipelinerl.run_directory import RunDirectory

EVERY_S = 0.5
LONGEST_PAUSE_S = 60.0
FINISH_S = 60.0
"""Time, after the run, to send what is left."""
TABLES = 10
"""Tables of training samples in a run."""
CALLBACK = "callback"

_log = logging.getLogger(__name__)


@contextmanager
def followed(run: RunDirectory, metrics: MetricsConfig, say: Callable[[str], None]) -> Iterator[None]:
    """While inside, the run is followed. At the end, what follows it has `FINISH_S` to finish, or until Ctrl-C."""
    ours, theirs = os.pipe()
    log = run.log("trackers")
    names = dict.fromkeys([*metrics.trackers, *([CALLBACK] if metrics.callback is not None else [])])
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # for the processes, until they can obey
    try:
        processes = [
            ChildProcess(
                [sys.executable, "-m", "pipelinerl.report.following", str(run.root), name, str(theirs)],
                log=log,
                fds=[theirs],
                watches_parent=True,
            )
            for name in names
        ]
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
            late = stop_all(processes, FINISH_S, lambda: interrupts.count > 0)
        messages.join(1.0)
        if late:
            say(f"the trackers had not finished; `pipelinerl train --resume` sends the rest (log: {log})")
        for name, process in zip(names, processes, strict=True):
            if process.status and process not in late:
                say(f"the process of {name} {process.how_it_ended()} (log: {log})")


# ---- in the process


class Sent(msgspec.Struct, frozen=True):
    """What a tracker has been sent, and the id of the tracked run."""

    place: RecordPlace = RecordPlace()
    id: str | None = None


class Callback(Tracker):
    """Calls the user's function with every record. `failed` gets its errors, and `stop` its requests to end the run."""

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

    def table(self, name: str, version: int, rows: Sequence[Row]) -> None: ...

    def close(self, summary: Mapping[str, Any]) -> None: ...


class Follower:
    """Sends a run's records to one tracker, or to the callback."""

    def __init__(self, run: RunDirectory, name: str, say: Callable[[str], None]) -> None:
        self._run, self._name, self._say = run, name, say
        self._config = RunConfig.model_validate_json(run.settings.read_bytes())
        self._path = run.trackers / f"{name}.json"
        sent = Sent()
        with suppress(OSError, *INVALID_DATA):  # not there yet, or damaged: everything is sent
            sent = msgspec.json.decode(self._path.read_bytes(), type=Sent)
        self._id = sent.id
        self._records = Records(run.root, sent.place)
        self._table_every = max(1, self._config.trainer.steps // TABLES)
        self._tracker: Tracker | None = None
        self._errors = 0

    def follow(self, stopping: threading.Event) -> None:
        """Send records until `stopping` is set, and then the last ones and the summary. Raises nothing."""
        pause_s, last = EVERY_S, False
        while not last:
            last = stopping.is_set()
            try:
                self._send(last=last)
                pause_s = EVERY_S
            except (Exception, SystemExit) as error:  # noqa: BLE001 - clients may raise anything
                self._failed(error)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            if not last:
                stopping.wait(pause_s)
        if self._errors > 1:
            self._say(f"{self._name}: {self._errors} errors")

    def _open(self) -> Tracker:
        callback = self._config.metrics.callback
        if self._name != CALLBACK or callback is None:
            return open_tracker(self._name, Tracked(self._run.root, without_secrets(self._config), self._id))
        from pipelinerl.environments.user.code import find_function  # noqa: PLC0415 - few runs have one

        return Callback(find_function(callback), self._failed, lambda why: self._say(self._run.request_stop(why)))

    def _send(self, *, last: bool) -> None:
        if self._tracker is None:
            self._tracker = self._open()
            self._id = self._tracker.id
            self._write_sent()
        before = self._records.place
        try:
            for record in self._records.read():
                self._tracker.write(record)
                self._write_table(self._tracker, record)
        except BaseException:
            self._records.place = before
            raise
        if last:
            self._tracker.close(read_summary(self._run.root) or {})
        if last or self._records.place != before:
            self._write_sent()

    def _write_sent(self) -> None:
        self._path.parent.mkdir(exist_ok=True)
        write_atomically(self._path, msgspec.json.encode(Sent(self._records.place, self._id)))

    def _write_table(self, tracker: Tracker, record: Record) -> None:
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
        self._errors += 1
        _log.error("%s", self._name, exc_info=error)
        if self._errors == 1:
            text = " ".join(str(error).split())
            log = self._run.log("trackers")
            self._say(f"{self._name}: {type(error).__name__}: {text}; training goes on (log: {log})")


def main(arguments: Sequence[str]) -> int:
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    run, name, messages = RunDirectory(Path(arguments[0])), arguments[1], int(arguments[2])
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    when_closed(take_stdin(), stopping.set, FINISH_S)
    lower_priority()

    def say(text: str) -> None:
        try:
            os.write(messages, f"{text}\n".encode())
        except OSError:  # the launcher has ended
            _log.warning("%s", text)

    Follower(run, name, say).follow(stopping)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
