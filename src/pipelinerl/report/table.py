"""The terminal output at the end of a run: the final table, and one sample before and after training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pipelinerl.report.series import REWARD
from pipelinerl.status.screen import duration, pause, short

Row = tuple[str, str]
_STYLES = {"held-out reward": "bold", "NOT ACCOUNTED FOR": "bold red", "NOTHING LEARNED": "bold red"}


class Attempt(NamedTuple):
    """One completion of a held-out problem, and its reward."""

    completion: str
    reward: float


def summary_sections(summary: Mapping[str, Any]) -> tuple[list[Row], ...]:
    """The contents of `summary.json` as rows of text, by section. A missing number is shown as `-`."""
    return _learning(summary), _throughput(summary), _on_policyness(summary), _resources(summary), _rollouts(summary)


def final_table(summary: Mapping[str, Any]) -> Table:
    """The contents of `summary.json` as a table for the terminal."""
    title = f"{summary['environment']}, {summary['schedule']}, seed {summary['seed']}: {summary['status']}"
    table = Table(title=Text(title, "bold"), show_header=False, title_justify="left", border_style="dim")
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for rows in summary_sections(summary):
        for number, (name, value) in enumerate(rows, start=1):
            style = _STYLES.get(name, "")
            table.add_row(Text(name, style), Text(value, style), end_section=number == len(rows))
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


def _learning(summary: Mapping[str, Any]) -> list[Row]:
    nothing = summary.get("nothing_learned")
    return [
        *([("NOTHING LEARNED", nothing)] if nothing else []),
        ("held-out reward", f"{_evaluated(summary, 'before')} -> {_evaluated(summary, 'after')}"),
        *_environments(summary),
        *_online(summary),
        ("held-out length", f"{_lengths(summary['eval_before_lengths'])} -> {_lengths(summary['eval_after_lengths'])}"),
        ("training reward", f"{_number(summary['reward_first'])} -> {_number(summary['reward_last'])}"),
    ]


def _throughput(summary: Mapping[str, Any]) -> list[Row]:
    steps = f"{summary['optimizer_steps']} optimizer steps, {summary['samples_trained']} rollouts"
    generated, trained = _short(summary["tokens_generated"]), _short(summary["tokens_trained"])
    return [
        ("trained", f"{steps} in {duration(summary['wall_s'])}"),
        (
            "throughput",
            f"{_short(summary['samples_per_s'])} samples/s, {_short(summary['tokens_per_s'])} tokens/s generated",
        ),
        ("tokens", f"{generated} generated, {trained} trained on"),
    ]


def _on_policyness(summary: Mapping[str, Any]) -> list[Row]:
    trained, sampled = _number(summary["trained_length_mean"], ".1f"), _number(summary["sampled_length_mean"], ".1f")
    cut = summary.get("cut_fraction")  # summaries of older versions have none
    share = "" if cut is None else f", {cut:.1%} cut at their limit"
    return [
        ("ESS", f"mean {_number(summary['ess_mean'])}, min {_number(summary['ess_min'])}"),
        ("lag", f"mean {_number(summary['lag_mean'], '.2f')}, max {_number(summary['lag_max'], '.0f')} optimizer steps"),
        ("completion length", f"{trained} tokens trained on, {sampled} sampled{_by_start(summary)}{share}"),
        *_longest(summary),
    ]


def _by_start(summary: Mapping[str, Any]) -> str:
    """Empty for summaries of older versions, which lack this number and those that `_longest` shows."""
    mean = summary.get("started_length_mean")
    return "" if mean is None else f"; {mean:.1f} of the latest groups in order of start"


def _longest(summary: Mapping[str, Any]) -> list[Row]:
    lag, limited = summary.get("longest_lag_mean"), summary.get("longest_limited_fraction")
    if lag is None or limited is None:
        return []
    together = _number(summary["length_lag_correlation"], ".2f")
    return [
        (
            "longest quarter",
            f"lag mean {lag:.2f}, {limited:.2%} of weights limited; correlation of length and lag {together}",
        )
    ]


def _resources(summary: Mapping[str, Any]) -> list[Row]:
    p50_s, p99_s = summary["update_pause_s_p50"], summary["update_pause_s_p99"]
    pauses = f", pause p50 {pause(p50_s)}, p99 {pause(p99_s)}" if p50_s is not None and p99_s is not None else ""
    memory: Mapping[str, int] = summary["peak_memory_bytes"]
    parts = ", ".join(f"{process} {_bytes(size)}" for process, size in memory.items())
    return [
        ("weight updates", f"{_short(summary['weight_updates'])}{pauses}"),
        (
            "busy",
            f"engine {_percent(summary['engine_busy_fraction'])}, trainer {_percent(summary['trainer_busy_fraction'])}",
        ),
        ("peak memory", f"{_bytes(sum(memory.values()))} ({parts})" if memory else "-"),
    ]


def _rollouts(summary: Mapping[str, Any]) -> list[Row]:
    dropped: Mapping[str, int] = summary["rollouts_dropped"]
    reasons = f" ({', '.join(f'{reason} {count}' for reason, count in dropped.items())})" if dropped else ""
    account = (
        f"{_number(summary['rollouts_started'], 'd')} started = {summary['rollouts_trained']} trained "
        f"+ {sum(dropped.values())} dropped{reasons} + {summary['rollouts_queued']} queued "
        f"+ {_number(summary['rollouts_in_progress'], 'd')} in progress"
    )
    rows = [("rollouts", account)]
    if lengths := summary.get("actor_dropped_length_mean"):
        rows.append(("dropped by actor", ", ".join(f"{why}: {mean:.1f} tokens each" for why, mean in lengths.items())))
    if "conservation_error" in summary:
        rows.append(("NOT ACCOUNTED FOR", f"{summary['conservation_error']['missing']} rollouts: see summary.json"))
    return rows


def _environments(summary: Mapping[str, Any]) -> list[Row]:
    """Held-out reward of each environment of a mixture; empty for summaries of older versions."""
    before, after = (summary.get(f"eval_{when}_metrics", {}) for when in ("before", "after"))
    names = sorted(name for name in {*before, *after} if name.endswith(REWARD))
    rows = [
        (f"  {name.removesuffix(REWARD)}", f"{_number(before.get(name))} -> {_number(after.get(name))}") for name in names
    ]
    return rows if len(rows) > 1 else []


def _online(summary: Mapping[str, Any]) -> list[Row]:
    evaluations, skipped = summary.get("eval_online", []), summary.get("eval_skipped", 0)
    if not evaluations and not skipped:
        return []
    last = f", the last {_number(evaluations[-1]['reward'])} (version {evaluations[-1]['version']})" if evaluations else ""
    return [("  during training", f"evaluations: {len(evaluations)}{last}" + (f"; {skipped} skipped" if skipped else ""))]


def _evaluated(summary: Mapping[str, Any], when: str) -> str:
    error = summary[f"eval_reward_{when}_standard_error"]
    return _number(summary[f"eval_reward_{when}"]) + (f" ± {error:.3f}" if error is not None else "")


def _lengths(lengths: Mapping[str, float | None] | None) -> str:
    if lengths is None:
        return "-"
    return (
        f"mean {_number(lengths['mean'], '.1f')}, p50 {_number(lengths['p50'], '.0f')}, p99 {_number(lengths['p99'], '.0f')}"
    )


def _number(value: float | None, pattern: str = ".3f") -> str:
    return "-" if value is None else format(value, pattern)


def _short(value: float | None) -> str:
    return "-" if value is None else short(value)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _bytes(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
