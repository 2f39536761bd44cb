"""A run in numbers: the final table and a sample for the terminal, and `pipelinerl report`, an HTML page on several runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pipelinerl.config import RunConfig
from pipelinerl.errors import RunDirectoryError
from pipelinerl.metrics.records import EvaluationRecord, StepRecord
from pipelinerl.metrics.summary import edge_of
from pipelinerl.report import figures, html, new_table, number
from pipelinerl.report.series import REWARD, WINDOW, RunRecords, measure, pooled, read_run
from pipelinerl.status.screen import duration, pause, short

Row = tuple[str, str]
_STYLES = {"held-out reward": "bold", "NOT ACCOUNTED FOR": "bold red", "NOTHING LEARNED": "bold red"}


# ---- the summary as a table


class Attempt(NamedTuple):
    """One completion of a held-out problem, and its reward."""

    completion: str
    reward: float


def final_table(summary: Mapping[str, Any]) -> Table:
    """The contents of `summary.json` as a table for the terminal."""
    title = f"{summary['environment']}, {summary['schedule']}, seed {summary['seed']}: {summary['status']}"
    table = new_table(title)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for rows in summary_sections(summary):
        for line, (name, value) in enumerate(rows, start=1):
            style = _STYLES.get(name, "")
            table.add_row(Text(name, style), Text(value, style), end_section=line == len(rows))
    return table


def sample_before_after(prompt: str, before: Attempt | None, after: Attempt | None) -> RenderableType:
    """One held-out problem with the completions before and after training, if there are any."""
    parts: list[RenderableType] = [Panel(Text(prompt), title="one held-out problem", title_align="left", border_style="dim")]
    for name, attempt, style in (("before", before, "yellow"), ("after", after, "green")):
        if attempt is not None:
            title = f"{name} training, reward {attempt.reward:.3g}"
            text = Text(attempt.completion or "(empty)", "" if attempt.completion else "dim")
            parts.append(Panel(text, title=title, title_align="left", border_style=style))
    return Group(*parts)


def summary_sections(summary: Mapping[str, Any]) -> tuple[list[Row], ...]:
    """The contents of `summary.json` as rows of text, by section. A missing number is shown as `-`."""
    return _learning(summary), _throughput(summary), _on_policyness(summary), _resources(summary), _rollouts(summary)


def _learning(summary: Mapping[str, Any]) -> list[Row]:
    nothing = summary.get("nothing_learned")
    before, after = (_lengths(summary[f"eval_{when}_lengths"]) for when in ("before", "after"))
    return [
        *([("NOTHING LEARNED", nothing)] if nothing else []),
        ("held-out reward", f"{_evaluated(summary, 'before')} -> {_evaluated(summary, 'after')}"),
        *_rewards_by_environment(summary),
        *_online(summary),
        ("held-out length", f"{before} -> {after}"),
        ("training reward", f"{_reward(summary['reward_first'])} -> {_reward(summary['reward_last'])}"),
    ]


def _rewards_by_environment(summary: Mapping[str, Any]) -> list[Row]:
    """Held-out reward of each environment of a mixture; empty for summaries of older versions."""
    before, after = (summary.get(f"eval_{when}_metrics", {}) for when in ("before", "after"))
    names = sorted(name for name in {*before, *after} if name.endswith(REWARD))
    rows = [
        (f"  {name.removesuffix(REWARD)}", f"{_reward(before.get(name))} -> {_reward(after.get(name))}") for name in names
    ]
    return rows if len(rows) > 1 else []


def _online(summary: Mapping[str, Any]) -> list[Row]:
    evaluations, skipped = summary.get("eval_online", []), summary.get("eval_skipped", 0)
    if not evaluations and not skipped:
        return []
    last = f", the last {_reward(evaluations[-1]['reward'])} (version {evaluations[-1]['version']})" if evaluations else ""
    return [("  during training", f"evaluations: {len(evaluations)}{last}" + (f"; {skipped} skipped" if skipped else ""))]


def _throughput(summary: Mapping[str, Any]) -> list[Row]:
    steps = f"{summary['optimizer_steps']} optimizer steps, {summary['samples_trained']} rollouts"
    samples, tokens = _short(summary["samples_per_s"]), _short(summary["tokens_per_s"])
    generated, trained = _short(summary["tokens_generated"]), _short(summary["tokens_trained"])
    return [
        ("trained", f"{steps} in {duration(summary['wall_s'])}"),
        ("throughput", f"{samples} samples/s, {tokens} tokens/s generated"),
        ("tokens", f"{generated} generated, {trained} trained on"),
    ]


def _on_policyness(summary: Mapping[str, Any]) -> list[Row]:
    trained, sampled = number(summary["trained_length_mean"], ".1f"), number(summary["sampled_length_mean"], ".1f")
    # Summaries of older versions lack the numbers that are read with `get`.
    cut, started = summary.get("cut_fraction"), summary.get("started_length_mean")
    by_start = "" if started is None else f"; {started:.1f} of the latest groups in order of start"
    share = "" if cut is None else f", {cut:.1%} cut at their limit"
    rows = [
        ("ESS", f"mean {_reward(summary['ess_mean'])}, min {_reward(summary['ess_min'])}"),
        ("lag", f"mean {number(summary['lag_mean'], '.2f')}, max {number(summary['lag_max'], '.0f')} optimizer steps"),
        ("completion length", f"{trained} tokens trained on, {sampled} sampled{by_start}{share}"),
    ]
    lag, limited = summary.get("longest_lag_mean"), summary.get("longest_limited_fraction")
    if lag is not None and limited is not None:
        together = f"correlation of length and lag {number(summary['length_lag_correlation'], '.2f')}"
        rows.append(("longest quarter", f"lag mean {lag:.2f}, {limited:.2%} of weights limited; {together}"))
    return rows


def _resources(summary: Mapping[str, Any]) -> list[Row]:
    p50_s, p99_s = summary["update_pause_s_p50"], summary["update_pause_s_p99"]
    pauses = f", pause p50 {pause(p50_s)}, p99 {pause(p99_s)}" if p50_s is not None and p99_s is not None else ""
    engine, trainer = (number(summary[f"{phase}_busy_fraction"], ".0%") for phase in ("engine", "trainer"))
    memory: Mapping[str, int] = summary["peak_memory_bytes"]
    parts = ", ".join(f"{process} {_bytes(size)}" for process, size in memory.items())
    return [
        ("weight updates", f"{_short(summary['weight_updates'])}{pauses}"),
        ("busy", f"engine {engine}, trainer {trainer}"),
        ("peak memory", f"{_bytes(sum(memory.values()))} ({parts})" if memory else "-"),
    ]


def _rollouts(summary: Mapping[str, Any]) -> list[Row]:
    dropped: Mapping[str, int] = summary["rollouts_dropped"]
    reasons = f" ({', '.join(f'{reason} {rollouts}' for reason, rollouts in dropped.items())})" if dropped else ""
    account = (
        f"{number(summary['rollouts_started'], 'd')} started = {summary['rollouts_trained']} trained "
        f"+ {sum(dropped.values())} dropped{reasons} + {summary['rollouts_queued']} queued "
        f"+ {number(summary['rollouts_in_progress'], 'd')} in progress"
    )
    rows = [("rollouts", account)]
    if lengths := summary.get("actor_dropped_length_mean"):
        rows.append(("dropped by actor", ", ".join(f"{why}: {mean:.1f} tokens each" for why, mean in lengths.items())))
    if "conservation_error" in summary:
        rows.append(("NOT ACCOUNTED FOR", f"{summary['conservation_error']['missing']} rollouts: see summary.json"))
    return rows


def _evaluated(summary: Mapping[str, Any], when: str) -> str:
    error = summary[f"eval_reward_{when}_standard_error"]
    return _reward(summary[f"eval_reward_{when}"]) + (f" ± {error:.3f}" if error is not None else "")


def _lengths(lengths: Mapping[str, float | None] | None) -> str:
    patterns = {"mean": ".1f", "p50": ".0f", "p99": ".0f"}
    return ", ".join(f"{name} {number(lengths[name], pattern)}" for name, pattern in patterns.items()) if lengths else "-"


def _reward(value: float | None) -> str:
    return number(value, ".3f")


def _short(value: float | None) -> str:
    return "-" if value is None else short(value)


def _bytes(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


# ---- the page

LEARNING = (
    f"Training reward is the mean over the last {WINDOW} optimizer steps (of runs of 10 steps or more). Time counts from "
    "the moment when all stages were ready and nothing had been generated."
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
    held_out, environments, batches = (draw(drawn) for draw in (figures.held_out, figures.environments, figures.batch_sizes))
    body = [
        html.paragraph(", ".join(str(run_dir) for run_dir in run_dirs), "note"),
        html.heading("Result" if len(runs) == 1 else "Results"),
        _summary_table(runs),
        html.heading("Learning"),
        html.figure(figures.learning(drawn), LEARNING),
        *([html.heading("Held-out reward"), html.figure(held_out, HELD_OUT)] if held_out else []),
        *([html.heading("By environment"), html.figure(environments, ENVIRONMENTS)] if environments else []),
        *_metrics_table(runs),
        html.heading("On-policyness"),
        html.figure(figures.on_policyness(drawn), ON_POLICYNESS),
        html.heading("Generation and training"),
        html.figure(figures.throughput(drawn), "Rates are since the previous optimizer step."),
        html.figure(batches, BATCH_SIZES) if batches else html.paragraph(NO_TIMELINE, "note"),
    ]
    return html.page("pipelinerl: " + ", ".join(runs), body)


def labels_of(run_dirs: Sequence[Path]) -> list[str]:
    """The shortest distinct ends of the paths. Raises RunDirectoryError if a folder is named twice."""
    parts = [run_dir.resolve().parts for run_dir in run_dirs]
    if len(set(parts)) < len(parts):
        twice = next(run_dir for run_dir, part in zip(run_dirs, parts, strict=True) if parts.count(part) > 1)
        raise RunDirectoryError(f"{twice} is named twice; name each run once")
    ends = (["/".join(part[-length:]) for part in parts] for length in range(1, max(map(len, parts)) + 1))
    return next(labels for labels in ends if len(set(labels)) == len(labels))


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
        "task, model": f"{config.environment.kind}, {config.model.path}",
        "H, B, K": f"{records.slots}, {config.trainer.batch_size}, {config.actor.group_size}",
        "seed": str(config.seed),
        "training alone": f"{measured.steps} steps, {measured.samples} rollouts in {measured.training_s:.1f} s: "
        f"{measured.samples_per_s:.1f} samples/s, {measured.tokens_per_s:.0f} tokens/s",
    }
    if summary is not None:
        try:
            column |= {name: value for section in summary_sections(summary) for name, value in section}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RunDirectoryError(f"{records.root / 'summary.json'} is damaged ({error!r}); delete it") from error
    return column


def name_of(config: RunConfig) -> str:
    """The schedule as `compare` names it: `pipeline`, `conventional:4`."""
    schedule = config.schedule
    return schedule.kind if schedule.kind == "pipeline" else f"{schedule.kind}:{schedule.steps_per_round}"


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
    edge = edge_of(steps)
    before, after = (evaluations[0].metrics, evaluations[-1].metrics) if evaluations else ({}, {})
    columns = (pooled(steps[:edge]), pooled(steps[-edge:]), before, after)
    return [[name, *(number(means.get(name), ".4g") for means in columns)] for name in sorted(set().union(*columns))]
