"""The settings that determine a schedule's speed on a machine, and the search for the fastest. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from pipelinerl.config import RunConfig
from pipelinerl.launch.hosts.resources import plan_threads
from pipelinerl.schedule import make_schedule

MARGIN = 0.02
"""A setting must be faster by this share to replace one closer to the run file, because rates of short runs vary."""


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
        changes = {"processes": self.processes, "slots": self.slots, "threads": self.engine_threads}
        trainer = config.trainer.model_copy(update={"threads": self.trainer_threads})
        return config.model_copy(update={"engine": config.engine.model_copy(update=changes), "trainer": trainer})


def settings_of(config: RunConfig, cores: int) -> Settings:
    """The settings that a run file resolves to on a machine with `cores` cores."""
    threads = plan_threads(config, make_schedule(config), cores)
    return Settings(config.engine.processes, threads.generation, config.engine.slots, threads.training)


Axis = Callable[[Settings], Sequence[Settings]]
"""Returns alternatives to some settings, which differ from them in one respect."""


class Trial(NamedTuple):
    """Settings that were tried. `tokens_per_s` is None if the run was too short. `full`: at full run length."""

    settings: Settings
    tokens_per_s: float | None
    full: bool = False


def axes(config: RunConfig, *, cores: int, most_in_progress: int | None, slot_factors: Sequence[int]) -> list[Axis]:
    """The axes of the search, in order: layout of engines on cores, number of slots, the trainer's threads.

    `most_in_progress` is the schedule's bound on sequences in progress, if it has one; more slots would stay empty. On a
    GPU only the slots are searched.
    """
    on_cpu = (config.engine.device == "cpu", config.trainer.device == "cpu")
    found: list[Axis] = []
    if on_cpu[0]:
        found.append(lambda now: [_with_layout(now, *layout) for layout in engine_layouts(cores)])
    found.append(lambda now: [now._replace(slots=slots) for slots in _slots(now, most_in_progress, slot_factors)])
    if on_cpu[1]:
        found.append(lambda now: [now._replace(trainer_threads=threads) for threads in dict.fromkeys((1, cores))])
    return found


def engine_layouts(cores: int) -> list[tuple[int, int]]:
    """(processes, threads per process), from one core to all: one thread each, or as many threads as the cores allow."""
    processes = [2**power for power in range(cores.bit_length()) if 2**power < cores] + [cores]
    return [(count, threads) for count in processes for threads in dict.fromkeys((1, max(1, cores // count)))]


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
) -> tuple[Settings, list[Trial]]:
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
    return best, [Trial(settings, rate) for settings, rate in tried.items()]


def finalists(best: Settings, tried: Sequence[Trial]) -> list[Settings]:
    """`best`, and the same total number of slots over another number of engine processes, if another was tried.

    Short runs can't decide between these two, because the work shifts as the model learns: the trainer's share shrinks as
    more groups are solved by all of their attempts.
    """
    others = [trial for trial in tried if trial.settings.processes != best.processes]
    if not others:
        return [best]
    other = max(others, key=lambda trial: trial.tokens_per_s or 0.0).settings
    return [best, _with_layout(best, other.processes, other.engine_threads)]


def decide(finals: Sequence[Trial]) -> Settings:
    """The fastest settings; the first stay unless others are faster by MARGIN."""
    rates = {trial.settings: trial.tokens_per_s for trial in finals}
    return _fastest(finals[0].settings, list(rates), rates)


def _fastest(now: Settings, candidates: Sequence[Settings], rates: Mapping[Settings, float | None]) -> Settings:
    best = max(candidates, key=lambda settings: rates[settings] or 0.0, default=now)
    return best if (rates[best] or 0.0) > (1 + MARGIN) * (rates[now] or 0.0) else now
