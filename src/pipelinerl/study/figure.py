"""The stale-KV study as a picture, like Figure 7 of the paper: KL along the sequence, and KL of conventional lags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from pipelinerl.report.drawing import png_of
from pipelinerl.study.result import PolicyRecord, StartRecord, StudyRecord

_STALE, _RECOMPUTED, _LAGGED = "tab:orange", "tab:blue", "0.45"


def draw_study(study: StudyRecord) -> bytes:
    """A PNG with a row of two plots for each checkpoint that the study starts from."""
    rows = len(study.starts)
    figure = Figure(figsize=(13, 3.6 * rows + 0.6), dpi=110, layout="constrained")
    settings = study.settings
    figure.suptitle(
        f"KL to the on-policy policy, {study.environment}: g_max = {settings.lag}, L = {settings.max_tokens} tokens, "
        f"{settings.problems} problems x {settings.attempts}, {settings.level:.0%} intervals over problems",
        fontsize=11,
    )
    for (by_position, by_lag), start in zip(figure.subplots(rows, 2, squeeze=False), study.starts, strict=True):
        _draw_positions(by_position, start)
        _draw_lags(by_lag, start)
    return png_of(figure)


def shown_lags(lag: int) -> Sequence[int]:
    """The lags that are drawn along the sequence: a few, from the freshest to the oldest."""
    return sorted({max(1, lag // 8), max(1, lag // 4), max(1, lag // 2), lag})


def _draw_positions(axes: Any, start: StartRecord) -> None:
    lags = shown_lags(start.target - start.version)
    for number, lag in enumerate(lags, start=1):
        shade = str(0.9 - 0.7 * number / len(lags))
        _positions(axes, start.lagged[lag], f"lag {lag}", shade, band=False)
    _positions(axes, start.recomputed, "mixed, recomputed KV", _RECOMPUTED)
    _positions(axes, start.stale, "mixed, stale KV", _STALE)
    _axes(axes, f"{_title(start)}: along the sequence", "token position")
    axes.set_yscale("log", nonpositive="mask")
    axes.legend(edgecolor="none", fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))  # lines cross all of the plot


def _positions(axes: Any, policy: PolicyRecord, label: str, color: str, *, band: bool = True) -> None:
    """A step for each stretch of positions; stretches that no completion reached are left out."""
    found = [(record, record.kl) for record in policy.by_position if record.kl is not None]
    if not found:
        return
    edges = [found[0][0].start, *(record.end for record, _ in found)]
    axes.stairs([kl.mean for _, kl in found], edges, baseline=None, label=label, color=color, linewidth=1.6)
    if band:
        axes.stairs(
            [kl.high for _, kl in found], edges, baseline=[kl.low for _, kl in found], fill=True, color=color, alpha=0.2
        )


def _draw_lags(axes: Any, start: StartRecord) -> None:
    lags = [float(policy.lag or 0) for policy in start.lagged]
    means = [policy.kl.mean for policy in start.lagged]
    below = [policy.kl.mean - policy.kl.low for policy in start.lagged]
    above = [policy.kl.high - policy.kl.mean for policy in start.lagged]
    style = {"fmt": "o-", "color": _LAGGED, "markersize": 3, "linewidth": 1.4, "elinewidth": 1, "capsize": 2}
    axes.errorbar(lags, means, yerr=[below, above], label="conventional, lag k", **style)
    for policy, label, color in (
        (start.recomputed, "mixed, recomputed KV", _RECOMPUTED),
        (start.stale, "mixed, stale KV", _STALE),
    ):
        axes.axhline(policy.kl.mean, color=color, linewidth=1.6, label=f"{label} (mean lag {policy.lag_mean:.1f})")
        axes.axhspan(policy.kl.low, policy.kl.high, color=color, alpha=0.15, linewidth=0)
    _axes(axes, f"{_title(start)}: mean over tokens", "lag k of the whole sequence, optimizer steps")
    axes.set_ylim(bottom=0)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    axes.legend(edgecolor="none", framealpha=0.8, fontsize=8)


def _title(start: StartRecord) -> str:
    return f"weights {start.version} to {start.target}"


def _axes(axes: Any, title: str, x_label: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x_label)
    axes.set_ylabel("KL(mu || pi), nats per token")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
