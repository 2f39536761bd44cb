"""Output of the stale-KV study: a page with charts, the numbers, and a terminal table."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.table import Table

from pipelinerl.experiments.statistics import Interval
from pipelinerl.experiments.study.kv_cache import PolicyRecord, StartRecord, StudyRecord
from pipelinerl.experiments.watch.page import page
from pipelinerl.files import write_atomically
from pipelinerl.report import new_table, only_shown, rendered, writing_to
from pipelinerl.report.sections import Chart, PageSection

KL = "KL(mu || pi), nats per token"


def shown_lags(lag: int) -> Sequence[int]:
    """The lags to show along the sequence: a few, ascending."""
    return sorted({max(1, lag // 8), max(1, lag // 4), max(1, lag // 2), lag})


def study_page(study: StudyRecord) -> str:
    """A page with two charts for each starting checkpoint, like Figure 7 of the paper. All numbers are in the JSON."""
    settings = study.settings
    lead = (
        f"KL to the on-policy policy: g_max = {settings.lag}, L = {settings.max_tokens}, {settings.problems} problems, "
        f"{settings.attempts} attempts at each. Thin lines are {settings.level:.0%} intervals over problems."
    )
    sections = [
        PageSection(title=f"Weights {one.version} to {one.target}", texts=[lead], charts=[_along(one), _by_lag(one)])
        for one in study.starts
    ]
    return page(f"Stale KV entries: {study.environment}", sections)


def _along(start: StartRecord) -> Chart:
    """KL by position; no value where no completion came that far."""
    lags = shown_lags(start.target - start.version)
    policies = {"mixed, stale KV": start.stale, "mixed, recomputed KV": start.recomputed}
    policies |= {f"lag {lag}": start.lagged[lag] for lag in lags}
    return Chart(
        title=f"{KL}: along the sequence",
        x_label="token position",
        x=[record.start for record in start.stale.by_position],
        lines={
            name: [None if record.kl is None else record.kl.mean for record in policy.by_position]
            for name, policy in policies.items()
        },
        log=True,
    )


def _by_lag(start: StartRecord) -> Chart:
    lagged, flat = [policy.kl for policy in start.lagged], [start.stale, start.recomputed]
    lines = {"conventional, lag k": [kl.mean for kl in lagged]}
    for policy, name in zip(flat, ("mixed, stale KV", "mixed, recomputed KV"), strict=True):
        lines[f"{name} (mean lag {policy.lag_mean:.1f})"] = [policy.kl.mean] * len(lagged)
    edges = [lagged, *([policy.kl] * len(lagged) for policy in flat)]
    return Chart(
        title=f"{KL}: mean over tokens",
        x_label="lag k of the whole sequence, optimizer steps",
        x=list(range(len(lagged))),
        lines=lines,
        intervals=[[[kl.low for kl in kls], [kl.high for kl in kls]] for kls in edges],
    )


# ---- output files


def write_study(study: StudyRecord, out: Path) -> tuple[Path, Path]:
    """Write `kv-cache.json` and `kv-cache.html` into the folder `out`; returns their paths. Raises RunDirectoryError."""
    numbers, picture = out / "kv-cache.json", out / "kv-cache.html"
    with writing_to(out):
        write_atomically(numbers, msgspec.json.encode(study) + b"\n")
    with only_shown(picture.name):
        write_atomically(picture, study_page(study).encode())
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
