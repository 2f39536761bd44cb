"""The stale-KV study as a table for the terminal."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

from pipelinerl.study.bootstrap import Interval
from pipelinerl.study.figure import shown_lags
from pipelinerl.study.result import PolicyRecord, StartRecord, StudyRecord

_WIDTH = 118


def study_table(study: StudyRecord) -> str:
    """One block of rows for each checkpoint that the study starts from."""
    settings = study.settings
    table = Table(
        title=f"KL(mu || pi) to the on-policy policy, nats per token: g_max = {settings.lag}, L = {settings.max_tokens}",
        title_justify="left",
        border_style="dim",
        caption=f"{settings.level:.0%} intervals over {settings.problems} problems; as lag: the conventional lag that is as "
        "far off-policy",
        caption_justify="left",
    )
    for name in ("weights", "behaviour policy"):
        table.add_column(name, no_wrap=True)
    for name in ("mean lag", "KL, exact", "k1", "k3", "as lag"):
        table.add_column(name, no_wrap=True, justify="right")
    for start in study.starts:
        _add(table, start)
    text = io.StringIO()
    Console(file=text, width=_WIDTH).print(table)
    return text.getvalue()


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
