"""The request of a comparison: its runs, their number and length, and the copy of it in the comparison's folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.experiments.compare.settings import Contender, parse_contenders, whole_rounds
from pipelinerl.experiments.machine import Machine


class Effort(NamedTuple):
    """How much is measured: defaults for the user's options, and the length of a trial.

    `max_steps` bounds the run file's steps. `trial_steps` is rounded up to whole rounds. `finals`: runs of full length
    decide how many processes the engines are spread over.
    """

    schedules: str
    seeds: int
    max_steps: int | None
    trial_steps: int
    slot_factors: tuple[int, ...]
    finals: bool
    held_out: int


FULL = Effort("pipeline,conventional:4,conventional:8", 2, None, 16, (1, 2), finals=True, held_out=512)
QUICK = Effort("pipeline,conventional:2,conventional:4", 1, 48, 8, (1, 2), finals=False, held_out=256)
EVALUATIONS = 16
"""Default number of versions of each run that answer the held-out problems, besides the initial weights."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that determines the runs. Runs that were made for an equal request are reused.

    config             the run file, resolved and without its run_dir
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
    slot_factors: tuple[int, ...]
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


def make_request(
    config: RunConfig,
    machine: Machine,
    *,
    schedules: str | None,
    seeds: int | None,
    quick: bool,
    tune: bool,
    held_out: int | None = None,
    evaluate_every: int | None = None,
    held_out_args: Mapping[str, Any] | None = None,
) -> Request:
    """A request; None takes the default of the effort (quick or full). Raises ConfigError."""
    effort = QUICK if quick else FULL
    contenders = parse_contenders(effort.schedules if schedules is None else schedules)
    if seeds is not None and seeds < 1:
        raise ConfigError(f"--seeds: {seeds} is too few; give 1 or more")
    if held_out is not None and held_out < 0:
        raise ConfigError(f"--held-out: {held_out} problems are too few; give 1 or more, or 0 to use training rewards")
    if evaluate_every is not None and evaluate_every < 1:
        raise ConfigError(f"--evaluate-every: {evaluate_every} steps are too few; give 1 or more")
    if config.launch.kind != "processes":
        raise ConfigError("launch.kind: compare runs each stage in a separate process; set it to processes")
    steps = whole_rounds(min(config.trainer.steps, effort.max_steps or config.trainer.steps), contenders)
    return Request(
        config=config.model_copy(update={"run_dir": None}),
        schedules=contenders,
        seeds=effort.seeds if seeds is None else seeds,
        steps=steps,
        tune=tune,
        trial_steps=effort.trial_steps,
        slot_factors=effort.slot_factors,
        finals=effort.finals,
        machine=machine,
        held_out=effort.held_out if held_out is None else held_out,
        evaluate_every=evaluate_every or -(-steps // EVALUATIONS),
        held_out_args=dict(held_out_args or {}),
    )


def plain(request: Request) -> dict[str, Any]:
    """The request as values that can be written as JSON."""
    values: dict[str, Any] = msgspec.to_builtins(request, enc_hook=lambda config: config.model_dump(mode="json"))
    return values
