"""`pipelinerl sweep`: the grid of settings, its runs one after another, and the settings by rank.

OUT/02-learning_rate=3e-4/seed-0/     a run directory for each setting and seed
OUT/sweep.json                        the results so far, written after each run
OUT/report.html                       the table and the curves of all runs, written at the end
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import yaml

from pipelinerl.config.load import load_config
from pipelinerl.errors import ConfigError, PipelineRLError, UserError
from pipelinerl.experiments.runs import Execution, Folder, PlannedRun, Setting, planned_runs, train_in_child
from pipelinerl.experiments.statistics import Interval, mean_of_runs
from pipelinerl.launch.checks import check_without_running, try_environment
from pipelinerl.launch.hosts.host import FINISHED
from pipelinerl.report import PageSection, count, number, table, write_json
from pipelinerl.report.series import read_summary

RESULTS_FILE = "sweep.json"
WAITING = "not run yet"
_NAME_LENGTH = 80


class Grid(NamedTuple):
    """`fixed`: the flags with one value. `axes`: the values of the others, by key."""

    fixed: tuple[str, ...]
    axes: Mapping[str, Sequence[str]]
    settings: tuple[Setting, ...]
    seeds: tuple[int, ...]

    @property
    def reward(self) -> str:
        """The kind of reward that ranks the settings."""
        return "held-out" if all(setting.config.evaluation.problems for setting in self.settings) else "training"

    def to_json(self) -> dict[str, object]:
        """What determines the runs."""
        config = self.settings[0].config.model_dump(mode="json")
        return {"config": config, "axes": {key: list(texts) for key, texts in self.axes.items()}, "seeds": self.seeds}


def make_grid(run_file: Path | None, flags: Sequence[str], seeds: int) -> Grid:
    """The grid of `flags`, in which commas separate the values of a key. Raises ConfigError for any wrong value."""
    fixed, axes = split_flags(flags)
    if not axes and seeds == 1:
        raise ConfigError(
            "there is nothing to sweep over: give several values of a key, as in `--trainer.learning_rate 1e-4,3e-4`, or "
            "several seeds, as in `--seeds 3`"
        )
    settings: list[Setting] = []
    for place, chosen in enumerate(itertools.product(*axes.values()), start=1):
        values = dict(zip(axes, chosen, strict=True))
        config = load_config(run_file, [*fixed, *(f"--{key}={text}" for key, text in values.items())])
        texts = ",".join(f"{key.rpartition('.')[2]}={text}" for key, text in values.items())
        name = re.sub(r"[^\w.,=+-]+", "_", texts)[:_NAME_LENGTH]  # the folder is, for example, `02-learning_rate=3e-4`
        label = ", ".join(f"{key} {text}" for key, text in values.items()) or "the settings of the run file"
        config = config.model_copy(update={"run_dir": None})
        setting = Setting(label, f"{place:02d}-{name}".rstrip("-"), config, values)
        if same := next((other for other in settings if other.config == setting.config), None):
            raise ConfigError(f"{same.label} and {setting.label} are the same setting; name it once")
        settings.append(setting)
    first = settings[0].config.seed
    return Grid(tuple(fixed), axes, tuple(settings), tuple(range(first, first + seeds)))


def split_flags(flags: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Divide `--key value`, `--key=value` and `--switch` into flags with one value, and the values of the others by key.

    Raises ConfigError.
    """
    fixed: list[str] = []
    axes: dict[str, list[str]] = {}
    rest = list(flags)
    while rest:
        flag, equals, text = rest.pop(0).partition("=")
        if not equals and rest and not rest[0].startswith("--"):
            text, equals = rest.pop(0), "="
        key, values = flag.removeprefix("--"), split_values(text)
        if key == "run_dir":
            raise ConfigError("--run_dir: every run of a sweep has its own; name the folder of all with --out")
        if key == "seed" and len(values) > 1:
            raise ConfigError("--seed: give the first seed here, and their number as `--seeds K`")
        if len(values) < 2:
            fixed.append(f"{flag}{equals}{text}")
        elif key in axes:
            raise ConfigError(f"{flag}: several values are given twice; give all of them in one flag")
        else:
            axes[key] = values
    return fixed, axes


def split_values(text: str) -> list[str]:
    """The parts between commas, read as YAML: commas in brackets and quotes separate nothing."""
    try:
        node = yaml.compose(f"[{text}]", Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return [text]  # the mistake is named where the value is read
    return [text[part.start_mark.index - 1 : part.end_mark.index - 1] for part in node.value] if node else []


# ---- the results, as in `sweep.json`: settings, the best first


class SweepRunResult(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `status` is "finished", "not run yet", "diverged: WHY" or "failed: WHY". `reward`, of a finished run:
    the held-out reward after training, or the training reward if runs have no evaluation.
    """

    folder: str
    seed: int
    status: str
    reward: float | None


class SettingResult(msgspec.Struct, frozen=True, kw_only=True):
    """One setting over its seeds. `minus_best`: its reward minus the best setting's, paired by seed.

    Without a run that has finished, or if a run diverged or failed, there are no means: failures never improve a result.
    """

    setting: dict[str, str]
    reward: Interval | None
    minus_best: Interval | None = None
    runs: list[SweepRunResult]


class SweepResults(msgspec.Struct, frozen=True, kw_only=True):
    """`sweep.json`. `ranked_by`: "held-out" or "training" reward. The best of `settings` is the first."""

    ranked_by: str
    seeds: list[int]
    settings: list[SettingResult]


def results(grid: Grid, folder: Folder) -> SweepResults:
    """The results so far, of what the runs have left in their directories."""
    found: list[SettingResult] = []
    for setting in grid.settings:
        runs = [_result(PlannedRun(setting, seed), grid, folder) for seed in grid.seeds]
        counted = runs if all(run.status in (FINISHED, WAITING) for run in runs) else []
        reward = mean_of_runs([run.reward for run in counted if run.reward is not None])
        found.append(SettingResult(setting=dict(setting.values), reward=reward, runs=runs))
    found.sort(key=lambda one: -one.reward.mean if one.reward else math.inf)
    best = found[0]
    for place, one in enumerate(found):
        pairs = [(run.reward, top.reward) for run, top in zip(one.runs, best.runs, strict=True)]
        known = [reward - top for reward, top in pairs if reward is not None and top is not None]
        if place and one.reward and best.reward:
            found[place] = msgspec.structs.replace(one, minus_best=mean_of_runs(known))
    return SweepResults(ranked_by=grid.reward, seeds=list(grid.seeds), settings=found)


def _result(run: PlannedRun, grid: Grid, folder: Folder) -> SweepRunResult:
    execution, reward = folder.executions.get(run.name), None
    if execution is not None and execution.finished:
        summary = read_summary(folder.root / run.name) or {}
        reward = summary.get("eval_reward_after" if grid.reward == "held-out" else "reward_last")
    status = execution.status if execution else WAITING
    return SweepRunResult(folder=run.name, seed=run.seed, status=status, reward=reward)


def section(found: SweepResults) -> PageSection:
    """The settings as a table, the best first. A cell of runs says what became of unfinished ones."""
    seeds, keys = len(found.seeds), list(found.settings[0].setting)
    names = [key.rpartition(".")[2] for key in keys]
    names = names if len({*names}) == len(keys) else keys
    rows = []
    for one in found.settings:
        statuses = [run.status.partition(":")[0] for run in one.runs]
        others = [f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses) if status != FINISHED]
        rows.append(
            dict(zip(names, one.setting.values(), strict=True))
            | {
                "runs": "\n".join([str(statuses.count(FINISHED)), *others]),
                f"{found.ranked_by} reward": one.reward.text(".3f") if one.reward else "-",
                "minus the best": one.minus_best.text("+.3f") if one.minus_best else "-",
            }
        )
    title = f"{count(len(found.settings), 'setting')}, {count(seeds, 'seed')} each"
    note = "below: 95% intervals over seeds (Student's t)" if seeds > 1 else "one seed: nothing says how far it varies"
    return table(title, rows, note)


# ---- the runs


def sweep(grid: Grid, out: Path, say: Callable[[str], object]) -> tuple[SweepResults, PipelineRLError | None]:
    """Make the runs of `grid` that `out` lacks. Unfinished runs go on from their checkpoints.

    A run that fails is a result, and the others follow; the next call tries it again, unless it diverged. Also returns the
    error of failed runs. Raises UserError before any run starts if a setting can't be run, RunDirectoryError if `out` has
    another sweep, and RunInterruptedError.
    """
    folder, runs = Folder(out, train_in_child), planned_runs(grid.settings, grid.seeds)
    left = {run.setting.label: run.setting for run in runs if run.name not in folder.executions}
    _check(list(left.values()), out)

    def ended(run: PlannedRun, execution: Execution) -> str:
        write_json(out / RESULTS_FILE, results(grid, folder))
        reward = number(_result(run, grid, folder).reward, ".3f")
        return f", {grid.reward} reward {reward}" if execution.finished else ""

    with folder.claimed(grid.to_json(), "sweep"):
        failure = folder.execute_all(runs, say, ended, resume=True)
    found = results(grid, folder)
    folder.write_page("Sweep", [section(found)], [run for run in runs if folder.executions[run.name].finished])
    return found, failure


def _check(settings: Sequence[Setting], out: Path) -> None:
    """Check what a run checks before its start, and try each environment once. Raises UserError that names the setting."""
    tried: set[str] = set()
    for setting in settings:
        config = setting.config.model_copy(update={"run_dir": str(out)})
        used = repr((config.environment, config.model, config.actor, config.evaluation.problems))
        try:
            check_without_running(config)
            if used not in tried:
                try_environment(config)
        except UserError as error:
            raise type(error)(f"{setting.label}: {error}") from error
        tried.add(used)
