"""Output of the stale-KV study: plots like Figure 7 of the paper, files, and a terminal table."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from pipelinerl.experiments.statistics import Interval
from pipelinerl.experiments.study.kv_cache import PolicyRecord, StartRecord, StudyRecord
from pipelinerl.files import write_atomically
from pipelinerl.report import new_table, only_shown, rendered, writing_to
from pipelinerl.report.curves import finish_axes, new_figure, png_of

KL = "KL(mu || pi), nats per token"
_STALE, _RECOMPUTED, _LAGGED = "tab:orange", "tab:blue", "0.45"


def draw_study(study: StudyRecord) -> bytes:
    """A PNG with a row for each starting checkpoint: KL along the sequence, and KL by conventional lag."""
    rows = len(study.starts)
    figure = new_figure(13, 3.6 * rows + 0.6)
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
    """The lags to draw along the sequence: a few, ascending."""
    return sorted({max(1, lag // 8), max(1, lag // 4), max(1, lag // 2), lag})


def _draw_positions(axes: Any, start: StartRecord) -> None:
    lags = shown_lags(start.target - start.version)
    for number, lag in enumerate(lags, start=1):
        shade = str(0.9 - 0.7 * number / len(lags))
        _positions(axes, start.lagged[lag], f"lag {lag}", shade, band=False)
    _positions(axes, start.recomputed, "mixed, recomputed KV", _RECOMPUTED)
    _positions(axes, start.stale, "mixed, stale KV", _STALE)
    finish_axes(axes, f"{_title(start)}: along the sequence", "token position", KL)
    axes.set_xlim(left=0)
    axes.set_yscale("log", nonpositive="mask")
    # Beside the plot, because the lines cross all of it.
    axes.legend(edgecolor="none", fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _positions(axes: Any, policy: PolicyRecord, label: str, color: str, *, band: bool = True) -> None:
    """One step per interval of positions; intervals that no completion reached are omitted."""
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
    intervals = [policy.kl for policy in start.lagged]
    means = [kl.mean for kl in intervals]
    errors = [[kl.mean - kl.low for kl in intervals], [kl.high - kl.mean for kl in intervals]]
    style = {"fmt": "o-", "color": _LAGGED, "markersize": 3, "linewidth": 1.4, "elinewidth": 1, "capsize": 2}
    axes.errorbar(lags, means, yerr=errors, label="conventional, lag k", **style)
    for policy, label, color in (
        (start.recomputed, "mixed, recomputed KV", _RECOMPUTED),
        (start.stale, "mixed, stale KV", _STALE),
    ):
        axes.axhline(policy.kl.mean, color=color, linewidth=1.6, label=f"{label} (mean lag {policy.lag_mean:.1f})")
        axes.axhspan(policy.kl.low, policy.kl.high, color=color, alpha=0.15, linewidth=0)
    finish_axes(axes, f"{_title(start)}: mean over tokens", "lag k of the whole sequence, optimizer steps", KL)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))


def _title(start: StartRecord) -> str:
    return f"weights {start.version} to {start.target}"


# ---- output files


def write_study(study: StudyRecord, out: Path) -> tuple[Path, Path]:
    """Write `kv-cache.json` and `kv-cache.png` into the folder `out`; returns their paths. Raises RunDirectoryError."""
    numbers, picture = out / "kv-cache.json", out / "kv-cache.png"
    with writing_to(out):
        write_atomically(numbers, msgspec.json.encode(study) + b"\n")
    with only_shown(picture.name):
        write_atomically(picture, draw_study(study))
    return numbers, picture


def make_folder(out: Path) -> None:
    """Create `out` if needed and check that it is writable, before the study runs. Raises RunDirectoryError."""
    with writing_to(out):
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


# ---- terminal table

_WIDTH = 118


def study_table(study: StudyRecord) -> str:
    """One block of rows per starting checkpoint."""
    settings = study.settings
    table = new_table(
        f"KL(mu || pi) to the on-policy policy, nats per token: g_max = {settings.lag}, L = {settings.max_tokens}",
        caption=f"{settings.level:.0%} intervals over {settings.problems} problems; as lag: the conventional lag that is "
        "equally off-policy",
        show_header=True,
    )
    for name in ("weights", "behaviour policy"):
        table.add_column(name, no_wrap=True)
    for name in ("mean lag", "KL, exact", "k1", "k3", "as lag"):
        table.add_column(name, no_wrap=True, justify="right")
    for start in study.starts:
        _add(table, start)
    return rendered(table, width=_WIDTH)


def _add(table: Table, start: StartRecord) -> None:
    most = start.target - start.version
    rows = [
        ("mixed, stale KV", start.stale, _lag(start.equivalent_lag_stale)),
        ("mixed, recomputed KV", start.recomputed, _lag(start.equivalent_lag_recomputed)),
        *((f"lag {lag}", start.lagged[lag], "") for lag in shown_lags(most)),
    ]
    for number, (name, policy, as_lag) in enumerate(rows):
        weights = f"{start.version} to {start.target}" if number == 0 else ""
        table.add_row(weights, name, *_numbers(policy), as_lag)
    table.add_row("", "stale - recomputed", "", _interval(start.stale_minus_recomputed))
    table.add_row("", f"stale - lag {most}", "", _interval(start.stale_minus_oldest), end_section=True)


def _numbers(policy: PolicyRecord) -> tuple[str, str, str, str]:
    return f"{policy.lag_mean:.2f}", _interval(policy.kl), f"{policy.kl_k1.mean:.2e}", f"{policy.kl_k3.mean:.2e}"


def _interval(interval: Interval) -> str:
    return f"{interval.mean:.2e} ({interval.low:.2e} to {interval.high:.2e})"


def _lag(lag: float | None) -> str:
    return "more" if lag is None else f"{lag:.1f}"
