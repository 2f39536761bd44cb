"""The grid of a sweep: flags with several values, and the run of every setting and seed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pipelinerl.config.load import load_config
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import ConfigError

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


class PlannedRun(NamedTuple):
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
    def runs(self) -> list[PlannedRun]:
        """In order: every setting with the first seed, then with the next one."""
        return [PlannedRun(setting, seed) for seed in self.seeds for setting in self.settings]

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
    for number, texts in enumerate(itertools.product(*axes.values()), start=1):
        values = dict(zip(axes, texts, strict=True))
        config = load_config(run_file, [*fixed, *(f"--{key}={text}" for key, text in values.items())])
        setting = Setting(number, values, config.model_copy(update={"run_dir": None}))
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
