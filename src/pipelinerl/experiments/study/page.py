"""Output of the stale-KV study: the numbers, a page with charts, and the tables of the page in the terminal."""

from __future__ import annotations

import tempfile
from pathlib import Path

from pipelinerl.experiments.statistics import Interval
from pipelinerl.experiments.study.kv_cache import StartRecord, StudyRecord
from pipelinerl.experiments.watch.page import page
from pipelinerl.report import only_shown, write_file, write_json, writing_to
from pipelinerl.report.sections import Chart, PageSection, in_terminal, table

KL = "KL(mu || pi), nats per token"


def study_sections(study: StudyRecord) -> list[PageSection]:
    """A table and two charts for each starting checkpoint, like Figure 7 of the paper. All numbers are in the JSON."""
    settings = study.settings
    lead = (
        f"{KL}, to the on-policy policy: g_max = {settings.lag}, L = {settings.max_tokens}, {settings.problems} problems, "
        f"{settings.attempts} attempts at each. In brackets, and as thin lines: {settings.level:.0%} intervals over "
        "problems. As lag: the conventional lag that is equally off-policy."
    )
    sections = []
    for start in study.starts:
        found = table(f"Weights {start.version} to {start.target}", _rows(start), lead)
        charts = [_along(start), _by_lag(start)]
        sections.append(
            PageSection(title=found.title, texts=found.texts, header=found.header, rows=found.rows, charts=charts)
        )
    return sections


def shown_lags(lag: int) -> list[int]:
    """The lags to show along the sequence: a few, ascending."""
    return sorted({max(1, lag // 8), max(1, lag // 4), max(1, lag // 2), lag})


def _rows(start: StartRecord) -> list[dict[str, str]]:
    most = start.target - start.version
    policies = {
        "mixed, stale KV": (start.stale, start.equivalent_lag_stale),
        "mixed, recomputed KV": (start.recomputed, start.equivalent_lag_recomputed),
        **{f"lag {lag}": (start.lagged[lag], float(lag)) for lag in shown_lags(most)},
    }
    rows = [
        {
            "behaviour policy": name,
            "mean lag": f"{policy.lag_mean:.2f}",
            "KL, exact": _interval(policy.kl),
            "k1": f"{policy.kl_k1.mean:.2e}",
            "k3": f"{policy.kl_k3.mean:.2e}",
            "as lag": "more" if lag is None else f"{lag:.1f}",
        }
        for name, (policy, lag) in policies.items()
    ]
    for other, difference in (("recomputed", start.stale_minus_recomputed), (f"lag {most}", start.stale_minus_oldest)):
        empty = dict.fromkeys(rows[0], "")
        rows.append(empty | {"behaviour policy": f"stale - {other}", "KL, exact": _interval(difference)})
    return rows


def _interval(interval: Interval) -> str:
    return f"{interval.mean:.2e} ({interval.low:.2e} to {interval.high:.2e})"


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
    sections = study_sections(study)
    write_json(numbers, study)
    with only_shown(picture.name):
        write_file(picture, page(f"Stale KV entries: {study.environment}", sections).encode())
    return "".join([*map(in_terminal, sections), f"{numbers}\n{picture}\n"])
