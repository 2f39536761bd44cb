"""`pipelinerl report`: an HTML page on one or more runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipelinerl.config import yaml_text
from pipelinerl.config.secrets import without_secrets
from pipelinerl.errors import INVALID_DATA, RunDirectoryError
from pipelinerl.metrics.evaluations import EvaluationRecord
from pipelinerl.metrics.records import StepRecord
from pipelinerl.metrics.summary import edge_of
from pipelinerl.metrics.tail import samples
from pipelinerl.report import figures, html, number
from pipelinerl.report.series import WINDOW, RunRecords, labels_of, measure, name_of, pooled, read_run
from pipelinerl.report.terminal import largest_gain, summary_sections

LEARNING = (
    f"Training reward is the mean over the last {WINDOW} optimizer steps (of runs of 10 steps or more). Time counts from "
    "the moment when all stages were ready and nothing had been generated. Diamonds: held-out evaluations."
)
HELD_OUT = (
    "Evaluations before, during and after training, with standard errors. During training the weights change within an "
    "evaluation: it is drawn at the mean version of its tokens, and the bar covers all their versions."
)
ENVIRONMENTS = (
    f"Training reward, the mean over the last {WINDOW} optimizer steps (of runs of 10 or more). Diamonds: held out."
)
METRICS = (
    "Training: means over those rollouts of the first and last steps (a quarter of them, at most 5) that have the metric. "
    "Held out: the first evaluation and the last."
)
ON_POLICYNESS = (
    "Lag of a token: optimizer steps between the weights that sampled it and those being trained. ESS is "
    "(sum w)^2 / (N sum w^2) of the importance weights of a step."
)
NO_TIMELINE = "The run has no timeline of batch sizes."
BATCH_SIZES = "Sequences in progress for some seconds in the middle of the run. Dashed: the engines' slots, H."


def report_page(run_dirs: Sequence[Path]) -> str:
    """The HTML of a report on these runs. Raises RunDirectoryError for one that is not a run, empty or damaged."""
    runs = dict(zip(labels_of(run_dirs), map(read_run, run_dirs), strict=True))
    drawn = [figures.drawn_run(records, label) for label, records in runs.items()]
    held_out, environments, metrics = (draw(drawn) for draw in (figures.held_out, figures.environments, figures.metrics))
    batches = figures.batch_sizes(drawn)
    body = [
        html.paragraph(", ".join(str(run_dir) for run_dir in run_dirs), "note"),
        html.heading("Result" if len(runs) == 1 else "Results"),
        _summary_table(runs),
        html.heading("Learning"),
        html.figure(figures.learning(drawn), LEARNING),
        *([html.heading("Held-out reward"), html.figure(held_out, HELD_OUT)] if held_out else []),
        *([html.heading("By environment"), html.figure(environments, ENVIRONMENTS)] if environments else []),
        *_metrics_table(runs),
        *([html.figure(metrics, ENVIRONMENTS)] if metrics else []),
        html.heading("On-policyness"),
        html.figure(figures.on_policyness(drawn), ON_POLICYNESS),
        html.heading("Generation and training"),
        html.figure(figures.throughput(drawn), "Rates are since the previous optimizer step."),
        html.figure(batches, BATCH_SIZES) if batches else html.paragraph(NO_TIMELINE, "note"),
        *(part for label, records in runs.items() for part in _rollouts(label, records)),
        html.heading("Run files"),
        *(html.folded(label, yaml_text.dump(without_secrets(records.config))) for label, records in runs.items()),
    ]
    return html.page("pipelinerl: " + ", ".join(runs), body)


def _summary_table(runs: Mapping[str, RunRecords]) -> str:
    """One column per run, from its records and, if there is one, its summary."""
    columns = [_column(records) for records in runs.values()]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [[name, *(column.get(name, "-") for column in columns)] for name in names]
    return html.table(["", *runs] if len(runs) > 1 else [], rows, words=True)


def _column(records: RunRecords) -> dict[str, str]:
    measured = measure(records.steps, records.begin_s)
    config, summary = records.config, records.summary
    column = {
        "status": "no summary: killed, or still running" if summary is None else str(summary.get("status", "-")),
        "schedule": name_of(config),
        "task, model": f"{Path(config.environment.kind).name}, {config.model.path}",
        "batch": f"{config.trainer.batch_size} rollouts per step, {config.actor.group_size} attempts per problem, "
        f"{records.slots} engine slots",
        "seed": str(config.seed),
        "training, without start-up": f"{measured.steps} steps, {measured.samples} rollouts in {measured.training_s:.1f} s: "
        f"{measured.samples_per_s:.1f} samples/s, {measured.tokens_per_s:.0f} tokens/s",
    }
    if summary is not None:
        try:
            column |= {name: value for section in summary_sections(summary) for name, value in section}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RunDirectoryError(f"{records.root / 'summary.json'} is damaged ({error!r}); delete it") from error
    return column


def _rollouts(label: str, records: RunRecords) -> list[str]:
    """An answer before and after training, the first of the last evaluation, and those to the newest training problem."""
    parts = []
    if (gain := largest_gain(records.root)) is not None:
        named = zip(("before", "after"), gain, strict=True)
        cells = [[when, one.prompt, one.completion, f"{one.reward:.4g}"] for when, one in named]
        table = html.table(["training", "problem", "answer", "reward"], cells, words=True)
        parts += [html.heading(f"One held-out problem, before and after: {label}"), table]
    for record, what in ((records.evaluations[-1:], "held out"), (records.steps[-1:], "training")):
        try:
            rows = samples(records.root, record[0]) if record else []
        except (OSError, *INVALID_DATA):
            continue
        same = Counter((prompt, answer, number(reward, ".4g"), str(tokens)) for _, prompt, answer, reward, tokens in rows)
        cells = [[*row, f"{times} times" if times > 1 else "once"] for row, times in same.items()]
        if cells:
            table = html.table(["problem", "answer", "reward", "tokens", "given"], cells, words=True)
            parts += [html.heading(f"Newest answers, {what}: {label}"), table]
    return parts


def _metrics_table(runs: Mapping[str, RunRecords]) -> list[str]:
    """The metrics of the rollouts, if there are any."""
    rows = [
        [*([label] if len(runs) > 1 else []), *row]
        for label, records in runs.items()
        for row in metric_rows(records.steps, records.evaluations)
    ]
    if not rows:
        return []
    header = [*(["run"] if len(runs) > 1 else []), "metric", "training, first", "last", "held out, before", "after"]
    return [html.heading("Metrics of the rollouts"), html.table(header, rows), html.paragraph(METRICS, "note")]


def metric_rows(steps: Sequence[StepRecord], evaluations: Sequence[EvaluationRecord]) -> list[list[str]]:
    """For each metric: name, means at the beginning and end of training, and means in the first and last evaluation."""
    edge = edge_of(len(steps))
    before, after = (evaluations[0].metrics, evaluations[-1].metrics) if evaluations else ({}, {})
    columns = (pooled(steps[:edge]), pooled(steps[-edge:]), before, after)
    return [[name, *(number(means.get(name), ".4g") for means in columns)] for name in sorted(set().union(*columns))]
