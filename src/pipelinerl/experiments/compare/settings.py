"""The request of a comparison: schedules, runs, their settings on a machine, the search for the fastest. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from pipelinerl.config.load import validate
from pipelinerl.config.schema import EvaluationConfig, RunConfig, ScheduleConfig
from pipelinerl.errors import ConfigError
from pipelinerl.experiments.statistics import powers_of_two
from pipelinerl.resources.hardware import Machine
from pipelinerl.resources.share import plan_threads
from pipelinerl.schedule import make_schedule

MARGIN = 0.02
"""A setting must be faster by this share to replace one closer to the run file, because rates of short runs vary."""


class Settings(NamedTuple):
    """`processes` engines of `slots` slots and `engine_threads` threads each; the trainer's ranks and their threads."""

    processes: int
    engine_threads: int
    slots: int
    trainer_threads: int
    trainer_ranks: int = 1

    @property
    def label(self) -> str:
        engines = f"{self.processes} x " if self.processes > 1 else ""
        ranks = f"{self.trainer_ranks} x " if self.trainer_ranks > 1 else ""
        return (
            f"{engines}H {self.slots}, engine threads {self.engine_threads}, trainer threads {ranks}{self.trainer_threads}"
        )

    @property
    def folder(self) -> str:
        ranks = f"-r{self.trainer_ranks}" if self.trainer_ranks > 1 else ""
        return f"p{self.processes}-e{self.engine_threads}-h{self.slots}-t{self.trainer_threads}{ranks}"

    def applied_to(self, config: RunConfig) -> RunConfig:
        changes = {"processes": self.processes, "slots": self.slots, "threads": self.engine_threads}
        trainer = config.trainer.model_copy(update={"threads": self.trainer_threads, "ranks": self.trainer_ranks})
        return config.model_copy(update={"engine": config.engine.model_copy(update=changes), "trainer": trainer})


def settings_of(config: RunConfig, cores: int) -> Settings:
    """The settings that a run file resolves to on a machine with `cores` cores."""
    threads = plan_threads(config, make_schedule(config), cores)
    engine, trainer = config.engine, config.trainer
    return Settings(engine.processes, threads.generation, engine.slots, threads.training, trainer.ranks)


Axis = Callable[[Settings], Sequence[Settings]]
"""Returns alternatives to some settings, which differ from them in one respect."""


class TuningTrial(NamedTuple):
    """Settings that were tried. `tokens_per_s` is None if the run was too short. `full`: at full run length."""

    settings: Settings
    tokens_per_s: float | None
    full: bool = False


class TuningResult(NamedTuple):
    """The settings that a schedule uses, and all of its trials, in order."""

    used: Settings
    trials: Sequence[TuningTrial]

    def decided_by(self, trial: TuningTrial) -> bool:
        """Whether this trial decided the settings: the full-length trial of them if there are any, else the short one."""
        return trial.settings == self.used and trial.full == any(one.full for one in self.trials)


Trials = Mapping[str, TuningResult]
"""By label of the schedule."""


def axes(
    config: RunConfig, *, cores: int, most_in_progress: int | None, slot_factors: Sequence[int], in_turn: bool = False
) -> list[Axis]:
    """The axes of the search, in order: layout of engines on cores, number of slots, the trainer's threads.

    `most_in_progress` is the schedule's bound on sequences in progress, if it has one; more slots would stay empty.
    `in_turn`: the trainer has all cores for itself, so that a rank on each core may be faster than threads. On a GPU only
    the slots are searched.
    """
    found: list[Axis] = []
    if config.engine.device == "cpu":
        found.append(lambda now: [_with_layout(now, *layout) for layout in engine_layouts(cores)])
    found.append(lambda now: [now._replace(slots=slots) for slots in _slots(now, most_in_progress, slot_factors)])
    if config.trainer.device == "cpu":
        found.append(lambda now: _trainers(config, now, cores, in_turn=in_turn))
    return found


def _trainers(config: RunConfig, now: Settings, cores: int, *, in_turn: bool) -> list[Settings]:
    """The run file's ranks with one thread or their share of the cores; `in_turn` also a rank on each core."""
    layouts = [(now.trainer_ranks, threads) for threads in dict.fromkeys((1, max(1, cores // now.trainer_ranks)))]
    sharded_reference = config.model.lora is not None and config.trainer.kl_coefficient > 0
    if in_turn and not sharded_reference:
        layouts.append((cores, 1))
    return [now._replace(trainer_ranks=ranks, trainer_threads=threads) for ranks, threads in dict.fromkeys(layouts)]


def engine_layouts(cores: int) -> list[tuple[int, int]]:
    """(processes, threads per process), from one core to all: one thread each, or as many threads as the cores allow."""
    return [
        (count, threads)
        for count in (*powers_of_two(cores - 1), cores)
        for threads in dict.fromkeys((1, max(1, cores // count)))
    ]


def _with_layout(now: Settings, processes: int, threads: int) -> Settings:
    """The same total number of slots, spread over `processes` engines."""
    slots = -(-now.processes * now.slots // processes)
    return now._replace(processes=processes, engine_threads=threads, slots=slots)


def _slots(now: Settings, most_in_progress: int | None, factors: Sequence[int]) -> Iterator[int]:
    for factor in factors:
        if most_in_progress is None or now.processes * now.slots * factor <= most_in_progress:
            yield now.slots * factor


def search(
    start: Settings, axes: Sequence[Axis], measure: Callable[[Settings], float | None]
) -> tuple[Settings, list[TuningTrial]]:
    """The fastest settings, searched axis by axis from `start`, and all trials in order. Nothing is measured twice.

    Between equal rates (within MARGIN) the earlier settings stay. A rate of None counts as the slowest.
    """
    tried: dict[Settings, float | None] = {start: measure(start)}
    best = start
    for alternatives in axes:
        for candidate in alternatives(best):
            if candidate not in tried:
                tried[candidate] = measure(candidate)
        best = _fastest(best, list(alternatives(best)), tried)
    return best, [TuningTrial(settings, rate) for settings, rate in tried.items()]


def finalists(best: Settings, tried: Sequence[TuningTrial]) -> list[Settings]:
    """`best`, and the same total number of slots over another number of engine processes, if another was tried.

    Short runs can't decide between these two, because the work shifts as the model learns: the trainer's share shrinks as
    more groups are solved by all of their attempts.
    """
    others = [trial for trial in tried if trial.settings.processes != best.processes]
    if not others:
        return [best]
    other = max(others, key=lambda trial: trial.tokens_per_s or 0.0).settings
    return [best, _with_layout(best, other.processes, other.engine_threads)]


def decide(finals: Sequence[TuningTrial]) -> Settings:
    """The fastest settings; the first stay unless others are faster by MARGIN."""
    rates = {trial.settings: trial.tokens_per_s for trial in finals}
    return _fastest(finals[0].settings, list(rates), rates)


def _fastest(now: Settings, candidates: Sequence[Settings], rates: Mapping[Settings, float | None]) -> Settings:
    best = max(candidates, key=lambda settings: rates[settings] or 0.0, default=now)
    return best if (rates[best] or 0.0) > (1 + MARGIN) * (rates[now] or 0.0) else now


# ---- schedules


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
        "metrics": base.metrics.model_copy(update={"view": "none", "plot": False, "trackers": (), "callback": None}),
        "trainer": config.trainer.model_copy(update=trainer),
    }
    return validate(config.model_copy(update=changes))


# ---- the request


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


class ComparisonRequest(msgspec.Struct, frozen=True, kw_only=True):
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
) -> ComparisonRequest:
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
    return ComparisonRequest(
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


def plain(request: ComparisonRequest) -> dict[str, Any]:
    """The request as values that can be written as JSON."""
    values: dict[str, Any] = msgspec.to_builtins(request, enc_hook=lambda config: config.model_dump(mode="json"))
    return values
