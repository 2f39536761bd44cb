"""Experiment trackers and the callback: each gets the records of a run in a process of its own, out of the way of the run.

    the run ──▶ metrics.jsonl, evaluations.jsonl, rollouts, summary.json ──▶ the process ──▶ the tracker
                                                   launcher ◀── messages for the user

It reads what the run has written, so that nothing in it can slow the run down or end it. A tracker that fails is tried again
from where it was, with pauses. What it has been sent, and the id of its run, are in `trackers/NAME.json`: a resumed run
continues there. The trackers are their own clients, each an extra of that name. They may raise anything and take their time.

    python -m pipelinerl.report.trackers RUN_DIR NAME MESSAGES_FD
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.config.schema import MetricsConfig, RunConfig
from pipelinerl.config.secrets import without_secrets
from pipelinerl.errors import INVALID_DATA, StopRun
from pipelinerl.files import write_atomically
from pipelinerl.metrics.evaluations import EvaluatedProblem, EvaluationRecord
from pipelinerl.metrics.reading import Records
from pipelinerl.metrics.records import Record
from pipelinerl.metrics.statistics import flat_numbers
from pipelinerl.process import LOG_FORMAT, counted_interrupts, lower_priority, take_stdin, when_closed
from pipelinerl.process.child import ChildProcess, stop_all
from pipelinerl.report.series import read_summary
from pipelinerl.run_directory import RunDirectory

EVERY_S = 0.5
LONGEST_PAUSE_S = 60.0
FINISH_S = 60.0
"""Time, after the run, to send what is left."""
CALLBACK = "callback"
COLUMNS = ("version", "problem", "answer", "reward", "tokens")
"""The columns of a table of answers to held-out problems."""
Row = tuple[int, str, str, float, int]
MOST_ROWS = 16
"""The most rows of a table."""

_log = logging.getLogger(__name__)


@contextmanager
def followed(run: RunDirectory, metrics: MetricsConfig, say: Callable[[str], None]) -> Iterator[None]:
    """While inside, trackers and callback follow the run. At the end they have `FINISH_S` to finish, or until Ctrl-C."""
    ours, theirs = os.pipe()
    log = run.log("trackers")
    names = dict.fromkeys([*metrics.trackers, *([CALLBACK] if metrics.callback is not None else [])])
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # for the processes, until they can obey
    try:
        processes = [
            ChildProcess(
                [sys.executable, "-m", "pipelinerl.report.trackers", str(run.root), name, str(theirs)],
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

    place: tuple[int, int] = (0, 0)
    id: str | None = None


class Follower:
    """Sends a run's records to one tracker, or to the callback."""

    def __init__(self, run: RunDirectory, name: str, say: Callable[[str], None]) -> None:
        self._run, self._name, self._say = run, name, say
        self._path = run.trackers / f"{name}.json"
        sent = Sent()
        with suppress(OSError, *INVALID_DATA):  # not there yet, or damaged: everything is sent
            sent = msgspec.json.decode(self._path.read_bytes(), type=Sent)
        self._id = sent.id
        self._records = Records(run.root, sent.place)
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

    def _send(self, *, last: bool) -> None:
        if self._tracker is None:
            self._tracker = self._open()
            self._id = self._tracker.id
            self._note()
        before = self._records.place
        try:
            for record in self._records.read():
                self._tracker.write(record, _answers(self._run, record))
        except BaseException:
            self._records = Records(self._run.root, before)
            raise
        if last:
            self._tracker.close(read_summary(self._run.root) or {})
        if last or self._records.place != before:
            self._note()

    def _open(self) -> Tracker:
        config = RunConfig.model_validate_json(self._run.settings.read_bytes())
        if self._name != CALLBACK or config.metrics.callback is None:
            return open_tracker(self._name, self._run.root, without_secrets(config), self._id)
        from pipelinerl.user_code import find_function  # noqa: PLC0415 - few runs have one

        function = find_function(config.metrics.callback)
        return Callback(function, self._failed, lambda why: self._say(self._run.request_stop(why)))

    def _note(self) -> None:
        self._path.parent.mkdir(exist_ok=True)
        write_atomically(self._path, msgspec.json.encode(Sent(self._records.place, self._id)))

    def _failed(self, error: BaseException) -> None:
        self._errors += 1
        _log.error("%s", self._name, exc_info=error)
        if self._errors == 1:
            text = " ".join(str(error).split())
            log = self._run.log("trackers")
            self._say(f"{self._name}: {type(error).__name__}: {text}; training goes on (log: {log})")


def _answers(run: RunDirectory, record: Record) -> list[Row]:
    """The first answers of an evaluation; none if they can't be read."""
    if not isinstance(record, EvaluationRecord):
        return []
    try:
        with run.evaluation(record.name).open("rb") as file:
            problems = [msgspec.json.decode(line, type=EvaluatedProblem) for line in islice(file, MOST_ROWS)]
    except (OSError, *INVALID_DATA) as error:
        _log.warning("no answers of the evaluation %s: %s", record.name, error)
        return []
    return [(record.version, one.prompt, one.completion, one.reward, one.length) for one in problems]


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


# ---- the trackers


class Tracker:
    """`id` names the tracked run, for a later session; None if the tracker needs no name."""

    id: str | None = None

    def write(self, record: Record, answers: Sequence[Row]) -> None:
        """Add a point to each curve, at the version of the weights, and the table of an evaluation's answers."""

    def close(self, summary: Mapping[str, Any]) -> None: ...


def open_tracker(name: str, folder: Path, config: Mapping[str, Any], run_id: str | None) -> Tracker:
    """The tracker of the run in `folder`, with a new tracked run, or with `run_id` again."""
    kinds = {"tensorboard": Tensorboard, "wandb": Wandb, "trackio": Trackio, "mlflow": Mlflow}
    return kinds[name](folder, config, run_id)


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without nesting: `trainer.steps`."""
    return {
        f"{section}.{key}" if key else section: value
        for section, values in config.items()
        for key, value in (values if isinstance(values, dict) else {"": values}).items()
    }


class Callback(Tracker):
    """Calls the user's function with every record. `failed` gets its errors, and `stop` its requests to end the run."""

    def __init__(
        self, function: Callable[[Record], object], failed: Callable[[BaseException], None], stop: Callable[[object], None]
    ) -> None:
        self._function, self._failed, self._stop = function, failed, stop

    def write(self, record: Record, _answers: Sequence[Row]) -> None:
        try:
            self._function(record)
        except StopRun as why:
            self._stop(why)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything
            self._failed(error)


class Tensorboard(Tracker):
    """Writes event files to `RUN_DIR/tensorboard`, with TensorBoard's own writer: charts, and texts as Markdown."""

    def __init__(self, folder: Path, config: Mapping[str, Any], _run_id: str | None) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2  # noqa: PLC0415 - costs a second
        from tensorboard.plugins.text.metadata import create_summary_metadata  # noqa: PLC0415 - as above
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: PLC0415 - as above

        self._event, self._summary, self._tensor = event_pb2.Event, summary_pb2.Summary, tensor_pb2.TensorProto
        self._text_metadata = create_summary_metadata
        self._writer = EventFileWriter(str(folder / "tensorboard"), flush_secs=1)
        self._add(0, {}, {"config": _code(config)})

    def write(self, record: Record, answers: Sequence[Row]) -> None:
        cells = [[str(value).replace("|", "\\|").replace("\n", "<br>") for value in row] for row in answers]
        lines = [f"| {' | '.join(line)} |" for line in (COLUMNS, ["---"] * len(COLUMNS), *cells)]
        self._add(record.version, _curves(record), {"samples/held_out": "\n".join(lines)} if answers else {})

    def close(self, summary: Mapping[str, Any]) -> None:
        self._add(summary.get("version", 0), {}, {"summary": _code(summary)})
        self._writer.close()

    def _add(self, version: int, numbers: Mapping[str, float], texts: Mapping[str, str]) -> None:
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in numbers.items()]
        for tag, text in texts.items():
            tensor = self._tensor(dtype="DT_STRING", string_val=[text.encode()])
            values.append(self._summary.Value(tag=tag, tensor=tensor, metadata=self._text_metadata(tag, "")))
        self._writer.add_event(self._event(wall_time=time.time(), step=version, summary=self._summary(value=values)))


def _curves(record: Record) -> dict[str, Any]:
    return {name: value for name, value in record.numbers().items() if name != "version"}


def _code(values: Mapping[str, Any]) -> str:
    """A mapping as Markdown: an indented block of JSON."""
    return "".join(f"    {line}\n" for line in json.dumps(values, indent=2, default=str).splitlines())


class Wandb(Tracker):
    """Weights & Biases. Its environment variables apply (WANDB_MODE, WANDB_PROJECT, ...); files are in `RUN_DIR/wandb`."""

    def __init__(self, folder: Path, config: Mapping[str, Any], run_id: str | None) -> None:
        import wandb  # noqa: PLC0415 - costs a second

        self.id = run_id or secrets.token_hex(4)
        self._table: Any = wandb.Table
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "pipelinerl"),
            name=os.environ.get("WANDB_NAME", folder.name),
            dir=os.environ.get("WANDB_DIR", str(folder)),
            id=self.id,
            resume="allow",
            config=dict(config),
            settings=wandb.Settings(console="off"),
        )
        self._has_steps = False  # the step of the client only grows, and a resumed run may repeat versions
        self._run.define_metric("version")
        self._run.define_metric("*", step_metric="version")

    def write(self, record: Record, answers: Sequence[Row]) -> None:
        values = _curves(record) | ({} if self._has_steps else {"version": record.version})
        if answers:
            values["samples/held_out"] = self._table(columns=list(COLUMNS), data=[list(row) for row in answers])
        self._run.log(values, **({"step": record.version} if self._has_steps else {}))

    def close(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update({f"summary/{key}": value for key, value in summary.items()})
        self._run.finish()


class Trackio(Wandb):
    """Trackio: a local database, or a Space if TRACKIO_SPACE_ID names one. The name of a tracked run is its id."""

    def __init__(self, folder: Path, config: Mapping[str, Any], run_id: str | None) -> None:
        import trackio  # noqa: PLC0415 - costs a second

        self.id = run_id or f"{folder.name}-{secrets.token_hex(3)}"
        self._table, self._has_steps = trackio.Table, True
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "pipelinerl"),
            name=self.id,
            space_id=os.environ.get("TRACKIO_SPACE_ID"),
            resume="allow",
            config=_flat(config),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def close(self, summary: Mapping[str, Any]) -> None:
        self._run.log(flat_numbers(summary, "summary/"), step=summary.get("version", 0))
        self._run.finish()


class Mlflow(Tracker):
    """MLflow, at MLFLOW_TRACKING_URI (its default: a database in the working directory)."""

    def __init__(self, folder: Path, config: Mapping[str, Any], run_id: str | None) -> None:
        from mlflow import MlflowClient  # noqa: PLC0415 - costs seconds
        from mlflow.entities import Metric, Param  # noqa: PLC0415 - as above

        self._client, self._metric = MlflowClient(), Metric
        self.id = run_id
        if run_id is not None:
            self._client.update_run(self.id, "RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "pipelinerl")
        experiment = self._client.get_experiment_by_name(name)
        where = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        self.id = self._client.create_run(where, run_name=folder.name).info.run_id
        parameters = [Param(key, str(value)[:6000]) for key, value in _flat(config).items()]
        for start in range(0, len(parameters), 100):  # the most that a server takes at once
            self._client.log_batch(self.id, params=parameters[start : start + 100])

    def write(self, record: Record, answers: Sequence[Row]) -> None:
        self._log(_curves(record), record.version)
        if answers:
            contents = {"columns": list(COLUMNS), "data": [list(row) for row in answers]}
            self._client.log_dict(self.id, contents, f"samples/held_out-{record.version:06d}.json")

    def close(self, summary: Mapping[str, Any]) -> None:
        self._client.log_dict(self.id, dict(summary), "summary.json")
        self._log(flat_numbers(summary, "summary/"), 0)
        self._client.set_terminated(self.id, "FINISHED" if summary.get("status") == "finished" else "FAILED")

    def _log(self, values: Mapping[str, float], version: int) -> None:
        now = int(1000 * time.time())
        metrics = [self._metric(re.sub(r"[^\w./ -]", "_", key), value, now, version) for key, value in values.items()]
        for start in range(0, len(metrics), 500):
            self._client.log_batch(self.id, metrics=metrics[start : start + 500])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
