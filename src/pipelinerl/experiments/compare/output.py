"""Writes the results of a comparison: `compare.json`, PNGs, and the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pipelinerl.experiments.compare.collect import Collected, collect, rounded, series_of
from pipelinerl.experiments.compare.contenders import PIPELINE, Contender
from pipelinerl.experiments.compare.folder import Execution
from pipelinerl.experiments.compare.held_out import read_answers
from pipelinerl.experiments.compare.page import Results, Trials, comparison_page
from pipelinerl.experiments.compare.request import Request, plain
from pipelinerl.experiments.compare.results import row, target_reward
from pipelinerl.report import figures
from pipelinerl.report.figures import DrawnRun
from pipelinerl.report.files import write_file
from pipelinerl.report.run_records import read_run


class PlannedRun(NamedTuple):
    """One run of the comparison (not a trial). `name` is its folder within the comparison's folder."""

    name: str
    contender: Contender
    seed: int


def write_results(
    request: Request, out: Path, trials: Trials, executions: Mapping[PlannedRun, Execution], target: float | None
) -> dict[str, Any]:
    """Read the runs, write all results, and return the contents of `compare.json`.

    `target` None: it is chosen from the runs. Raises RunDirectoryError if a run's records can't be read.
    """
    order = {contender: place for place, contender in enumerate(request.schedules)}
    planned = sorted(executions, key=lambda run: (order[run.contender], run.seed))
    records = {run: read_run(out / run.name) for run in planned}
    answers = {run: read_answers(out / run.name) if request.held_out else None for run in planned}

    def collected(goal: float | None) -> list[Collected]:
        return [
            collect(
                records[run],
                run.contender,
                trials[run.contender.label].used,
                executions[run],
                target=goal,
                answered=answers[run],
            )
            for run in planned
        ]

    found = collected(target)
    if target is None:
        target = target_reward(one.result for one in found)
        found = collected(target)
    runs = [one.result for one in found]
    results = Results(target, [row(runs, one.label) for one in request.schedules], runs, trials)
    images = _images([one.drawn for one in found], target, held_out=request.held_out > 0)
    contents = document(request, results, [one.drawn for one in found])
    for name, png in images.items():
        write_file(out / f"{name}.png", png)
    write_file(out / "report.html", comparison_page(request, results, images).encode())
    write_file(out / "compare.json", in_lines(contents))
    return contents


def document(request: Request, results: Results, drawn: Sequence[DrawnRun]) -> dict[str, Any]:
    """The contents of `compare.json`. The top-level ratios are of the pipeline schedule; None if it was not compared."""
    pipeline = next((row for row in results.rows if row.schedule == PIPELINE), None)
    builtins = msgspec.to_builtins
    contents: dict[str, Any] = {
        "ratio_time_to_reward": builtins(pipeline.ratio_time_to_reward) if pipeline else None,
        "ratio_samples_per_s": builtins(pipeline.ratio_samples_per_s) if pipeline else None,
        "target_reward": results.target,
        "reward": request.reward,
        "schedules": [{**builtins(row), "settings": row.settings._asdict()} for row in results.rows],
        "trials": {
            schedule: [
                {
                    **trial.settings._asdict(),
                    "tokens_per_s": trial.tokens_per_s,
                    "full_length": trial.full,
                    "used": tried.decided_by(trial),
                }
                for trial in tried.trials
            ]
            for schedule, tried in results.trials.items()
        },
        "request": {**plain(request), "schedules": [one.label for one in request.schedules]},
        "runs": [
            {**builtins(run), "settings": run.settings._asdict(), "series": builtins(series_of(one))}
            for run, one in zip(results.runs, drawn, strict=True)
        ],
    }
    return dict(rounded(contents))


def in_lines(contents: Mapping[str, Any]) -> bytes:
    """JSON with one line for each key and list item, which is readable and gives useful diffs."""
    encode = msgspec.json.encode

    def value(item: Any) -> bytes:
        return b"[\n" + b",\n".join(map(encode, item)) + b"\n]" if isinstance(item, list) and item else encode(item)

    return b"{\n" + b",\n".join(encode(key) + b": " + value(item) for key, item in contents.items()) + b"\n}\n"


def _images(drawn: Sequence[DrawnRun], target: float | None, *, held_out: bool) -> dict[str, bytes]:
    found = {
        "held_out": figures.held_out(drawn, target) if held_out else None,
        "learning": figures.learning(drawn, None if held_out else target),
        "on_policyness": figures.on_policyness(drawn),
        "batch_sizes": figures.batch_sizes(drawn),
    }
    return {name: png for name, png in found.items() if png is not None}
