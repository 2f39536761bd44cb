"""The settings that decide how fast a schedule is on a machine, and which of them are tried. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from pipelinerl.config import RunConfig
from pipelinerl.launch.hosts.resources import plan_threads
from pipelinerl.schedule import make_schedule

MARGIN = 0.02
"""A setting must be faster by this share to replace what is closer to the run file: rates of short runs vary."""


class Settings(NamedTuple):
    """`processes` engines of `slots` slots and `engine_threads` threads each, and the trainer's threads."""

    processes: int
    engine_threads: int
    slots: int
    trainer_threads: int

    @property
    def label(self) -> str:
        engines = f"{self.processes} x " if self.processes > 1 else ""
        return f"{engines}H {self.slots}, engine threads {self.engine_threads}, trainer threads {self.trainer_threads}"

    @property
    def folder(self) -> str:
        return f"p{self.processes}-e{self.engine_threads}-h{self.slots}-t{self.trainer_threads}"

    def applied_to(self, config: RunConfig) -> RunConfig:
        replace = msgspec.structs.replace
        engine = replace(config.engine, processes=self.processes, slots=self.slots, threads=self.engine_threads)
        return replace(config, engine=engine, trainer=replace(config.trainer, threads=self.trainer_threads))


def settings_of(config: RunConfig, cores: int) -> Settings:
    """What a run file comes to on a machine of so many cores."""
    threads = plan_threads(config, make_schedule(config), cores)
    return Settings(config.engine.processes, threads.generation, config.engine.slots, threads.training)


Axis = Callable[[Settings], Sequence[Settings]]
"""Alternatives to some settings: they differ from them in one respect."""


class Trial(NamedTuple):
    """Settings that were tried; `tokens_per_s` is None if the run was too short to say. `full`: at a run's full length."""

    settings: Settings
    tokens_per_s: float | None
    full: bool = False


def axes(config: RunConfig, *, cores: int, most_in_progress: int | None, slot_factors: Sequence[int]) -> list[Axis]:
    """What to try, one respect after the other: how engines use cores, how many slots, the trainer's threads.

    most_in_progress   sequences that the schedule can have in progress, if it bounds them: more slots are no use
    On a GPU only the slots matter.
    """
    on_cpu = (config.engine.device == "cpu", config.trainer.device == "cpu")
    found: list[Axis] = []
    if on_cpu[0]:
        found.append(lambda now: [_laid_out(now, *layout) for layout in engine_layouts(cores)])
    found.append(lambda now: [now._replace(slots=slots) for slots in _slots(now, most_in_progress, slot_factors)])
    if on_cpu[1]:
        found.append(lambda now: [now._replace(trainer_threads=threads) for threads in dict.fromkeys((1, cores))])
    return found


def engine_layouts(cores: int) -> list[tuple[int, int]]:
    """(processes, threads each) that use between one core and all: one thread each, or as many as fit into the cores."""
    processes = [2**power for power in range(cores.bit_length()) if 2**power < cores] + [cores]
    return [(count, threads) for count in processes for threads in dict.fromkeys((1, max(1, cores // count)))]


def _laid_out(now: Settings, processes: int, threads: int) -> Settings:
    """The same slots in all, spread over so many engines."""
    slots = -(-now.processes * now.slots // processes)
    return now._replace(processes=processes, engine_threads=threads, slots=slots)


def _slots(now: Settings, most_in_progress: int | None, factors: Sequence[int]) -> Iterator[int]:
    for factor in factors:
        if most_in_progress is None or now.processes * now.slots * factor <= most_in_progress:
            yield now.slots * factor


def search(
    start: Settings, axes: Sequence[Axis], measure: Callable[[Settings], float | None]
) -> tuple[Settings, list[Trial]]:
    """The fastest settings, axis by axis from `start`, and all that was tried, in order. Nothing is measured twice.

    Of equal rates (within MARGIN) the earlier one stays. A rate of None loses against everything.
    """
    tried: dict[Settings, float | None] = {start: measure(start)}
    best = start
    for alternatives in axes:
        for candidate in alternatives(best):
            if candidate not in tried:
                tried[candidate] = measure(candidate)
        best = _fastest(best, list(alternatives(best)), tried)
    return best, [Trial(settings, rate) for settings, rate in tried.items()]


def finalists(best: Settings, tried: Sequence[Trial]) -> list[Settings]:
    """`best`, and the same slots in all laid out over another number of engine processes, if any other was tried.

    What short runs can't tell between these two is how the work shifts as the model learns: less and less of it is the
    trainer's, once most groups are solved by all of their attempts.
    """
    others = [trial for trial in tried if trial.settings.processes != best.processes]
    if not others:
        return [best]
    other = max(others, key=lambda trial: trial.tokens_per_s or 0.0).settings
    return [best, _laid_out(best, other.processes, other.engine_threads)]


def decide(finals: Sequence[Trial]) -> Settings:
    """The fastest, where the first stays unless another is faster by MARGIN."""
    rates = {trial.settings: trial.tokens_per_s for trial in finals}
    return _fastest(finals[0].settings, list(rates), rates)


def _fastest(now: Settings, candidates: Sequence[Settings], rates: Mapping[Settings, float | None]) -> Settings:
    best = max(candidates, key=lambda settings: rates[settings] or 0.0, default=now)
    return best if (rates[best] or 0.0) > (1 + MARGIN) * (rates[now] or 0.0) else now
