"""The results of a replay: their record in `replay.json`, and what the command prints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import msgspec

from pipelinerl.experiments.replay.generation import GenerationResult
from pipelinerl.report import count, number
from pipelinerl.report.sections import in_terminal, table

COLUMNS = {"gradient norm": "grad_norm", "ESS": "ess", "clipped": "masked_fraction", "truncated": "truncated_fraction"}
"""Column of the table -> metric of a step. `clipped` includes tokens that the correction masks."""
METRICS = (*COLUMNS.values(), "kl_behaviour_policy", "loss", "learning_rate")
ROWS = 10
NAMED = 3
"""Number of differences, and of rollouts in one, that a message names."""


class StepComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics of the step to `version` in the run and in the replay."""

    version: int
    run: dict[str, float | None]
    replay: dict[str, float | None]


class ReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    """The results, as written to `replay.json`.

    exact          the run was repeated as it was; otherwise `settings` are those that were changed
    compared       numbers of steps, and of published versions whose checksum the run recorded and the replay has, too
    kept           number of checkpoints and copies of weights that have the recorded checksum of their version
    unrecorded     published versions whose checksum the run did not record: it was ending when it published them
    differences    empty if everything was repeated; the first one is the first in the run
    warnings       what is other here than where the run trained
    metrics        counterfactuals: the metrics of every step
    """

    run: str
    exact: bool
    settings: dict[str, Any] = {}
    steps: int
    compared: int = 0
    kept: int = 0
    unrecorded: tuple[int, ...] = ()
    time_s: float = 0.0
    differences: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    metrics: tuple[StepComparison, ...] = ()
    generation: GenerationResult | None = None
    tolerance: float | None = None


def result_text(result: ReplayResult) -> str:
    """Everything but differences."""
    parts = []
    if not result.exact:
        parts.append(_metrics_table(result))
    elif result.steps and not result.differences:
        parts.append(
            f"{count(result.steps, 'step')} of {result.run} repeated in {result.time_s:.0f} s: {result.compared} published "
            f"versions, and {count(result.kept, 'folder')} of kept weights, have the checksums of the run\n"
        )
    if result.unrecorded:
        parts.append(f"not compared, because the run recorded no checksum: {', '.join(map(str, result.unrecorded))}\n")
    if (made := result.generation) is not None and result.tolerance is not None and not result.differences:
        drawn = f"; its random numbers draw {made.drawn} of these tokens again" if made.drawn is not None else ""
        largest = max((gap.difference for gap in made.gaps), default=0.0)
        parts.append(
            f"{count(made.groups, 'group')} repeated with {count(made.completions, 'completion')}, "
            f"{count(made.tokens, 'token')} and {count(made.switches, 'weight update')} within completions: log-probs "
            f"differ by at most {largest:.2g} (tolerance {result.tolerance:g}){drawn}\n"
        )
    return "".join(parts)


def difference_text(result: ReplayResult) -> str:
    """One line that names the first differences."""
    shown = "; ".join(result.differences[:NAMED])
    more = len(result.differences) - NAMED
    return f"{result.run} is not repeated: {shown}{f'; and {more} more' if more > 0 else ''}"


def changed_text(rollouts: Sequence[str], version: int, what: str) -> str:
    """The difference that these rollouts of a step are not what was trained on."""
    names = ", ".join(rollouts[:NAMED]) + (f" and {len(rollouts) - NAMED} more" if len(rollouts) > NAMED else "")
    return f"the batch of step {version} has other {what} than were trained on, in {names}"


def _metrics_table(result: ReplayResult) -> str:
    """Some of the steps, and the means of all."""
    changes = ", ".join(f"{key} {value}" for key, value in result.settings.items()) or "the run's own settings"

    def cells(step: str, some: Sequence[StepComparison]) -> dict[str, str]:
        """The means over some steps."""
        row = {"step": step}
        for column, name in COLUMNS.items():
            known = [
                [value for one in some if (value := getattr(one, side)[name]) is not None] for side in ("run", "replay")
            ]
            row[column] = " → ".join(number(fmean(values) if values else None, ".3g") for values in known)
        return row

    every = max(1, math.ceil(len(result.metrics) / ROWS))
    rows = [cells(str(one.version), [one]) for one in result.metrics[every - 1 :: every]]
    rows.append(cells("mean", result.metrics))
    return in_terminal(table(f"{result.run} with {changes}: run → replay", rows))
