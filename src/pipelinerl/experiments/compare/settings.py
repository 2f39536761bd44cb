"""What a user sets of a comparison, and the search for each schedule's fastest settings on a machine. Pure.

engine processes on the cores ─▶ slots ─▶ the trainer's ranks ─▶ one engine process or several, by runs of full length
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from pipelinerl.config.load import validate
from pipelinerl.config.schema import EvaluationConfig, RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.resources.machine import Machine

PIPELINE, CONVENTIONAL = "pipeline", "conventional"
EVALUATIONS = 16
"""Default number of versions of each run that answer the held-out problems, besides the initial weights."""
MARGIN = 0.02
"""A setting must be faster by this share to replace one closer to the run file, because rates of short runs vary."""


class Contender(NamedTuple):
    """A schedule and its G (1 for a schedule without rounds)."""

    kind: str
    steps_per_round: int = 1

    @property
    def label(self) -> str:
        return self.kind if self.kind == PIPELINE else f"{self.kind}:{self.steps_per_round}"

    @property
    def folder(self) -> str:
        return self.label.replace(":", "-")


def parse_contenders(text: str) -> tuple[Contender, ...]:
    """Parse `pipeline,conventional:4,async:2`. Raises ConfigError that names the invalid part."""
    contenders: list[Contender] = []
    for part in map(str.strip, text.split(",")):
        if not re.fullmatch(r"pipeline|(conventional|async):[1-9][0-9]*", part):
            raise ConfigError(
                f"--schedules: {part!r} is not a schedule; write pipeline, conventional:G or async:G (G optimizer steps a "
                "round, e.g. conventional:4), with commas between"
            )
        kind, _, rounds = part.partition(":")
        contenders.append(Contender(kind, int(rounds or 1)))
    if len(set(contenders)) < len(contenders):
        raise ConfigError(f"--schedules {text}: list each schedule once")
    return tuple(contenders)


class Settings(msgspec.Struct, frozen=True):
    """`processes` engines of `slots` slots each, and the trainer's ranks. Threads: see `plan_threads`."""

    processes: int
    slots: int
    ranks: int = 1

    @property
    def label(self) -> str:
        ranks = f", {self.ranks} ranks" if self.ranks > 1 else ""
        return f"{self.processes} x H {self.slots}{ranks}"

    def over(self, processes: int) -> Settings:
        """The same total number of slots, spread over `processes` engines."""
        return replace(self, processes=processes, slots=-(-self.processes * self.slots // processes))


class ComparisonRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that determines the runs. Runs that were made for an equal request are reused.

    config             the run file, resolved and without its run_dir
    steps              optimizer steps of every run: whole rounds of every schedule
    held_out           held-out problems that decide when a reward is reached; 0: only rates are compared
    evaluate_every     optimizer steps between the versions that answer them
    held_out_args      overrides of environment arguments while they are answered
    """

    config: RunConfig
    schedules: tuple[Contender, ...]
    seeds: int
    steps: int
    quick: bool
    tune: bool
    machine: Machine
    held_out: int
    evaluate_every: int
    held_out_args: dict[str, Any]

    @property
    def evaluated_versions(self) -> list[int]:
        """The versions of every run that answer the held-out problems: the same for all schedules."""
        return [*range(0, self.steps, self.evaluate_every), self.steps] if self.held_out else []

    @property
    def seed_numbers(self) -> list[int]:
        return [self.config.seed + number for number in range(self.seeds)]

    def to_json(self) -> dict[str, Any]:
        values: dict[str, Any] = msgspec.to_builtins(self, enc_hook=lambda config: config.model_dump(mode="json"))
        return values

    def trial_length(self, contender: Contender) -> tuple[int, int]:
        """(steps of a trial, initial steps that do not count because the pipeline fills: a third), in whole rounds."""
        steps, rounds = 8 if self.quick else 16, contender.steps_per_round
        fill = -(-steps // (3 * rounds)) * rounds
        return max(-(-steps // rounds) * rounds, fill + rounds), fill

    def run_config(self, contender: Contender, settings: Settings, *, steps: int, weights_every: int = 0) -> RunConfig:
        """The run file of one run: `config` with the schedule, its settings, and nothing else that takes time.

        Evaluation and checkpoints are off, because they would interrupt the schedules to different degrees. Copies of the
        weights every `weights_every` steps (0: none) cost all schedules the same. Raises ConfigError if the schedule is
        incompatible with the rest of `config`.
        """
        base = self.config
        changes: dict[str, dict[str, Any]] = {
            "schedule": {
                "kind": contender.kind,
                "steps_per_round": contender.steps_per_round,
                "max_lag": base.schedule.max_lag if contender.kind == PIPELINE else None,
            },
            "engine": {"processes": settings.processes, "slots": settings.slots},
            "trainer": {"ranks": settings.ranks, "steps": steps, "checkpoint_every": 0, "weights_every": weights_every},
            "metrics": {"view": "none", "plot": False, "trackers": (), "callback": None},
        }
        sections: dict[str, Any] = {name: getattr(base, name).model_copy(update=new) for name, new in changes.items()}
        sections["evaluation"] = EvaluationConfig(problems=0, temperature=base.evaluation.temperature)
        return validate(base.model_copy(update=sections))


def make_request(
    config: RunConfig,
    machine: Machine,
    *,
    schedules: str | None = None,
    seeds: int | None = None,
    quick: bool = False,
    tune: bool = True,
    held_out: int | None = None,
    evaluate_every: int | None = None,
    held_out_args: Mapping[str, Any] | None = None,
) -> ComparisonRequest:
    """A request; None takes a default, which for some depends on `quick`.

    The steps are those of the run file (at most 48 if `quick`), rounded down to whole rounds of every schedule: a round that
    is cut short has generated samples that are never trained on, which would count against its schedule. Raises ConfigError.
    """
    usual = "pipeline,conventional:2,conventional:4" if quick else "pipeline,conventional:4,conventional:8"
    contenders = parse_contenders(usual if schedules is None else schedules)
    if config.launch.kind != "processes":
        raise ConfigError("launch.kind: compare runs each stage in a separate process; set it to processes")
    steps = min(config.trainer.steps, 48) if quick else config.trainer.steps
    common = math.lcm(*(contender.steps_per_round for contender in contenders))
    if steps < common:
        raise ConfigError(
            f"trainer.steps: {steps} steps are too few for whole rounds of every schedule; set it to a multiple of {common}"
        )
    steps -= steps % common
    return ComparisonRequest(
        config=config.model_copy(update={"run_dir": None}),
        schedules=contenders,
        seeds=seeds or (1 if quick else 2),
        steps=steps,
        quick=quick,
        tune=tune,
        machine=machine,
        held_out=(256 if quick else 512) if held_out is None else held_out,
        evaluate_every=evaluate_every or -(-steps // EVALUATIONS),
        held_out_args=dict(held_out_args or {}),
    )


# ---- the fastest settings of a schedule


class TuningTrial(msgspec.Struct, frozen=True):
    """Settings that were tried. `tokens_per_s` is None if the run was too short. `full`: at full run length."""

    settings: Settings
    tokens_per_s: float | None
    full: bool = False


class TuningResult(msgspec.Struct, frozen=True):
    """The settings that a schedule uses, and all of its trials, in order."""

    used: Settings
    trials: Sequence[TuningTrial] = ()


def tune(
    start: Settings,
    measure: Callable[[Settings, bool], float | None],
    *,
    processes: Sequence[int],
    most_slots: float,
    ranks: Sequence[int] = (),
    finals: bool,
) -> TuningResult:
    """The fastest settings, and all trials in order. Nothing is measured twice; a rate of None counts as the slowest.

    Tries these numbers of engine `processes`, then twice as many slots, unless these are more than `most_slots` in all, and
    then these numbers of the trainer's `ranks`.
    `measure` returns the rate of some settings in a run: a short one, or one of full length if its second argument is True.
    With `finals`, runs of full length decide between one engine process and several with as many slots in all: short runs
    can't, because the trainer's share of the work shrinks as the model learns and more groups are solved by all attempts.
    """
    trials: list[TuningTrial] = []

    def fastest(candidates: Sequence[Settings], *, full: bool = False) -> Settings:
        """The first, unless another is faster by MARGIN."""
        tried = {trial.settings: trial.tokens_per_s for trial in trials if trial.full == full}
        for settings in candidates:
            if settings not in tried:
                tried[settings] = measure(settings, full)
                trials.append(TuningTrial(settings, tried[settings], full))
        best = max(candidates, key=lambda settings: tried[settings] or 0.0)
        return best if (tried[best] or 0.0) > (1 + MARGIN) * (tried[candidates[0]] or 0.0) else candidates[0]

    best = fastest([start, *map(start.over, processes)])
    if 2 * best.processes * best.slots <= most_slots:
        best = fastest([best, replace(best, slots=2 * best.slots)])
    best = fastest([best, *(replace(best, ranks=number) for number in ranks)])
    others = [trial for trial in trials if trial.settings.processes != best.processes]
    if finals and others:
        other = max(others, key=lambda trial: trial.tokens_per_s or 0.0).settings
        best = fastest([best, best.over(other.processes)], full=True)
    return TuningResult(best, trials)
