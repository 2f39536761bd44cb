"""`pipelinerl sweep`: the grid of settings, its runs one after another, and the results.

OUT/02-learning_rate=3e-4/seed-0/     a run directory for each setting and seed
OUT/sweep.json                        the results so far, written after each run
OUT/report.html                       the table and the curves of all runs, written at the end
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from pipelinerl.config.load import load_config
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import ConfigError, PipelineRLError, RunInterruptedError, UserError
from pipelinerl.experiments.runs import Folder, claimed, train_in_child
from pipelinerl.experiments.statistics import mean_interval_of_runs
from pipelinerl.experiments.watch.page import page, shown_run
from pipelinerl.launch.checks import check_without_running
from pipelinerl.launch.summary import FINISHED, finished_summary
from pipelinerl.launch.trial import try_environment
from pipelinerl.report import count, number, only_shown, write_file, write_json
from pipelinerl.report.sections import PageSection, table
from pipelinerl.run_directory import RunDirectory

_NAME_LENGTH = 80


class Setting(NamedTuple):
    """One combination of values. `values` are as they were typed, by key; `config` has the first seed."""

    number: int
    values: Mapping[str, str]
    config: RunConfig

    @property
    def label(self) -> str:
        return ", ".join(f"{key} {text}" for key, text in self.values.items()) or "the settings of the run file"

    @property
    def folder(self) -> str:
        """For example `02-learning_rate=3e-4`."""
        texts = ",".join(f"{key.rpartition('.')[2]}={text}" for key, text in self.values.items())
        name = re.sub(r"[^\w.,=+-]+", "_", texts)[:_NAME_LENGTH]
        return f"{self.number:02d}-{name}".rstrip("-")


class SweepRun(NamedTuple):
    """One run of the sweep. `name` is its folder within the sweep's folder."""

    setting: Setting
    seed: int

    @property
    def name(self) -> str:
        return f"{self.setting.folder}/seed-{self.seed}"

    def config(self, out: Path) -> RunConfig:
        return self.setting.config.model_copy(update={"seed": self.seed, "run_dir": str((out / self.name).absolute())})


class Grid(NamedTuple):
    """`fixed`: the flags with one value. `axes`: the values of the others, by key."""

    fixed: tuple[str, ...]
    axes: Mapping[str, Sequence[str]]
    settings: tuple[Setting, ...]
    seeds: tuple[int, ...]

    @property
    def runs(self) -> list[SweepRun]:
        """In order: every setting with the first seed, then with the next one."""
        return [SweepRun(setting, seed) for seed in self.seeds for setting in self.settings]

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
    if seeds < 1:
        raise ConfigError(f"--seeds: {seeds} is too few; give 1 or more")
    if not axes and seeds == 1:
        raise ConfigError(
            "there is nothing to sweep over: give several values of a key, as in `--trainer.learning_rate 1e-4,3e-4`, or "
            "several seeds, as in `--seeds 3`"
        )
    settings: list[Setting] = []
    for place, texts in enumerate(itertools.product(*axes.values()), start=1):
        values = dict(zip(axes, texts, strict=True))
        config = load_config(run_file, [*fixed, *(f"--{key}={text}" for key, text in values.items())])
        setting = Setting(place, values, config.model_copy(update={"run_dir": None}))
        if same := next((other for other in settings if other.config == setting.config), None):
            raise ConfigError(f"{same.label} and {setting.label} are the same setting; name it once")
        settings.append(setting)
    first = settings[0].config.seed
    return Grid(tuple(fixed), axes, tuple(settings), tuple(range(first, first + seeds)))


def split_flags(flags: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The flags with one value, and the values of the others by key. Raises ConfigError."""
    fixed: list[str] = []
    axes: dict[str, list[str]] = {}
    for flag, text in _pairs(flags):
        key, values = flag.removeprefix("--"), [] if text is None else split_values(text)
        if key == "run_dir":
            raise ConfigError("--run_dir: every run of a sweep has its own; name the folder of all with --out")
        if key == "seed" and len(values) > 1:
            raise ConfigError("--seed: give the first seed here, and their number as `--seeds K`")
        if len(values) < 2:
            fixed.append(flag if text is None else f"{flag}={text}")
        elif not all(values):
            raise ConfigError(f"{flag}: a value is missing in {text!r}; give them as in `{flag} A,B`")
        elif key in axes:
            raise ConfigError(f"{flag}: several values are given twice; give all of them in one flag")
        else:
            axes[key] = values
    return fixed, axes


def split_values(text: str) -> list[str]:
    """The parts between commas, except commas in brackets and in parts that begin with a quote."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'" and not parts[-1].strip():
            quote = letter
        elif letter in "[{":
            depth += 1
        elif letter in "]}":
            depth -= 1
        elif letter == "," and depth == 0:
            parts.append("")
            continue
        parts[-1] += letter
    return [part.strip() for part in parts]


def _pairs(flags: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """`--key value`, `--key=value` and `--switch` as flags and their values."""
    rest = list(flags)
    while rest:
        flag, equals, text = rest.pop(0).partition("=")
        if not equals and rest and not rest[0].startswith("--"):
            text, equals = rest.pop(0), "="
        yield flag, text if equals else None


# ---- the results, as in `sweep.json`: settings, the best first

WAITING = "not run yet"
FAILED = "failed"


class SweepRunResult(msgspec.Struct, frozen=True, kw_only=True):
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
    runs: list[SweepRunResult]


class SweepResults(msgspec.Struct, frozen=True, kw_only=True):
    """`sweep.json`. `ranked_by`: "held-out" or "training" reward. The best of `settings` is the first."""

    ranked_by: str
    seeds: list[int]
    settings: list[SettingResult]


def results(grid: Grid, runs: Mapping[str, Sequence[SweepRunResult]]) -> SweepResults:
    """The results so far; `runs` are those of each setting, by its folder, in the order of the seeds."""
    found = [_over_seeds(setting, runs[setting.folder]) for setting in grid.settings]
    found.sort(key=lambda one: -one.reward.mean if one.reward else math.inf)
    best = _rewards(found[0].runs) if found[0].reward else {}
    ranked = [found[0], *(msgspec.structs.replace(one, minus_best=_difference(one, best)) for one in found[1:])]
    return SweepResults(ranked_by=grid.reward, seeds=list(grid.seeds), settings=ranked)


def _over_seeds(setting: Setting, runs: Sequence[SweepRunResult]) -> SettingResult:
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


def _rewards(runs: Sequence[SweepRunResult]) -> dict[int, float]:
    return {run.seed: run.reward for run in runs if run.reward is not None}


def _mean(values: Sequence[float | None]) -> Mean | None:
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return Mean(known[0]) if known else None
    return Mean(*msgspec.structs.astuple(mean_interval_of_runs(known)))


def section(found: SweepResults) -> PageSection:
    """The settings as a table, the best first."""
    seeds, keys = len(found.seeds), list(found.settings[0].setting)
    names = [key.rpartition(".")[2] for key in keys]
    names = names if len({*names}) == len(keys) else keys
    rows = []
    for one in found.settings:
        row = dict(zip(names, one.setting.values(), strict=True)) | {
            "runs": _runs_text(one.runs),
            f"{found.ranked_by} reward": _cell(one.reward, ".3f"),
            "minus the best": _cell(one.minus_best, "+.3f"),
        }
        rows.append(row | ({} if found.ranked_by == "training" else {"training reward": _cell(one.training_reward, ".3f")}))
    title = f"{count(len(found.settings), 'setting')}, {count(seeds, 'seed')} each"
    note = "below: 95% intervals over seeds (Student's t)" if seeds > 1 else "one seed: nothing says how far it varies"
    return table(title, rows, note)


def _runs_text(runs: Sequence[SweepRunResult]) -> str:
    """How many runs have finished, and what became of the others."""
    statuses = [run.status.partition(":")[0] for run in runs]
    others = [f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses) if status != FINISHED]
    return "\n".join([str(statuses.count(FINISHED)), *others])


def _cell(one: Mean | None, pattern: str) -> str:
    if one is None:
        return "-"
    brackets = "" if one.low is None else f"\n{number(one.low, pattern)}..{number(one.high, pattern)}"
    return f"{one.mean:{pattern}}{brackets}"


# ---- the runs

RESULTS_FILE = "sweep.json"


def sweep(grid: Grid, out: Path, say: Callable[[str], object]) -> SweepResults:
    """Make the runs of `grid` that `out` lacks. Unfinished runs go on from their checkpoints.

    A run that fails is a result, and the others follow; the next call tries it again, unless it diverged. Raises UserError
    before any run starts if a setting can't be run, RunDirectoryError if `out` has another sweep, and RunInterruptedError.
    """
    folder = Folder(out, train_in_child)
    done = {run.name: _result(run, grid, folder) for run in grid.runs}
    left = [run for run in grid.runs if done[run.name].status == WAITING]
    _check(left, out)

    def write() -> SweepResults:
        by_setting = {one.folder: [done[SweepRun(one, seed).name] for seed in grid.seeds] for one in grid.settings}
        found = results(grid, by_setting)
        write_json(out / RESULTS_FILE, found)
        return found

    with claimed(out, grid.to_json(), "sweep"):
        begun_s = time.monotonic()
        for place, run in enumerate(left, start=1):
            number_of_all = len(grid.runs) - len(left) + place
            say(f"[{number_of_all}/{len(grid.runs)}] {run.setting.label}, seed {run.seed}: {out / run.name}")
            try:
                folder.execute(run.name, run.config(out), resume=True)
                ended = done[run.name] = _result(run, grid, folder)
            except RunInterruptedError:
                raise
            except PipelineRLError as error:
                ended = done[run.name] = msgspec.structs.replace(done[run.name], status=f"{FAILED}: {error}")
            write()
            more, each_s = len(left) - place, (time.monotonic() - begun_s) / place
            rest = f"; about {each_s * more / 60:.0f} min for the other {more}" if more else ""
            reward = f", {grid.reward} reward {number(ended.reward, '.3f')}" if ended.status == FINISHED else ""
            say(f"  {ended.status}{reward}{rest}")
        with only_shown("report.html"):
            made = {run.name: out / run.name for run in grid.runs if done[run.name].status == FINISHED}
            shown = {name: shown_run(path) for name, path in made.items()}
            colours = {run.name: run.setting.folder for run in grid.runs}
            write_file(out / "report.html", page("Sweep", [section(write())], shown, colours).encode())
        return write()


def _result(run: SweepRun, grid: Grid, folder: Folder) -> SweepRunResult:
    """What a run has left in its directory."""
    summary, done = finished_summary(RunDirectory(folder.root / run.name)), folder.done(run.name)
    if summary is None:  # one that diverged would again
        return SweepRunResult(folder=run.name, seed=run.seed, status=done.status if done else WAITING)
    reward = summary["eval_reward_after" if grid.reward == "held-out" else "reward_last"]
    training = summary["reward_last"]
    return SweepRunResult(folder=run.name, seed=run.seed, status=FINISHED, reward=reward, training_reward=training)


def _check(runs: Iterable[SweepRun], out: Path) -> None:
    """Check what a run checks before its start, and try each environment once. Raises UserError that names the setting."""
    tried: set[str] = set()
    for setting in {run.setting.number: run.setting for run in runs}.values():
        config = setting.config.model_copy(update={"run_dir": str(out)})
        used = repr((config.environment, config.model, config.actor, config.evaluation.problems))
        try:
            check_without_running(config)
            if used not in tried:
                try_environment(config)
        except UserError as error:
            raise type(error)(f"{setting.label}: {error}") from error
        tried.add(used)
