"""The watch page as one file that loads nothing: `pipelinerl report`, and the reports of experiments."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import math
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.errors import RunDirectoryError
from pipelinerl.experiments.watch.run import WatchedRun
from pipelinerl.report import PageSection, count
from pipelinerl.report.series import labels_of, read_config, read_summary
from pipelinerl.report.terminal import largest_gain, summary_sections


def page(
    title: str,
    sections: Sequence[PageSection] = (),
    runs: Mapping[str, Mapping[str, Any]] | None = None,
    colours: Mapping[str, str] | None = None,
) -> str:
    """The HTML of a page on `runs`: what `shown_run` returns of each, by label. Runs with the same `colours` share one."""
    runs, colours = runs or {}, colours or {}
    groups = list(dict.fromkeys(colours.get(label, label) for label in runs))
    data = {
        "title": title,
        "written": time.strftime("%Y-%m-%d %H:%M"),
        "sections": sections,
        "runs": [{"label": label, "first": True, "colour": groups.index(colours.get(label, label))} for label in runs],
        "news": runs,
    }
    return _in_one_file(msgspec.json.encode(data).decode().replace("<", "\\u003c"))


def shown_run(run_dir: Path) -> dict[str, Any]:
    """What a page shows of a run. Raises ConfigError, and RunDirectoryError for a folder that is not a run or is damaged."""
    config, summary, run = read_config(run_dir), read_summary(run_dir), WatchedRun(run_dir)
    shown, steps = run.everything(), run.steps
    result: list[tuple[str, str]] = [("model", config.model.path)]
    if steps.rows and (training_s := 60 * steps["minutes"][-1]) > 0:
        samples = steps["rollouts"][-1]
        lengths = zip(steps["samples"], steps["completion_length_mean"], strict=True)
        tokens = sum(rollouts * mean for rollouts, mean in lengths if not math.isnan(mean))
        rates = f"{samples / training_s:.1f} samples/s, {tokens / training_s:.0f} tokens/s"
        took = f"{count(steps.rows, 'step')}, {samples:.0f} rollouts in {training_s:.1f} s: {rates}"
        result.append(("training, without start-up", took))
    try:
        result += [row for section in summary_sections(summary) for row in section] if summary is not None else []
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunDirectoryError(f"{run_dir / 'summary.json'} is damaged ({error!r}); delete it") from error
    gain = zip(("before", "after"), largest_gain(run_dir) or (), strict=False)
    return shown | {
        "result": result,
        "gain": [[when, one.prompt, one.completion, f"{one.reward:.4g}"] for when, one in gain],
    }


def report_page(run_dirs: Sequence[Path]) -> str:
    """The HTML of a report on these runs. Raises as `shown_run`, and RunDirectoryError for a run that is named twice."""
    labels = labels_of(run_dirs)
    runs = {label: shown_run(run_dir) for label, run_dir in zip(labels, run_dirs, strict=True)}
    return page(f"pipelinerl: {', '.join(labels)}", runs=runs)


def _in_one_file(data: str) -> str:
    """The page with its styles, scripts and data in it. Its content security policy allows no other script."""
    assets = importlib.resources.files("pipelinerl") / "assets" / "watch"
    html = (assets / "index.html").read_text(encoding="utf-8")
    loaded = r'<(?:link rel="stylesheet" href|script src)="(.*?)".*>\n'
    parts = {name: (assets / name).read_text(encoding="utf-8") for name in re.findall(loaded, html)}
    scripts = [text for name, text in parts.items() if name.endswith(".js")]
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    head = f'<meta http-equiv="content-security-policy" content="{policy}">\n' + "".join(
        f"<style>{text}</style>\n" for name, text in parts.items() if name.endswith(".css")
    )
    body = f'<script type="application/json" id="data">{data}</script>\n' + "".join(
        f"<script>{text}</script>\n" for text in scripts
    )
    return re.sub(loaded, "", html).replace("</head>", f"{head}</head>").replace("</body>", f"{body}</body>")
