"""Output of the stale-KV study: the numbers, a page with charts, and the tables of the page in the terminal."""

from __future__ import annotations

import tempfile
from pathlib import Path

from msgspec.structs import replace

from pipelinerl.experiments.statistics import Interval
from pipelinerl.experiments.study.kv_cache import RECOMPUTED, STALE, StartRecord, StudyRecord
from pipelinerl.experiments.watch.page import page
from pipelinerl.report import Chart, PageSection, in_terminal, only_shown, table, write_file, write_json, writing_to

KL = "KL(mu || pi), nats per token"


def make_folder(out: Path) -> None:
    """Create `out` if needed and check that it is writable, before the study runs. Raises RunDirectoryError."""
    with writing_to(out):
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()


def write_study(study: StudyRecord, out: Path) -> str:
    """Write `kv-cache.json` and `kv-cache.html` into the folder `out`, and return what the command prints.

    Raises RunDirectoryError.
    """
    numbers, picture = out / "kv-cache.json", out / "kv-cache.html"
    sections = [_section(study, start) for start in study.starts]
    write_json(numbers, study)
    with only_shown(picture.name):
        write_file(picture, page(f"Stale KV entries: {study.environment}", sections).encode())
    return "".join([*map(in_terminal, sections), f"{numbers}\n{picture}\n"])


def _section(study: StudyRecord, start: StartRecord) -> PageSection:
    """A table and two charts, like Figure 7 of the paper. All numbers are in the JSON."""
    lead = (
        f"{KL}, to the on-policy policy: g_max = {study.lag}, L = {study.max_tokens}, {study.problems} problems, "
        f"{study.attempts} attempts at each. In brackets, and as thin lines: {study.level:.0%} intervals over "
        "problems. As lag: the conventional lag that is equally off-policy."
    )
    shown = [STALE, RECOMPUTED, *(f"lag {max(1, study.lag // part)}" for part in (8, 4, 2, 1))]
    policies = {name: start.policies[name] for name in shown}  # a lag that is there twice counts once
    rows = [
        {
            "behaviour policy": name,
            "mean lag": f"{policy.lag_mean:.2f}",
            "KL, exact": _interval(policy.kl),
            "k1": f"{policy.kl_k1.mean:.2e}",
            "k3": f"{policy.kl_k3.mean:.2e}",
            "as lag": "more" if policy.equivalent_lag is None else f"{policy.equivalent_lag:.1f}",
        }
        for name, policy in policies.items()
    ]
    for name, difference in start.differences.items():
        rows.append(dict.fromkeys(rows[0], "") | {"behaviour policy": name, "KL, exact": _interval(difference)})
    along = Chart(
        title=f"{KL}: along the sequence",
        x_label="token position",
        x=study.edges[:-1],
        lines={name: [kl.mean for kl in policy.by_position] for name, policy in policies.items()},
        log=True,
    )
    lagged = [start.policies[f"lag {behind}"].kl for behind in range(study.lag + 1)]
    curves = {"conventional, lag k": lagged}
    for name in (STALE, RECOMPUTED):
        curves[f"{name} (mean lag {policies[name].lag_mean:.1f})"] = [policies[name].kl] * len(lagged)
    by_lag = Chart(
        title=f"{KL}: mean over tokens",
        x_label="lag k of the whole sequence, optimizer steps",
        x=list(range(len(lagged))),
        lines={name: [kl.mean for kl in curve] for name, curve in curves.items()},
        intervals=[[[kl.low for kl in curve], [kl.high for kl in curve]] for curve in curves.values()],
    )
    return replace(table(f"Weights {start.version} to {start.target}", rows, lead), charts=[along, by_lag])


def _interval(interval: Interval) -> str:
    return f"{interval.mean:.2e} ({interval.low:.2e} to {interval.high:.2e})"
