"""The results of an evaluation: its records, the estimates of one model, the output folder, and the table.

OUT/summary.json              settings, and a row per model
OUT/NAME/attempts.jsonl       one line per attempt, written when it ends, so in order of completion
OUT/NAME/pass_rates.jsonl     one line per problem, in order
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from pipelinerl.errors import RunDirectoryError
from pipelinerl.experiments.evaluate.models import Target
from pipelinerl.experiments.statistics import Floats, Interval, mean_intervals, pass_at_k, powers_of_two
from pipelinerl.experiments.watch.page import page
from pipelinerl.files import JsonLines
from pipelinerl.metrics.evaluations import EvaluatedProblem
from pipelinerl.metrics.statistics import mean_metrics
from pipelinerl.report import number, only_shown, rendered, write_file, write_json, writing_to
from pipelinerl.report.sections import PageSection
from pipelinerl.types import Problem

Status = Literal["unfinished", "interrupted", "finished"]


class AttemptRecord(EvaluatedProblem, frozen=True, kw_only=True):
    """A line of `attempts.jsonl`: attempt number `attempt` (0, 1, ...) at problem number `number` of the evaluation."""

    number: int
    attempt: int
    passed: bool


class ProblemPassRate(msgspec.Struct, frozen=True):
    """A line of `pass_rates.jsonl`. A failed attempt counts as one that did not pass."""

    id: str
    attempts: int
    passes: int


class EvaluationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of an evaluation. An environment may request fewer than `max_tokens`."""

    environment: str
    environment_args: dict[str, Any]
    environment_seed: int
    problems: int
    training_problems: bool
    attempts: int
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    pass_at: float
    seed: int
    resamples: int
    level: float


class Estimates(msgspec.Struct, frozen=True, kw_only=True):
    """Means over problems: the reward (mean@K), and pass@k by k."""

    reward: Interval
    passes: dict[int, Interval]


class ModelResult(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one model.

    `problems` counts the problems with all K attempts; `estimates` are over these only (None if there are none).
    `attempts` counts all attempts, `failed` those that gave no rollout, by reason. Failed attempts count as reward 0 and
    not passed. `length_mean` (sampled tokens) and `cut` (the share that ended at the token limit) are over the attempts
    that did not fail. `metrics` are means of the environment's metrics, each over the `metric_counts` attempts that have
    it. `minus_first` is this model minus the first one, paired by problem.
    """

    name: str
    path: str
    version: int | None
    folder: str
    problems: int
    attempts: int
    estimates: Estimates | None
    length_mean: float | None
    cut: float | None
    failed: dict[str, int]
    metrics: dict[str, float] = {}
    metric_counts: dict[str, int] = {}
    minus_first: Estimates | None = None


class EvaluationSummary(msgspec.Struct, frozen=True, kw_only=True):
    """`summary.json`. Status `unfinished`: the evaluation is still running, or its process was killed."""

    status: Status
    settings: EvaluationSettings
    models: tuple[ModelResult, ...] = ()


# ---- the estimates of one model


class Tally:
    """Running counts over the attempts of one model at `problems`."""

    def __init__(self, problems: Sequence[Problem], settings: EvaluationSettings) -> None:
        self._ids = [problem.id for problem in problems]
        self._settings = settings
        self._rewards: defaultdict[int, list[float]] = defaultdict(list)
        self._passes: Counter[int] = Counter()
        self._failed: Counter[str] = Counter()
        self._metrics: list[dict[str, float]] = []
        self._tokens = 0
        self._cut = 0
        self.attempts = 0
        self.last_failure = ""

    def add(self, record: AttemptRecord) -> None:
        self.attempts += 1
        self._rewards[record.number].append(record.reward)
        self._passes[record.number] += record.passed
        if record.failure is not None:
            self.last_failure = record.failure
            self._failed[record.failure.partition(":")[0]] += 1
        else:
            self._metrics.append(record.metrics)
        self._tokens += record.length
        self._cut += record.finish_reason == "length"

    @property
    def reward(self) -> float | None:
        """Mean over all attempts so far."""
        return sum(map(sum, self._rewards.values())) / self.attempts if self.attempts else None

    @property
    def all_failed(self) -> bool:
        return 0 < self.attempts == self._failed.total()

    def pass_rates(self) -> list[ProblemPassRate]:
        """The pass rate of every attempted problem, in order."""
        return [ProblemPassRate(self._ids[n], len(self._rewards[n]), self._passes[n]) for n in sorted(self._rewards)]

    def values(self) -> dict[int, Floats]:
        """Problem number -> mean reward, pass@1, pass@2, pass@4, ..., for problems with all of their attempts."""
        wanted = self._settings.attempts
        ks = powers_of_two(wanted)
        return {
            number: np.array([sum(rewards) / wanted, *(pass_at_k(wanted, self._passes[number], k) for k in ks)])
            for number, rewards in sorted(self._rewards.items())
            if len(rewards) == wanted
        }

    def result(self, target: Target, version: int | None, first: Mapping[int, Floats] | None) -> ModelResult:
        """The model's results. `first`: the values of the first model, to compare with; None for that model itself."""
        values, answered = self.values(), self.attempts - self._failed.total()
        difference = {number: values[number] - first[number] for number in values if number in first} if first else {}
        averaged = mean_metrics(self._metrics)
        return ModelResult(
            name=target.name,
            path=target.model.path,
            version=version,
            folder=target.folder,
            problems=len(values),
            attempts=self.attempts,
            estimates=self._estimates(values),
            length_mean=self._tokens / answered if answered else None,
            cut=self._cut / answered if answered else None,
            failed=dict(sorted(self._failed.items())),
            metrics=averaged.means,
            metric_counts=averaged.counts,
            minus_first=self._estimates(difference),
        )

    def _estimates(self, values: Mapping[int, Floats]) -> Estimates | None:
        if not values:
            return None
        settings = self._settings
        reward, *passes = mean_intervals(
            np.array(list(values.values())), resamples=settings.resamples, seed=settings.seed, level=settings.level
        )
        return Estimates(reward=reward, passes=dict(zip(powers_of_two(settings.attempts), passes, strict=True)))


# ---- the output folder

SUMMARY = "summary.json"
ATTEMPTS = "attempts.jsonl"
PASS_RATES = "pass_rates.jsonl"
PAGE = "report.html"


class EvaluationFolder:
    """The folder of one evaluation. All methods raise RunDirectoryError if it can't be written to."""

    def __init__(self, root: Path) -> None:
        """Create the folder. Raises RunDirectoryError if it exists and is not empty."""
        self.root = root
        with writing_to(root):
            if root.exists() and (not root.is_dir() or any(root.iterdir())):
                raise RunDirectoryError(f"{root} exists and is not empty; choose another --out")
            root.mkdir(parents=True, exist_ok=True)

    def write_summary(self, summary: EvaluationSummary) -> None:
        write_json(self.root / SUMMARY, summary)

    def write_page(self, summary: EvaluationSummary) -> None:
        with only_shown(PAGE):
            write_file(self.root / PAGE, page("Evaluation", evaluation_sections(summary)).encode())

    def write_pass_rates(self, folder: str, rates: Sequence[ProblemPassRate]) -> None:
        write_file(self.root / folder / PASS_RATES, b"".join(msgspec.json.encode(rate) + b"\n" for rate in rates))

    @contextmanager
    def attempts(self, folder: str) -> Iterator[Callable[[AttemptRecord], None]]:
        """A function that writes one attempt of the model in `folder`."""
        with writing_to(self.root):
            (self.root / folder).mkdir(exist_ok=True)
            lines = JsonLines(self.root / folder / ATTEMPTS)

        def write(record: AttemptRecord) -> None:
            with writing_to(self.root):
                lines.write(record)

        with lines:
            yield write


# ---- the table: one row per model, with intervals below the estimates


def evaluation_sections(summary: EvaluationSummary) -> list[PageSection]:
    """The results, and the means of the environment's metrics, if there are any."""
    settings, models = summary.settings, summary.models
    ks = powers_of_two(settings.attempts)
    compared = len(models) > 1
    title = f"{settings.environment}: {settings.attempts} attempts at each problem, temperature {settings.temperature:g}"
    title += ", training problems" if settings.training_problems else ""
    notes = [f"in brackets: {settings.level:.0%} intervals over problems" + ("; differences are paired" if compared else "")]
    if summary.status == "interrupted":
        notes.append("INTERRUPTED: short answers end first, so the counted problems are not typical")
    columns = ["problems", f"mean@{settings.attempts}", *(f"pass@{k}" for k in ks)]
    columns += [f"{name} - first" for name in columns[1:3]] if compared else []
    columns += ["tokens", "cut", "failed"]
    cells = [[model.name, *_cells(model, ks, compared)] for model in models]
    sections = [PageSection(title=title, texts=notes, header=["model", *columns], rows=cells)]
    if metrics := sorted({metric for model in models for metric in model.metrics}):
        rows = [[metric, *(number(model.metrics.get(metric), ".4g") for model in models)] for metric in metrics]
        note = "means over the attempts that have the metric"
        sections.append(
            PageSection(title="Metrics", texts=[note], header=["metric", *(one.name for one in models)], rows=rows)
        )
    return sections


def evaluation_table(summary: EvaluationSummary) -> str:
    """The results as text.

    A table that would be wider than the terminal (or COLUMNS) is continued below, with the names of its rows again.
    """
    parts: list[RenderableType] = []
    for section in evaluation_sections(summary):
        names, *cells = zip(*section.rows, strict=True) if section.rows else [()] * len(section.header)
        columns = list(zip(section.header[1:], cells, strict=True))
        parts += [Text(section.title, "bold"), *_fitting(section.header[0], names, columns)]
        parts += [Text(note, "dim") for note in section.texts]
    return rendered(*parts)


def _fitting(name: str, rows: Sequence[str], columns: Sequence[tuple[str, Sequence[str]]]) -> list[Table]:
    """Tables of these columns, as many as it takes for none to be wider than the terminal. Each begins with `rows`."""
    room = Console().width - 1 - _width(name, rows)
    tables: list[list[tuple[str, Sequence[str]]]] = []
    left = 0
    for heading, cells in columns:
        left -= (width := _width(heading, cells))
        if left < 0 or not tables:
            tables.append([])
            left = room - width
        tables[-1].append((heading, cells))
    made = []
    for some in tables:
        table = Table(border_style="dim")
        table.add_column(name, overflow="fold")
        for heading, _ in some:
            table.add_column(heading, no_wrap=True, justify="right")
        for row, *cells_of_row in zip(rows, *(cells for _, cells in some), strict=True):
            table.add_row(Text(row), *cells_of_row)
        made.append(table)
    return made


def _width(heading: str, cells: Sequence[str]) -> int:
    """That of a column, with its border."""
    return max(len(line) for text in (heading, *cells) for line in text.split("\n")) + 3


def _cells(model: ModelResult, ks: tuple[int, ...], compared: bool) -> list[str]:
    found, difference = model.estimates, model.minus_first
    cells = [str(model.problems)]
    cells += [_cell(one, ".3f") for one in (found.reward, *found.passes.values())] if found else ["-"] * (1 + len(ks))
    if compared:
        cells += [_cell(one, "+.3f") for one in (difference.reward, difference.passes[1])] if difference else ["", ""]
    failed = "\n".join(f"{amount} {reason}" for reason, amount in model.failed.items())
    return [*cells, number(model.length_mean, ".1f"), number(model.cut, ".1%"), failed or "0"]


def _cell(interval: Interval, pattern: str) -> str:
    return f"{interval.mean:{pattern}}\n({interval.low:{pattern}}, {interval.high:{pattern}})"
