"""The steps of a run as columns, for a page and for the figure of one run, `curves.png`: six plots. The page has more.

Rates and times are in seconds since `begin_s`, when all stages were ready and nothing had been generated: start-up time does
not depend on the schedule, so it is not counted.
"""

from __future__ import annotations

import io
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle, takewhile
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from pipelinerl.errors import RunDirectoryError
from pipelinerl.metrics.evaluations import EvaluationRecord
from pipelinerl.metrics.reading import read_records
from pipelinerl.metrics.records import StepRecord, TimelineRecord
from pipelinerl.report import write_file
from pipelinerl.run_directory import RunDirectory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_POINTS = 2000


def begin_s(
    steps: Sequence[StepRecord], timeline: Iterable[TimelineRecord] = (), evaluations: Sequence[EvaluationRecord] = ()
) -> float:
    """The time, on the records' axis, when all stages were ready and nothing had been generated for training.

    The trainer is ready when it begins to wait for its first step. Engines are ready at the last record of the timeline
    before any sequence is in progress, or at its first record if there is none. The result is the latest of these times and
    of the end of an evaluation before training, but not later than the start of the first step.
    """
    first = steps[0]
    latest_s = first.time_s - first.train_s
    begin = latest_s - first.wait_s
    records = sorted(timeline, key=lambda record: record.time_s)
    idle = list(takewhile(lambda record: not record.in_progress, records))
    begin = max([begin, *(record.time_s for record in idle or records[:1])])
    return min(max([begin, *(one.time_s for one in evaluations if one.when == "before")]), latest_s)


class Seen(NamedTuple):
    """The points of `Columns` that a page has: the first `points` ones, each the mean of `stride` rows, of an edition."""

    edition: int = -1
    stride: int = 1
    points: int = 0


class Columns:
    """Numbers by row, one column for each name; NaN where a row has no such number.

    A page gets at most about `MOST_POINTS` points of each column: means of so many rows that they suffice.
    """

    def __init__(self) -> None:
        self.rows = 0
        self._columns: dict[str, array[float]] = {}
        self._edition = 0

    def __getitem__(self, name: str) -> array[float]:
        return self._columns.get(name) or array("d", [math.nan]) * self.rows

    def append(self, numbers: Mapping[str, float]) -> None:
        for name in numbers.keys() - self._columns.keys():
            self._columns[name] = array("d", [math.nan]) * self.rows
        for name, column in self._columns.items():
            column.append(numbers.get(name, math.nan))
        self.rows += 1

    def cut(self, name: str, value: float) -> int:
        """Remove the last rows whose `name` is at least `value`: a resumed run repeats them. Returns the number of rows."""
        rows, column = self.rows, self[name]
        while rows and column[rows - 1] >= value:
            rows -= 1
        if rows < self.rows:
            self.rows, self._edition = rows, self._edition + 1
            for one in self._columns.values():
                del one[rows:]
        return rows

    def since(self, seen: Seen) -> tuple[dict[str, Any] | None, Seen]:
        """The points after the ones that were seen, or all points if the earlier ones have changed; None if there are none.

        `start` is the number of points that the page should keep.
        """
        stride = 1
        while self.rows // stride > MOST_POINTS:
            stride *= 2
        points = self.rows // stride
        start = seen.points if (seen.edition, seen.stride) == (self._edition, stride) else 0
        now = Seen(self._edition, stride, points)
        if now == seen:
            return None, seen
        columns = {
            name: [_mean(column[i * stride : (i + 1) * stride]) for i in range(start, points)]
            for name, column in self._columns.items()
        }
        return {"start": start, "points": points, "columns": columns}, now


def _mean(values: array[float]) -> float | None:
    """The mean of the known numbers, with six digits."""
    known = [value for value in values if math.isfinite(value)]
    return float(f"{math.fsum(known) / len(known):.6g}") if known else None


class StepColumns(Columns):
    """`StepRecord.numbers` of each step, and

    minutes                         since `begin_s`, when all stages were ready
    rollouts                        trained on so far
    samples_per_s, trained_per_s    rollouts, and tokens with gradient, per second since the previous step
    """

    begin_s = 0.0

    def add(self, step: StepRecord, evaluations: Sequence[EvaluationRecord] = ()) -> None:
        """A resumed run repeats steps: earlier rows of this version and later ones are removed."""
        keep = self.cut("version", step.version)
        if not keep:
            self.begin_s = begin_s([step], (), evaluations)
        passed_s = step.time_s - (self["time_s"][-1] if keep else self.begin_s)
        numbers = step.numbers() | {
            "minutes": max(0.0, step.time_s - self.begin_s) / 60,
            "rollouts": (self["rollouts"][-1] if keep else 0.0) + step.samples,
        }
        if passed_s > 0:
            numbers |= {"samples_per_s": step.samples / passed_s, "trained_per_s": step.tokens_trained / passed_s}
        self.append(numbers)


# ---- the figure

MANY_POINTS = 40
"""Lines with more points than this are drawn without markers."""

SMOOTHED = 5


def draw_curves(run_dir: Path, path: Path) -> None:
    """Draw the curves of the run in `run_dir` to a PNG file at `path`.

    Raises RunDirectoryError if there is no step to draw, the records are damaged, or `path` can't be written.
    """
    run = RunDirectory(run_dir)
    steps = read_records(run.metrics, StepRecord)
    if not steps:
        raise RunDirectoryError(f"nothing to draw: {run.metrics} holds no optimizer step")
    found = read_records(run.evaluations, EvaluationRecord)
    evaluations = [one for one in found if one.reward_mean is not None]
    columns = StepColumns()
    for step in steps:
        columns.add(step, evaluations)
    figure = _draw(columns, evaluations)
    figure.suptitle(run_dir.resolve().name, fontsize=12)
    write_file(path, png_of(figure))


def png_of(figure: Figure) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - as below

    png = io.BytesIO()
    FigureCanvasAgg(figure).print_png(png)
    return png.getvalue()


def _draw(columns: StepColumns, evaluations: Sequence[EvaluationRecord]) -> Figure:
    from matplotlib.figure import Figure  # noqa: PLC0415 - a page needs no matplotlib, which takes a second

    seconds = [60 * minutes for minutes in columns["minutes"]]
    places = {"seconds of training": seconds, "rollouts trained": columns["rollouts"], "optimizer step": columns["version"]}
    # Of all rollouts read, or in records of older versions of those trained on.
    known = not all(map(math.isnan, columns["reward_read_mean"]))
    reward = columns["reward_read_mean" if known else "reward_mean"]
    lag = {name: columns[f"lag_{name}"] for name in ("max", "mean")}
    kinds = {"trained": "completion", "sampled": "sampled", "sampled, by order of start": "started"}
    lengths = {label: columns[f"{kind}_length_mean"] for label, kind in kinds.items()}
    rates = {"generated": "engine/tokens_per_s", "trained on, with gradient": "trained_per_s"}
    speeds = {label: smoothed(columns[name]) for label, name in rates.items()}
    panels: list[tuple[str, str, str, Mapping[str, Sequence[float]]]] = [
        ("Reward over time", "seconds of training", "mean reward", {"training, all rollouts read": reward}),
        ("Reward over samples", "rollouts trained", "mean reward", {"": reward}),
        ("On-policyness", "optimizer step", "effective sample size (1 = on-policy)", {"": columns["ess"]}),
        ("Lag of the trained tokens", "optimizer step", "optimizer steps", lag),
        (f"Throughput, mean of {SMOOTHED} steps", "seconds of training", "tokens/s", speeds),
        ("Completion length", "optimizer step", "mean tokens", lengths),
    ]
    figure = Figure(figsize=(15, 8), dpi=110, layout="constrained")
    plots: Any = figure.subplots(2, 3).flat
    for axes, (title, x_label, y_label, lines) in zip(plots, panels, strict=True):
        x = places[x_label]
        for label, y in lines.items():
            if not all(math.isnan(value) for value in y):  # single ones leave a gap
                axes.plot(x, y, label=label, linewidth=1.5, marker="o" if len(x) <= MANY_POINTS else None, markersize=3)
        axes.set_title(title, fontsize=11)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.grid(alpha=0.3)
        axes.margins(y=0.1)
        if title == "Reward over time":
            _draw_evaluations(axes, columns.begin_s, evaluations)
        if len(axes.get_legend_handles_labels()[1]) > 1:
            axes.legend(edgecolor="none", framealpha=0.8, fontsize=9)
    figure.axes[2].set_ylim(0, 1.05)
    figure.axes[3].set_ylim(bottom=0)
    return figure


def _draw_evaluations(axes: Any, begin_s: float, evaluations: Sequence[EvaluationRecord]) -> None:
    """The held-out rewards over time, with their standard errors."""
    faces = cycle(("white", "black"))
    online = [one for one in evaluations if one.when == "online"]
    for ones in (online, *([one] for one in evaluations if one.when != "online")):
        style: dict[str, Any] = {"label": "held out, during training", "fmt": "D--", "color": "0.45", "capsize": 3}
        if ones is not online:
            style |= {"label": f"held out, {ones[0].when} training: {ones[0].reward_mean:.3f}", "fmt": "D", "capsize": 4}
            style |= {"color": "black", "markerfacecolor": next(faces)}
        if ones:
            seconds, rewards = [one.time_s - begin_s for one in ones], [one.reward_mean for one in ones]
            errors = [one.reward_standard_error or 0.0 for one in ones]
            axes.errorbar(seconds, rewards, yerr=errors, markersize=4, linewidth=1, zorder=3, **style)


def smoothed(values: Sequence[float]) -> list[float]:
    """The mean of each value and the `SMOOTHED` - 1 before it, without NaN; NaN where all of these are."""
    windows = [[y for y in values[max(0, i + 1 - SMOOTHED) : i + 1] if not math.isnan(y)] for i in range(len(values))]
    return [fmean(window) if window else math.nan for window in windows]
