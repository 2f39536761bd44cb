"""The results of a sweep: `sweep.json`, and the table of settings, the best first. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
from rich.text import Text

from pipelinerl.experiments.statistics import mean_interval_of_runs
from pipelinerl.experiments.sweep.grid import Grid, Setting
from pipelinerl.launch.summary import FINISHED
from pipelinerl.report import count, new_table, number, rendered

WAITING = "not run yet"
FAILED = "failed"


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `status` is "finished", "not run yet", "diverged: WHY" or "failed: WHY". Rewards are of finished runs.

    reward            held-out reward after training, or the training reward if runs have no evaluation
    training_reward   mean over the last steps, as `reward_last` of the run's summary
    """

    folder: str
    seed: int
    status: str = WAITING
    reward: float | None = None
    training_reward: float | None = None


class Mean(msgspec.Struct, frozen=True):
    """A mean over seeds, and its 95% interval; None for less than two seeds."""

    mean: float
    low: float | None = None
    high: float | None = None


class SettingResult(msgspec.Struct, frozen=True, kw_only=True):
    """One setting over its seeds. `minus_best`: its reward minus that of the best setting, paired by seed.

    Without a run that has finished, or if a run diverged or failed, there are no means: failures never improve a result.
    """

    setting: dict[str, str]
    reward: Mean | None
    training_reward: Mean | None
    minus_best: Mean | None = None
    runs: list[RunResult]


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """`sweep.json`. `ranked_by`: "held-out" or "training" reward. The best of `settings` is the first."""

    ranked_by: str
    seeds: list[int]
    settings: list[SettingResult]


def results(grid: Grid, runs: Mapping[str, Sequence[RunResult]]) -> Results:
    """The results so far; `runs` are those of each setting, by its folder, in the order of the seeds."""
    found = [_over_seeds(setting, runs[setting.folder]) for setting in grid.settings]
    found.sort(key=lambda one: -one.reward.mean if one.reward else math.inf)
    best = _rewards(found[0].runs) if found[0].reward else {}
    ranked = [found[0], *(msgspec.structs.replace(one, minus_best=_difference(one, best)) for one in found[1:])]
    return Results(ranked_by=grid.reward, seeds=list(grid.seeds), settings=ranked)


def _over_seeds(setting: Setting, runs: Sequence[RunResult]) -> SettingResult:
    whole = all(run.status in (FINISHED, WAITING) for run in runs)
    return SettingResult(
        setting=dict(setting.values),
        reward=_mean([run.reward for run in runs]) if whole else None,
        training_reward=_mean([run.training_reward for run in runs]) if whole else None,
        runs=list(runs),
    )


def _difference(one: SettingResult, best: Mapping[int, float]) -> Mean | None:
    own = _rewards(one.runs) if one.reward else {}
    return _mean([own[seed] - best[seed] for seed in own.keys() & best.keys()])


def _rewards(runs: Sequence[RunResult]) -> dict[int, float]:
    return {run.seed: run.reward for run in runs if run.reward is not None}


def _mean(values: Sequence[float | None]) -> Mean | None:
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return Mean(known[0]) if known else None
    return Mean(*msgspec.structs.astuple(mean_interval_of_runs(known)))


def table(found: Results) -> str:
    """The settings as text, the best first."""
    seeds, keys = len(found.seeds), list(found.settings[0].setting)
    names = [key.rpartition(".")[2] for key in keys]
    caption = "below: 95% intervals over seeds (Student's t)" if seeds > 1 else "one seed: nothing says how far it varies"
    title = f"{count(len(found.settings), 'setting')}, {count(seeds, 'seed')} each"
    shown = new_table(title, *(names if len({*names}) == len(keys) else keys), caption=caption, show_header=True)
    training = found.ranked_by != "training"
    columns = ["runs", f"{found.ranked_by} reward", "minus the best", *(["training reward"] if training else [])]
    for name in columns:
        shown.add_column(name, justify="right")
    for one in found.settings:
        cells = [_cell(one.reward, ".3f"), _cell(one.minus_best, "+.3f"), _cell(one.training_reward, ".3f")]
        shown.add_row(*map(Text, one.setting.values()), _runs_text(one.runs), *cells[: len(columns) - 1])
    return rendered(shown)


def _runs_text(runs: Sequence[RunResult]) -> str:
    """How many runs have finished, and what became of the others."""
    statuses = [run.status.partition(":")[0] for run in runs]
    others = [f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses) if status != FINISHED]
    return "\n".join([str(statuses.count(FINISHED)), *others])


def _cell(one: Mean | None, pattern: str) -> str:
    if one is None:
        return "-"
    brackets = "" if one.low is None else f"\n{number(one.low, pattern)}..{number(one.high, pattern)}"
    return f"{one.mean:{pattern}}{brackets}"
