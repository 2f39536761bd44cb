"""The request of a comparison: the schedules, their runs, and how much is measured. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from pipelinerl.config.load import validate
from pipelinerl.config.schema import EvaluationConfig, RunConfig, ScheduleConfig
from pipelinerl.errors import ConfigError
from pipelinerl.experiments.compare.tuning import Settings
from pipelinerl.resources.machine import Machine

PIPELINE, CONVENTIONAL = "pipeline", "conventional"


class Contender(NamedTuple):
    """A schedule and its G (1 for a schedule without rounds)."""

    kind: Literal["pipeline", "conventional", "async"]
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
        kind, colon, rounds = part.partition(":")
        if kind == PIPELINE and not colon:
            one = Contender("pipeline")
        elif kind in (CONVENTIONAL, "async") and rounds.isascii() and rounds.isdigit() and int(rounds) > 0:
            one = Contender("conventional" if kind == CONVENTIONAL else "async", int(rounds))
        else:
            raise ConfigError(
                f"--schedules: {part!r} is not a schedule; write pipeline, conventional:G or async:G (G optimizer steps a "
                "round, e.g. conventional:4), with commas between"
            )
        if one in contenders:
            raise ConfigError(f"--schedules: {one.label} is listed twice; list each schedule once")
        contenders.append(one)
    return tuple(contenders)


def whole_rounds(steps: int, contenders: Sequence[Contender]) -> int:
    """The largest number of optimizer steps, at most `steps`, that is a whole number of rounds for every schedule.

    A round that is cut short has generated samples that are never trained on, which would count against its schedule.
    Raises ConfigError if there is no such number.
    """
    common = math.lcm(*(contender.steps_per_round for contender in contenders))
    if steps < common:
        raise ConfigError(
            f"trainer.steps: {steps} steps are too few for whole rounds of every schedule; set it to a multiple of {common}"
        )
    return steps - steps % common


def trial_length(trial_steps: int, contender: Contender) -> tuple[int, int]:
    """(steps of a trial, initial steps that do not count because the pipeline fills: a third). Both are whole rounds."""
    rounds = contender.steps_per_round
    fill = -(-trial_steps // (3 * rounds)) * rounds
    return max(-(-trial_steps // rounds) * rounds, fill + rounds), fill


class Effort(NamedTuple):
    """How much is measured: defaults for the user's options, and the length of a trial.

    `max_steps` bounds the run file's steps. `trial_steps` is rounded up to whole rounds.
    """

    schedules: str
    seeds: int
    max_steps: int | None
    trial_steps: int
    held_out: int


FULL = Effort("pipeline,conventional:4,conventional:8", 2, None, 16, held_out=512)
QUICK = Effort("pipeline,conventional:2,conventional:4", 1, 48, 8, held_out=256)
EVALUATIONS = 16
"""Default number of versions of each run that answer the held-out problems, besides the initial weights."""


class ComparisonRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that determines the runs. Runs that were made for an equal request are reused.

    config             the run file, resolved and without its run_dir
    finals             with `tune`: runs of full length decide how many processes the engines are spread over
    held_out           held-out problems that decide when a reward is reached; 0: training rewards decide
    evaluate_every     optimizer steps between the versions that answer them
    held_out_args      overrides of environment arguments while they are answered
    """

    config: RunConfig
    schedules: tuple[Contender, ...]
    seeds: int
    steps: int
    tune: bool
    trial_steps: int
    finals: bool
    machine: Machine
    held_out: int
    evaluate_every: int
    held_out_args: dict[str, Any]

    @property
    def reward(self) -> Literal["held-out", "training"]:
        """The kind of reward that the target refers to."""
        return "held-out" if self.held_out else "training"

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

    def start_settings(self, contender: Contender) -> Settings:
        """The run file's settings, with defaults resolved for this schedule."""
        schedule = self.config.schedule.model_copy(update={"kind": contender.kind})
        return Settings.of(self.config.model_copy(update={"schedule": schedule}), self.machine.cores)

    def run_config(self, contender: Contender, settings: Settings, *, steps: int, weights_every: int = 0) -> RunConfig:
        """The run file of one run: `config` with the schedule, its settings, and nothing else that takes time.

        Evaluation and checkpoints are off, because they would interrupt the schedules to different degrees. Copies of the
        weights every `weights_every` steps (0: none) cost all schedules the same. Raises ConfigError if the schedule is
        incompatible with the rest of `config`.
        """
        base, max_lag = self.config, self.config.schedule.max_lag if contender.kind == PIPELINE else None
        config = settings.applied_to(base)
        trainer = {"steps": steps, "checkpoint_every": 0, "weights_every": weights_every}
        changes = {
            "schedule": ScheduleConfig(kind=contender.kind, steps_per_round=contender.steps_per_round, max_lag=max_lag),
            "evaluation": EvaluationConfig(problems=0, temperature=base.evaluation.temperature),
            "metrics": base.metrics.model_copy(update={"view": "none", "plot": False, "trackers": (), "callback": None}),
            "trainer": config.trainer.model_copy(update=trainer),
        }
        return validate(config.model_copy(update=changes))


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
    """A request; None takes the default of the effort (quick or full). Raises ConfigError."""
    effort = QUICK if quick else FULL
    contenders = parse_contenders(effort.schedules if schedules is None else schedules)
    if config.launch.kind != "processes":
        raise ConfigError("launch.kind: compare runs each stage in a separate process; set it to processes")
    steps = whole_rounds(min(config.trainer.steps, effort.max_steps or config.trainer.steps), contenders)
    return ComparisonRequest(
        config=config.model_copy(update={"run_dir": None}),
        schedules=contenders,
        seeds=seeds or effort.seeds,
        steps=steps,
        tune=tune,
        trial_steps=effort.trial_steps,
        finals=not quick,
        machine=machine,
        held_out=effort.held_out if held_out is None else held_out,
        evaluate_every=evaluate_every or -(-steps // EVALUATIONS),
        held_out_args=dict(held_out_args or {}),
    )
