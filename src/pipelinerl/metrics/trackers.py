"""Experiment trackers, by their own clients: TensorBoard, Weights & Biases, Trackio, MLflow. Each is an extra of that name.

Each tracker is made, used and closed in a process of its own. It may raise anything and take its time: see
`report.following`.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pipelinerl.metrics.evaluations import EvaluatedProblem, EvaluationRecord
from pipelinerl.metrics.reading import Tail
from pipelinerl.metrics.sinks import Record
from pipelinerl.metrics.statistics import flat_numbers
from pipelinerl.run_directory import RunDirectory
from pipelinerl.types import Group

COLUMNS = ("version", "problem", "completion", "reward", "tokens")
"""The columns of a table of samples."""
Row = tuple[int, str, str, float, int]
SAMPLES = 16
"""The most rows of a table."""


class Tracked(NamedTuple):
    """What a tracker is told of the run. `id`: the tracked run to continue, as the tracker named it; None for a new one."""

    folder: Path
    config: Mapping[str, Any]
    id: str | None = None

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def numbers_and_texts(self) -> dict[str, Any]:
        """The configuration without nesting: `trainer.steps`."""
        return {
            f"{section}.{key}" if isinstance(values, dict) else section: value
            for section, values in self.config.items()
            for key, value in (values.items() if isinstance(values, dict) else [("", values)])
        }


class Tracker:
    """`id` names the tracked run, for a later session; None if the tracker needs no name."""

    id: str | None = None

    def write(self, record: Record) -> None:
        """Add a point to each curve, at the version of the weights."""
        self._log({name: value for name, value in record.numbers().items() if name != "version"}, record.version)

    def table(self, name: str, version: int, rows: Sequence[Row]) -> None:
        raise NotImplementedError

    def close(self, summary: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def _log(self, values: Mapping[str, Any], version: int) -> None:
        raise NotImplementedError


def open_tracker(name: str, run: Tracked) -> Tracker:
    """The tracker, with a new tracked run or the one of `run.id`."""
    kinds: dict[str, Callable[[Tracked], Tracker]]
    kinds = {"tensorboard": Tensorboard, "wandb": Wandb, "trackio": Trackio, "mlflow": Mlflow}
    return kinds[name](run)


class Tensorboard(Tracker):
    """Writes event files to `RUN_DIR/tensorboard`, with TensorBoard's own writer: charts, and texts as Markdown."""

    def __init__(self, run: Tracked) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2  # noqa: PLC0415 - costs a second
        from tensorboard.plugins.text.metadata import create_summary_metadata  # noqa: PLC0415 - as above
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: PLC0415 - as above

        self._event, self._summary, self._tensor = event_pb2.Event, summary_pb2.Summary, tensor_pb2.TensorProto
        self._text_metadata = create_summary_metadata
        self._writer = EventFileWriter(str(run.folder / "tensorboard"), flush_secs=1)
        self._version = 0
        self._text("config", 0, _code(run.config))

    def table(self, name: str, version: int, rows: Sequence[Row]) -> None:
        lines = [
            COLUMNS,
            ["---"] * len(COLUMNS),
            *([str(value).replace("|", "\\|").replace("\n", "<br>") for value in row] for row in rows),
        ]
        self._text(f"samples/{name}", version, "\n".join(f"| {' | '.join(line)} |" for line in lines))

    def close(self, summary: Mapping[str, Any]) -> None:
        self._text("summary", self._version, _code(summary))
        self._writer.close()

    def _log(self, values: Mapping[str, Any], version: int) -> None:
        self._version = version
        self._add(version, [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])

    def _text(self, tag: str, version: int, text: str) -> None:
        tensor = self._tensor(dtype="DT_STRING", string_val=[text.encode()])
        self._add(version, [self._summary.Value(tag=tag, tensor=tensor, metadata=self._text_metadata(tag, ""))])

    def _add(self, version: int, values: Sequence[Any]) -> None:
        self._writer.add_event(self._event(wall_time=time.time(), step=version, summary=self._summary(value=values)))


class Wandb(Tracker):
    """Weights & Biases. Its environment variables apply (WANDB_MODE, WANDB_PROJECT, ...); files are in `RUN_DIR/wandb`."""

    def __init__(self, run: Tracked) -> None:
        import wandb  # noqa: PLC0415 - costs a second

        self.id = run.id or secrets.token_hex(4)
        self._table: Any = wandb.Table
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "pipelinerl"),
            name=os.environ.get("WANDB_NAME", run.name),
            dir=os.environ.get("WANDB_DIR", str(run.folder)),
            id=self.id,
            resume="allow",
            config=dict(run.config),
            settings=wandb.Settings(console="off"),
        )
        # The step of the client only grows, and a resumed run may repeat versions.
        self._run.define_metric("version")
        self._run.define_metric("*", step_metric="version")

    def table(self, name: str, version: int, rows: Sequence[Row]) -> None:
        self._log({f"samples/{name}": self._table(columns=list(COLUMNS), data=[list(row) for row in rows])}, version)

    def close(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update({f"summary/{key}": value for key, value in summary.items()})
        self._run.finish()

    def _log(self, values: Mapping[str, Any], version: int) -> None:
        self._run.log({**values, "version": version})


class Trackio(Wandb):
    """Trackio: a local database, or a Space if TRACKIO_SPACE_ID names one. The name of a tracked run is its id."""

    def __init__(self, run: Tracked) -> None:
        import trackio  # noqa: PLC0415 - costs a second

        self.id = run.id or f"{run.name}-{secrets.token_hex(3)}"
        self._table = trackio.Table
        self._version = 0
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "pipelinerl"),
            name=self.id,
            space_id=os.environ.get("TRACKIO_SPACE_ID"),
            resume="allow",
            config=run.numbers_and_texts,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def close(self, summary: Mapping[str, Any]) -> None:
        self._log(flat_numbers(summary, "summary/"), self._version)
        self._run.finish()

    def _log(self, values: Mapping[str, Any], version: int) -> None:
        self._version = version
        self._run.log(dict(values), step=version)


class Mlflow(Tracker):
    """MLflow, at MLFLOW_TRACKING_URI (its default: a database in the working directory)."""

    def __init__(self, run: Tracked) -> None:
        from mlflow import MlflowClient  # noqa: PLC0415 - costs seconds
        from mlflow.entities import Metric, Param  # noqa: PLC0415 - as above

        self._client, self._metric = MlflowClient(), Metric
        self.id = run.id
        if run.id is not None:
            self._client.update_run(self.id, "RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "pipelinerl")
        experiment = self._client.get_experiment_by_name(name)
        where = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        self.id = self._client.create_run(where, run_name=run.name).info.run_id
        parameters = [Param(key, str(value)[:6000]) for key, value in run.numbers_and_texts.items()]
        for start in range(0, len(parameters), 100):  # the most that a server takes at once
            self._client.log_batch(self.id, params=parameters[start : start + 100])

    def table(self, name: str, version: int, rows: Sequence[Row]) -> None:
        contents = {"columns": list(COLUMNS), "data": [list(row) for row in rows]}
        self._client.log_dict(self.id, contents, f"samples/{name}-{version:06d}.json")

    def close(self, summary: Mapping[str, Any]) -> None:
        self._client.log_dict(self.id, dict(summary), "summary.json")
        self._log(flat_numbers(summary, "summary/"), 0)
        self._client.set_terminated(self.id, "FINISHED" if summary.get("status") == "finished" else "FAILED")

    def _log(self, values: Mapping[str, Any], version: int) -> None:
        now = int(1000 * time.time())
        metrics = [self._metric(re.sub(r"[^\w./ -]", "_", key), value, now, version) for key, value in values.items()]
        for start in range(0, len(metrics), 500):
            self._client.log_batch(self.id, metrics=metrics[start : start + 500])


def _code(values: Mapping[str, Any]) -> str:
    """A mapping as Markdown: an indented block of JSON."""
    return "".join(f"    {line}\n" for line in json.dumps(values, indent=2, default=str).splitlines())


def samples(run: RunDirectory, record: Record) -> list[Row]:
    """Answers of the evaluation, or those of the newest group when a step was taken. Raises OSError."""
    if isinstance(record, EvaluationRecord):
        decoder = msgspec.json.Decoder(EvaluatedProblem)
        with run.evaluation(record.name).open("rb") as file:
            problems = [decoder.decode(line) for line, _ in zip(file, range(SAMPLES), strict=False)]
        return [(record.version, one.prompt, one.completion, one.reward, one.length) for one in problems]
    groups = Tail(run.recorded, Group, newest=True).look()
    if not groups:
        return []
    problem = msgspec.json.encode(groups[-1].problem.payload).decode()
    return [
        (
            record.version,
            problem,
            "\n".join(turn.text for turn in rollout.turns),
            rollout.reward,
            sum(len(turn.completion.token_ids) for turn in rollout.turns),
        )
        for rollout in groups[-1].rollouts[:SAMPLES]
    ]
