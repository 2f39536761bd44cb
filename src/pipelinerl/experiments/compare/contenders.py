"""The schedules that are compared, and the run of one of them. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from pipelinerl.config import RunConfig, validate
from pipelinerl.config.schema import EvaluationConfig, ScheduleConfig
from pipelinerl.errors import ConfigError
from pipelinerl.experiments.compare.settings import Settings

PIPELINE, CONVENTIONAL = "pipeline", "conventional"


class Contender(NamedTuple):
    """A schedule and its G (1 for a schedule without rounds)."""

    kind: Literal["pipeline", "conventional", "async"]
    steps_per_round: int = 1

    @property
    def label(self) -> str:
        return self.kind if self.kind == PIPELINE else f"{self.kind}:{self.steps_per_round}"


def parse_contenders(text: str) -> tuple[Contender, ...]:
    """Parse `pipeline,conventional:4,async:2`. Raises ConfigError that names the invalid part."""
    contenders = tuple(_parse(part.strip()) for part in text.split(","))
    twice = next((one.label for one in contenders if contenders.count(one) > 1), None)
    if twice:
        raise ConfigError(f"--schedules: {twice} is listed twice; list each schedule once")
    return contenders


def _parse(part: str) -> Contender:
    kind, colon, rounds = part.partition(":")
    if kind == PIPELINE and not colon:
        return Contender("pipeline")
    if kind in (CONVENTIONAL, "async") and rounds.isascii() and rounds.isdigit() and int(rounds) > 0:
        return Contender("conventional" if kind == CONVENTIONAL else "async", int(rounds))
    raise ConfigError(
        f"--schedules: {part!r} is not a schedule; write pipeline, conventional:G or async:G (G optimizer steps a round, "
        "e.g. conventional:4), with commas between"
    )


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


def run_config(
    base: RunConfig,
    contender: Contender,
    settings: Settings,
    *,
    seed: int,
    steps: int,
    run_dir: Path,
    weights_every: int = 0,
) -> RunConfig:
    """The run file of one run: `base` with the schedule, its settings, and nothing else that takes time.

    Evaluation and checkpoints are off, because they would interrupt the schedules to different degrees. Copies of the
    weights every `weights_every` steps (0: none) cost all schedules the same. Raises ConfigError if the schedule is
    incompatible with the rest of `base`.
    """
    schedule = ScheduleConfig(
        kind=contender.kind,
        steps_per_round=contender.steps_per_round,
        max_lag=base.schedule.max_lag if contender.kind == PIPELINE else None,
    )
    config = settings.applied_to(base)
    trainer = {"steps": steps, "checkpoint_every": 0, "weights_every": weights_every}
    changes = {
        "run_dir": str(run_dir),
        "seed": seed,
        "schedule": schedule,
        "evaluation": EvaluationConfig(problems=0, temperature=base.evaluation.temperature),
        "metrics": base.metrics.model_copy(update={"view": "none", "plot": False, "tensorboard": False}),
        "trainer": config.trainer.model_copy(update=trainer),
    }
    return validate(config.model_copy(update=changes))
