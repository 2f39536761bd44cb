"""The result of a run on the terminal: its summary as a table, and one answer before and after training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pipelinerl.metrics.evaluations import EvaluatedProblem
from pipelinerl.metrics.reading import read_json_lines
from pipelinerl.metrics.statistics import LOW_ESS, REWARD
from pipelinerl.metrics.summary import edge_of
from pipelinerl.report import count, new_table, number
from pipelinerl.status.screen import duration, pause, short

Row = tuple[str, str]
_STYLES = {"held-out reward": "bold"} | dict.fromkeys(("NOT ACCOUNTED FOR", "NOTHING LEARNED", "COLLAPSED"), "bold red")
VERBOSE = ("lag", "longest quarter", "weight updates", "generated")
"""Rows that the table has only on demand."""


def final_table(summary: Mapping[str, Any], *, verbose: bool = False) -> Table:
    """The contents of `summary.json` as a table for the terminal; all of them if it is `verbose`."""
    title = f"{Path(summary['environment']).name}, {summary['schedule']}, seed {summary['seed']}: {summary['status']}"
    table = new_table(title)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for section in summary_sections(summary):
        rows = [row for row in section if verbose or row[0] not in VERBOSE]
        for line, (name, value) in enumerate(rows, start=1):
            style = _STYLES.get(name, "")
            table.add_row(Text(name, style), Text(value, style), end_section=line == len(rows))
    return table


def sample_before_after(before: EvaluatedProblem, after: EvaluatedProblem) -> RenderableType:
    """One held-out problem with the completions before and after training."""
    prompt = Text(before.prompt or after.prompt)
    parts = [Panel(prompt, title="one held-out problem", title_align="left", border_style="dim")]
    for name, attempt, style in (("before", before, "yellow"), ("after", after, "green")):
        title = f"{name} training, reward {attempt.reward:.3g}"
        text = Text(attempt.completion or "(empty)", "" if attempt.completion else "dim")
        parts.append(Panel(text, title=title, title_align="left", border_style=style))
    return Group(*parts)


def largest_gain(run_dir: Path) -> tuple[EvaluatedProblem, EvaluatedProblem] | None:
    """The held-out problem whose reward rose most, before and after training; among equals, the median length after."""
    before, after = (_answers(run_dir / "rollouts" / f"evaluation-{when}.jsonl") for when in ("before", "after"))
    both = [(before[key], after[key]) for key in before.keys() & after.keys()]
    most = max((last.reward - first.reward for first, last in both), default=0.0)
    best = [(first, last) for first, last in both if last.reward - first.reward == most]
    best.sort(key=lambda pair: (pair[1].length, pair[1].problem_id))
    return best[len(best) // 2] if best else None


def _answers(path: Path) -> dict[str, EvaluatedProblem]:
    return {one.problem_id: one for one in read_json_lines(path, EvaluatedProblem)} if path.is_file() else {}


def summary_sections(summary: Mapping[str, Any]) -> tuple[list[Row], ...]:
    """The contents of `summary.json` as rows of text, by section. A missing number is shown as `-`."""
    return _learning(summary), _throughput(summary), _on_policyness(summary), _resources(summary), _rollouts(summary)


def _learning(summary: Mapping[str, Any]) -> list[Row]:
    nothing = summary.get("nothing_learned")
    first, last = (_reward(summary[f"reward_{edge}"]) for edge in ("first", "last"))
    before, after = (_lengths(summary[f"eval_{when}_lengths"]) for when in ("before", "after"))
    held_out = any(summary[f"eval_reward_{when}"] is not None for when in ("before", "after"))
    return [
        *([("NOTHING LEARNED", nothing)] if nothing else []),
        *([("stopped early", f"by a callback: {why}")] if (why := summary.get("stopped_by")) else []),
        *([("COLLAPSED", collapse)] if (collapse := summary.get("collapse")) else []),
        *_metrics(summary),
        *([("held-out reward", f"{_evaluated(summary, 'before')} -> {_evaluated(summary, 'after')}")] if held_out else []),
        *_rewards_by_environment(summary),
        *_online(summary),
        *([("held-out length", f"{before} -> {after}")] if held_out else []),
        ("training reward", f"{first} -> {last} (means of {count(edge_of(summary['optimizer_steps']), 'step')} each)"),
    ]


def _metrics(summary: Mapping[str, Any]) -> list[Row]:
    """The share of tool calls that failed, and the metrics of the environment; empty for summaries of older versions."""
    first, last = (summary.get(f"metrics_{edge}", {}) for edge in ("first", "last"))
    names = [name for name in sorted({*first, *last}) if first.get(name) or last.get(name)]
    rows = [("metrics", ", ".join(f"{name} {_short(first.get(name))} -> {_short(last.get(name))}" for name in names))]
    if any(name.split("/")[-1] == "tool_calls" for name in names):
        rows.insert(0, ("tool errors", f"{_failed_calls(first)} -> {_failed_calls(last)} of the calls"))
    return rows if names else []


def _failed_calls(metrics: Mapping[str, float]) -> str:
    failed, calls = (
        sum(value for name, value in metrics.items() if name.split("/")[-1] == of) for of in ("tool_errors", "tool_calls")
    )
    return f"{failed / calls:.0%}" if calls else "-"


def _rewards_by_environment(summary: Mapping[str, Any]) -> list[Row]:
    """Held-out reward of each environment of a mixture, and of each further set; empty for summaries of older versions."""
    before, after = (summary.get(f"eval_{when}_metrics", {}) for when in ("before", "after"))
    names = sorted(name for name in {*before, *after} if name.endswith(REWARD))
    return [
        (f"  {name.removesuffix(REWARD)}", f"{_reward(before.get(name))} -> {_reward(after.get(name))}") for name in names
    ]


def _online(summary: Mapping[str, Any]) -> list[Row]:
    evaluations, skipped = summary.get("eval_online", []), summary.get("eval_skipped", 0)
    if not evaluations and not skipped:
        return []
    last = f", the last {_reward(evaluations[-1]['reward'])} (version {evaluations[-1]['version']})" if evaluations else ""
    return [("  during training", f"evaluations: {len(evaluations)}{last}" + (f"; {skipped} skipped" if skipped else ""))]


def _throughput(summary: Mapping[str, Any]) -> list[Row]:
    steps = f"{count(summary['optimizer_steps'], 'optimizer step')}, {count(summary['samples_trained'], 'rollout')}"
    samples, tokens = _short(summary["samples_per_s"]), _short(summary["tokens_per_s"])
    generated, trained = _short(summary["tokens_generated"]), _short(summary["tokens_trained"])
    return [
        ("trained", f"{steps} in {duration(summary['wall_s'])}"),
        ("throughput", f"{samples} samples/s, {tokens} tokens/s generated, with start-up"),
        ("tokens", f"{generated} generated, {trained} trained on"),
    ]


def _on_policyness(summary: Mapping[str, Any]) -> list[Row]:
    trained, sampled = number(summary["trained_length_mean"], ".1f"), number(summary["sampled_length_mean"], ".1f")
    # Summaries of older versions lack the numbers that are read with `get`.
    cut, started = summary.get("cut_fraction"), summary.get("started_length_mean")
    by_start = "" if started is None else f"; {started:.1f} of the latest groups in order of start"
    share = "" if cut is None else f", {cut:.1%} cut at their limit"
    steps = summary.get("ess_low_steps", 0)
    low = f"; below {LOW_ESS:g} in {count(steps, 'step')}, first in step {summary['ess_low_first']}" if steps else ""
    rows = [
        ("ESS", f"mean {_reward(summary['ess_mean'])}, min {_reward(summary['ess_min'])}{low}"),
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
    size, delta = summary.get("update_bytes_mean"), summary.get("update_delta_fraction")
    sent = f", {_bytes(size)} each" if size is not None else ""
    sent += f", {delta:.0%} as deltas" if delta else ""
    engine, trainer = (number(summary[f"{phase}_busy_fraction"], ".0%") for phase in ("engine", "trainer"))
    gpus = _memory(summary.get("peak_gpu_memory_bytes", {}))
    return [
        ("weight updates", f"{_short(summary['weight_updates'])}{pauses}{sent}"),
        ("busy", f"engine {engine}, trainer {trainer}"),
        ("peak memory", _memory(summary["peak_memory_bytes"]) or "-"),
        *([("peak GPU memory", gpus)] if gpus else []),
    ]


def _memory(peaks: Mapping[str, int]) -> str:
    parts = ", ".join(f"{process} {_bytes(size)}" for process, size in peaks.items())
    return f"{_bytes(sum(peaks.values()))} ({parts})" if peaks else ""


def _rollouts(summary: Mapping[str, Any]) -> list[Row]:
    dropped: Mapping[str, int] = summary["rollouts_dropped"]
    reasons = f" ({', '.join(f'{reason} {rollouts}' for reason, rollouts in dropped.items())})" if dropped else ""
    account = (
        f"{number(summary['rollouts_started'], 'd')} started = {summary['rollouts_trained']} trained "
        f"+ {sum(dropped.values())} dropped{reasons} + {summary['rollouts_queued']} queued "
        f"+ {number(summary['rollouts_in_progress'], 'd')} unfinished"
    )
    rows = [("rollouts", account)]
    rows += _costs(summary)
    if lengths := summary.get("actor_dropped_length_mean"):
        rows.append(("dropped by actor", ", ".join(f"{why}: {mean:.1f} tokens each" for why, mean in lengths.items())))
    if "conservation_error" in summary:
        rows.append(("NOT ACCOUNTED FOR", f"{summary['conservation_error']['missing']} rollouts: see summary.json"))
    return rows


def _costs(summary: Mapping[str, Any]) -> list[Row]:
    """What was generated for what was trained on; empty for summaries of older versions."""
    if "generated_per_trained" not in summary:
        return []
    rollouts, tokens = (number(summary["generated_per_trained"][name], ".2f") for name in ("rollouts", "tokens"))
    dropped = "".join(f", {share:.1%} {reason}" for reason, share in summary["dropped_fraction"].items())
    without = number(summary["no_gradient_fraction"], ".1%")
    cost = f"{rollouts} rollouts, {tokens} tokens per one trained on{dropped}; {without} of these without gradient"
    skipped = f"{summary['groups_skipped']} problems ({number(summary['skipped_fraction'], '.1%')}) by the online filter"
    return [("generated", cost), *([("skipped", skipped)] if summary["groups_skipped"] else [])]


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


def _bytes(size: float) -> str:
    if size < 2**20:
        return f"{size / 2**10:.1f} KiB"
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
