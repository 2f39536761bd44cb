"""The end of a session: draws the curves, and prints the table and one sample answer before and after training."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from pipelinerl.actor.evaluation import EvaluatedProblem
from pipelinerl.files import read_json_lines
from pipelinerl.launch.run_directory import RunDirectory
from pipelinerl.report.figures import draw_curves
from pipelinerl.report.run_report import Attempt, final_table, sample_before_after


def draw(run: RunDirectory) -> None:
    """Draw `curves.png`. Raises RunDirectoryError if the records are damaged."""
    draw_curves(run.root, run.curves)


def show_result(run: RunDirectory, summary: dict[str, Any], stream: TextIO) -> None:
    """Print the table, the sample if there were evaluations, and the paths of the results."""
    console = Console(file=stream)
    console.print(final_table(summary))
    before, after = (_evaluated(run.evaluation(when)) for when in ("before", "after"))
    sample = largest_gain(before, after)
    if sample is not None:
        first, last = sample
        attempts = (Attempt(first.completion, first.reward), Attempt(last.completion, last.reward))
        console.print(sample_before_after(first.prompt or last.prompt, *attempts))
    shown = [path for path in (run.curves, run.summary, run.metrics, run.rollouts, run.checkpoints) if path.exists()]
    for path in shown:
        console.print(f"  {path.relative_to(run.root)}", style="dim", highlight=False)
    console.print(f"in {run.root}", style="dim", highlight=False, soft_wrap=True)


def largest_gain(
    before: dict[str, EvaluatedProblem], after: dict[str, EvaluatedProblem]
) -> tuple[EvaluatedProblem, EvaluatedProblem] | None:
    """The problem whose reward rose most, of those answered both times; among equals, the one of median length after."""
    both = [(before[key], after[key]) for key in before.keys() & after.keys()]
    if not both:
        return None
    most = max(last.reward - first.reward for first, last in both)
    best = sorted(
        (pair for pair in both if pair[1].reward - pair[0].reward == most),
        key=lambda pair: (pair[1].length, pair[1].problem_id),
    )
    return best[len(best) // 2]


def _evaluated(path: Path) -> dict[str, EvaluatedProblem]:
    if not path.is_file():
        return {}
    return {problem.problem_id: problem for problem in read_json_lines(path, EvaluatedProblem)}
