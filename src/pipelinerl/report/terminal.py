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
from pipelinerl.metrics.reading import read_lines
from pipelinerl.metrics.statistics import LOW_ESS, REWARD
from pipelinerl.metrics.summary import edge_of
from pipelinerl.report import count
from pipelinerl.run_directory import RunDirectory
from pipelinerl.status.view import duration, pause, short

Row = tuple[str, str]
_STYLES = {"held-out reward": "bold"} | dict.fromkeys(("NOT ACCOUNTED FOR", "NOTHING LEARNED", "COLLAPSED"), "bold red")


def final_table(summary: Mapping[str, Any]) -> Table:
    """The contents of `summary.json` as a table for the terminal."""
    title = f"{Path(summary['environment']).name}, {summary['schedule']}, seed {summary['seed']}: {summary['status']}"
    table = Table(title=Text(title, "bold"), title_justify="left", show_header=False, border_style="dim")
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for section in summary_sections(summary):
        for line, (name, value) in enumerate(section, start=1):
            style = _STYLES.get(name, "")
            table.add_row(Text(name, style), Text(value, style), end_section=line == len(section))
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
    before, after = (
        {one.problem_id: one for one in read_lines(RunDirectory(run_dir).evaluation(when), EvaluatedProblem)}
        for when in ("before", "after")
    )
    both = [(before[key], after[key]) for key in before.keys() & after.keys()]
    most = max((last.reward - first.reward for first, last in both), default=0.0)
    best = [(first, last) for first, last in both if last.reward - first.reward == most]
    best.sort(key=lambda pair: (pair[1].length, pair[1].problem_id))
    return best[len(best) // 2] if best else None


class _Shown:
    """A value of a summary for f-strings: `-` if it is missing. Its attributes and items are the values in it."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __getattr__(self, name: str) -> _Shown:
        return _Shown((self._value or {}).get(name))

    __getitem__ = __getattr__

    def __format__(self, pattern: str) -> str:
        formats = {"short": short, "bytes": _bytes, "pause": pause, "time": duration}
        if self._value is None:
            return "-"
        return formats[pattern](self._value) if pattern in formats else format(self._value, pattern)


def _bytes(size: float) -> str:
    if size < 2**20:
        return f"{size / 2**10:.1f} KiB"
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def summary_sections(summary: Mapping[str, Any]) -> tuple[list[Row], ...]:
    """The contents of `summary.json` as rows of text, by section. A missing number is shown as `-`."""
    see = _Shown(summary)
    steps = f"{count(summary['optimizer_steps'], 'optimizer step')}, {count(summary['samples_trained'], 'rollout')}"
    throughput = [
        ("trained", f"{steps} in {see.wall_s:time}"),
        ("throughput", f"{see.samples_per_s:short} samples/s, {see.tokens_per_s:short} tokens/s generated, with start-up"),
        ("tokens", f"{see.tokens_generated:short} generated, {see.tokens_trained:short} trained on"),
    ]
    if (given := summary.get("prompt_tokens")) and (computed := summary["prefilled_tokens"]):
        prompts = f"{see.prefilled_tokens:short} computed of {see.prompt_tokens:short}: one in {given / computed:.1f}"
        throughput.append(("prompt tokens", prompts))
    return (
        _learning(summary, see),
        throughput,
        _on_policyness(summary, see),
        _resources(summary, see),
        _rollouts(summary, see),
    )


def _learning(summary: Mapping[str, Any], see: _Shown) -> list[Row]:
    get = summary.get
    stopped = f"by a callback: {why}" if (why := get("stopped_by")) else None
    notes = {"NOTHING LEARNED": get("nothing_learned"), "stopped early": stopped, "COLLAPSED": get("collapse")}
    rows = [(name, note) for name, note in notes.items() if note] + _metrics(summary)
    if supervised := get("warm_start_steps", 0):
        rows.append(("warm start", f"{count(supervised, 'supervised step')}, before all that follows"))
    evaluated = any(get(f"eval_reward_{when}") is not None for when in ("before", "after"))
    if evaluated:
        known = (get(f"eval_reward_{when}_standard_error") for when in ("before", "after"))
        errors = ["" if error is None else f" ± {error:.3f}" for error in known]
        change = f"{see.eval_reward_before:.3f}{errors[0]} -> {see.eval_reward_after:.3f}{errors[1]}"
        rows.append(("held-out reward", change))
    before, after = (see[f"eval_{when}_metrics"] for when in ("before", "after"))
    names = {*get("eval_before_metrics", {}), *get("eval_after_metrics", {})}
    for name in sorted(name for name in names if name.endswith(REWARD)):  # of environments and further sets
        change = f"{before[name]:.3f} -> {after[name]:.3f}"
        rows.append((f"  {name.removesuffix(REWARD)}", change))
    evaluations, skipped = get("eval_online", []), get("eval_skipped", 0)
    if evaluations or skipped:
        last = [f"the last {one['reward']:.3f} (version {one['version']})" for one in evaluations[-1:]]
        more = f"; {skipped} skipped" if skipped else ""
        rows.append(("  during training", ", ".join([f"evaluations: {len(evaluations)}", *last]) + more))
    if evaluated:
        lengths = (see[f"eval_{when}_lengths"] for when in ("before", "after"))
        shown = (f"mean {one.mean:.1f}, p50 {one.p50:.0f}, p99 {one.p99:.0f}" for one in lengths)
        rows.append(("held-out length", " -> ".join(shown)))
    edge = count(edge_of(summary["optimizer_steps"]), "step")
    change = f"{see.reward_first:.3f} -> {see.reward_last:.3f} (means of {edge} each)"
    return [*rows, ("training reward", change)]


def _metrics(summary: Mapping[str, Any]) -> list[Row]:
    """The metrics of the environment."""
    first, last = summary.get("metrics_first", {}), summary.get("metrics_last", {})
    names = [name for name in sorted({*first, *last}) if first.get(name) or last.get(name)]
    see = _Shown(first), _Shown(last)
    changes = (f"{name} {' -> '.join(f'{edge[name]:short}' for edge in see)}" for name in names)
    return [("metrics", ", ".join(changes))] if names else []


def _on_policyness(summary: Mapping[str, Any], see: _Shown) -> list[Row]:
    low = summary.get("ess_low_steps", 0)
    below = f"; below {LOW_ESS:g} in {count(low, 'step')}, first in step {see.ess_low_first:d}" if low else ""
    lengths = f"{see.trained_length_mean:.1f} tokens trained on, {see.sampled_length_mean:.1f} sampled"
    if summary.get("started_length_mean") is not None:
        lengths += f"; {see.started_length_mean:.1f} of the latest groups in order of start"
    if summary.get("cut_fraction") is not None:
        lengths += f", {see.cut_fraction:.1%} cut at their limit"
    return [
        ("ESS", f"mean {see.ess_mean:.3f}, min {see.ess_min:.3f}{below}"),
        ("lag", f"mean {see.lag_mean:.2f}, max {see.lag_max:.0f} optimizer steps"),
        ("completion length", lengths),
    ]


def _resources(summary: Mapping[str, Any], see: _Shown) -> list[Row]:
    updates = f"{see.weight_updates:short}"
    if summary.get("update_pause_s_p50") is not None:
        updates += f", pause p50 {see.update_pause_s_p50:pause}, p99 {see.update_pause_s_p99:pause}"
    if summary.get("update_bytes_mean") is not None:
        updates += f", {see.update_bytes_mean:bytes} each"
    if summary.get("update_delta_fraction"):
        updates += f", {see.update_delta_fraction:.0%} as deltas"
    gpus = _memory(summary.get("peak_gpu_memory_bytes", {}))
    return [
        ("weight updates", updates),
        ("busy", f"engine {see.engine_busy_fraction:.0%}, trainer {see.trainer_busy_fraction:.0%}"),
        ("peak memory", _memory(summary["peak_memory_bytes"]) or "-"),
        *([("peak GPU memory", gpus)] if gpus else []),
    ]


def _memory(peaks: Mapping[str, int]) -> str:
    parts = ", ".join(f"{process} {_bytes(size)}" for process, size in peaks.items())
    return f"{_bytes(sum(peaks.values()))} ({parts})" if peaks else ""


def _rollouts(summary: Mapping[str, Any], see: _Shown) -> list[Row]:
    dropped: Mapping[str, int] = summary["rollouts_dropped"]
    reasons = f" ({', '.join(f'{reason} {rollouts}' for reason, rollouts in dropped.items())})" if dropped else ""
    account = (
        f"{see.rollouts_started:d} started = {see.rollouts_trained:d} trained + {sum(dropped.values())} dropped{reasons} "
        f"+ {see.rollouts_queued:d} queued + {see.rollouts_in_progress:d} unfinished"
    )
    rows = [("rollouts", account)]
    if "generated_per_trained" in summary:
        cost = see.generated_per_trained
        shares = "".join(f", {share:.1%} {reason}" for reason, share in summary["dropped_fraction"].items())
        without = f"{see.no_gradient_fraction:.1%} of these without gradient"
        rows.append(
            ("generated", f"{cost.rollouts:.2f} rollouts, {cost.tokens:.2f} tokens per one trained on{shares}; {without}")
        )
    if summary.get("groups_skipped"):
        rows.append(("skipped", f"{see.groups_skipped:d} problems ({see.skipped_fraction:.1%}) by the online filter"))
    if "conservation_error" in summary:
        rows.append(("NOT ACCOUNTED FOR", f"{summary['conservation_error']['missing']} rollouts: see summary.json"))
    return rows
