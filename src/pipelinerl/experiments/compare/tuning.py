"""The fastest settings of a schedule on a machine: sweeps of short runs over one axis after another. Pure.

engines on the cores ─▶ slots ─▶ the trainer's threads ─▶ one engine process or several, by runs of full length
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from msgspec.structs import replace

from pipelinerl.config.schema import RunConfig
from pipelinerl.experiments.statistics import powers_of_two
from pipelinerl.resources.roles import plan_threads
from pipelinerl.schedule import make_schedule

MARGIN = 0.02
"""A setting must be faster by this share to replace one closer to the run file, because rates of short runs vary."""


class Settings(msgspec.Struct, frozen=True):
    """`processes` engines of `slots` slots and `engine_threads` threads each; the trainer's ranks and their threads."""

    processes: int
    engine_threads: int
    slots: int
    trainer_threads: int
    trainer_ranks: int = 1

    @classmethod
    def of(cls, config: RunConfig, cores: int) -> Settings:
        """The settings that a run file resolves to on a machine with `cores` cores."""
        threads = plan_threads(config, make_schedule(config), cores)
        engine, trainer = config.engine, config.trainer
        return cls(engine.processes, threads.generation, engine.slots, threads.training, trainer.ranks)

    @property
    def label(self) -> str:
        engines, trainer = f"{self.processes} x H {self.slots}", f"{self.trainer_ranks} x {self.trainer_threads}"
        return f"{engines}, engine threads {self.engine_threads}, trainer threads {trainer}"

    @property
    def folder(self) -> str:
        engines = f"p{self.processes}-e{self.engine_threads}-h{self.slots}"
        return f"{engines}-t{self.trainer_threads}-r{self.trainer_ranks}"

    def applied_to(self, config: RunConfig) -> RunConfig:
        changes = {"processes": self.processes, "slots": self.slots, "threads": self.engine_threads}
        trainer = config.trainer.model_copy(update={"threads": self.trainer_threads, "ranks": self.trainer_ranks})
        return config.model_copy(update={"engine": config.engine.model_copy(update=changes), "trainer": trainer})

    def with_layout(self, processes: int, threads: int) -> Settings:
        """The same total number of slots, spread over `processes` engines."""
        slots = -(-self.processes * self.slots // processes)
        return replace(self, processes=processes, engine_threads=threads, slots=slots)


class TuningTrial(msgspec.Struct, frozen=True):
    """Settings that were tried. `tokens_per_s` is None if the run was too short. `full`: at full run length."""

    settings: Settings
    tokens_per_s: float | None
    full: bool = False


class TuningResult(msgspec.Struct, frozen=True):
    """The settings that a schedule uses, and all of its trials, in order."""

    used: Settings
    trials: Sequence[TuningTrial] = ()


Axis = Callable[[Settings], Sequence[Settings]]
"""Returns alternatives to some settings, which differ from them in one respect."""


def axes(config: RunConfig, cores: int, *, most_in_progress: int | None, in_turn: bool) -> list[Axis]:
    """The axes in order: layout of engines on cores, number of slots, the trainer's threads. On a GPU only the slots.

    `most_in_progress` is the schedule's bound on sequences in progress, if it has one; more slots would stay empty.
    `in_turn`: the trainer has all cores for itself, so that a rank on each core may be faster than threads.
    """
    sharded_reference = config.model.lora is not None and config.trainer.kl_coefficient > 0

    def layouts(now: Settings) -> list[Settings]:
        """From one core to all: one thread for each engine, or as many threads as the cores allow."""
        counts = (*powers_of_two(cores - 1), cores)
        both = [(count, threads) for count in counts for threads in dict.fromkeys((1, max(1, cores // count)))]
        return [now.with_layout(count, threads) for count, threads in both]

    def slots(now: Settings) -> list[Settings]:
        twice = 2 * now.processes * now.slots
        return [replace(now, slots=2 * now.slots)] if most_in_progress is None or twice <= most_in_progress else []

    def trainers(now: Settings) -> list[Settings]:
        """The run file's ranks with one thread or their share of the cores; `in_turn` also a rank on each core."""
        ranks = now.trainer_ranks
        found = [(ranks, 1), (ranks, max(1, cores // ranks)), *([(cores, 1)] if in_turn and not sharded_reference else [])]
        return [replace(now, trainer_ranks=ranks, trainer_threads=threads) for ranks, threads in found]

    on_cpu = [layouts] if config.engine.device == "cpu" else []
    return [*on_cpu, slots, *([trainers] if config.trainer.device == "cpu" else [])]


def tune(
    start: Settings, axes: Sequence[Axis], measure: Callable[[Settings, bool], float | None], *, finals: bool
) -> TuningResult:
    """The fastest settings, and all trials in order. Nothing is measured twice; a rate of None counts as the slowest.

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

    best = fastest([start])
    for alternatives in axes:
        best = fastest([best, *alternatives(best)])
    others = [trial for trial in trials if trial.settings.processes != best.processes]
    if finals and others:
        other = max(others, key=lambda trial: trial.tokens_per_s or 0.0).settings
        best = fastest([best, best.with_layout(other.processes, other.engine_threads)], full=True)
    return TuningResult(best, trials)
