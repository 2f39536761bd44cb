"""The inputs of a simulation: costs, workload and schedule, from a calibration or from the records of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import numpy as np

from pipelinerl.config.schema import PreprocessConfig, RunConfig
from pipelinerl.errors import RunDirectoryError
from pipelinerl.experiments.planner.calibration import Calibration, LengthDistribution, prompt_tokens_mean
from pipelinerl.preprocess.advantages import advantages
from pipelinerl.report.curves import begin_s
from pipelinerl.report.series import RecordedGroup, measure, name_of, rates_after, read_groups, read_run
from pipelinerl.schedule import Schedule, make_schedule, stream_capacity


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Durations in seconds (or flashes, or any other unit of time, used throughout).

    decode_step_s   a decode step with h sequences in progress, at index h: entries 0 .. H
    rollout_s       the actor's time for each rollout, its prompt included, after the step in which it ended
    update_pause_s  an engine's pause to take new weights
    train_step_s    fixed part of an optimizer step
    train_token_s   the trainer's time for each token that goes through the model, prompts included
    prepare_s       the trainer's time for each rollout that it takes from the stream
    """

    decode_step_s: tuple[float, ...]
    rollout_s: float = 0.0
    update_pause_s: float = 0.0
    train_step_s: float = 0.0
    train_token_s: float = 0.0
    prepare_s: float = 0.0


class GroupWork(NamedTuple):
    """One group's attempts: the sampled tokens of each (at least 1), and whether it has a gradient (`used`).

    `dropped` attempts are dropped when the trainer prepares them and are not trained on. Empty: none are dropped.
    `waits_s` is the time from an attempt's last token to its reward (a tool or a judge), during which it uses no slot.
    Empty: no attempt waits.
    """

    lengths: tuple[int, ...]
    used: tuple[bool, ...]
    dropped: tuple[bool, ...] = ()
    waits_s: tuple[float, ...] = ()


class Workload(Protocol):
    """The work, as a pure function of a group's index: it does not depend on the engine or the time of the start."""

    @property
    def prompt_tokens(self) -> float:
        """Mean length of a prompt."""
        ...

    def group(self, index: int) -> GroupWork: ...


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A run to simulate. In the paper's notation: I engines of H slots, K attempts per problem, B rollouts per step.

    The stream holds up to `capacity` groups; None: any number. `max_open_rollouts` is the actor's setting. The run ends
    after `steps` optimizer steps.
    """

    schedule: Schedule
    engines: int
    slots: int
    group_size: int
    batch_size: int
    steps: int
    costs: Costs
    workload: Workload
    capacity: int | None = None
    when_full: Literal["block", "drop_oldest"] = "block"
    max_open_rollouts: int | None = None


# ---- workloads: drawn from a distribution of lengths, or replayed from a run's records


BLOCK = 1024
"""Number of groups that are drawn together."""
RECENT = 64
"""Number of a run's last groups that replace groups without a record."""


@dataclass
class DrawnWorkload:
    """K independent lengths per group. All attempts of a share `used_share` of the groups have a gradient, and no others.

    Each attempt waits a lognormal time for its reward, with median `wait_median_s` and standard deviation `wait_sigma` of
    the logarithm, cut at `wait_most_s`. With a median of 0 no attempt waits. A pure function of (seed, index).
    """

    lengths: LengthDistribution
    group_size: int
    _: KW_ONLY
    seed: int
    used_share: float = 1.0
    prompt_tokens: float = 0.0
    wait_median_s: float = 0.0
    wait_sigma: float = 1.0
    wait_most_s: float = math.inf
    _block: int = field(default=-1, init=False)
    _drawn: list[GroupWork] = field(default_factory=list, init=False, repr=False)

    def group(self, index: int) -> GroupWork:
        block, number = divmod(index, BLOCK)
        if block != self._block:
            self._block, self._drawn = block, self._draw(block)
        return self._drawn[number]

    def _draw(self, block: int) -> list[GroupWork]:
        rng = np.random.default_rng((self.seed, block))
        lengths_GK = self.lengths.sample(rng, BLOCK * self.group_size).reshape(BLOCK, self.group_size)
        used_G = rng.random(BLOCK) < self.used_share
        waits_G: list[tuple[float, ...]] = [()] * BLOCK
        if self.wait_median_s > 0:
            drawn_GK = rng.lognormal(math.log(self.wait_median_s), self.wait_sigma, lengths_GK.shape)
            waits_G = [tuple(waits) for waits in np.minimum(drawn_GK, self.wait_most_s).tolist()]
        return [
            GroupWork(tuple(lengths), (used,) * self.group_size, waits_s=waits)
            for lengths, used, waits in zip(lengths_GK.tolist(), used_G.tolist(), waits_G, strict=True)
        ]


class ReplayedWorkload:
    """The groups of a run, under their own indices. The prediction is then of the machine, not of the model's lengths.

    An index without a record (a group that was in progress when the run ended, or a later one) gets the work of one of the
    run's last groups. Raises ValueError if there are no groups.
    """

    def __init__(self, groups: Mapping[int, GroupWork], prompt_tokens: float) -> None:
        if not groups:
            raise ValueError("there is no group to replay")
        self.prompt_tokens = prompt_tokens
        self._groups = groups
        self._recent = [groups[index] for index in sorted(groups)[-RECENT:]]

    def group(self, index: int) -> GroupWork:
        recorded = self._groups.get(index)
        return self._recent[index % len(self._recent)] if recorded is None else recorded


# ---- from a run file and a machine's calibration


def calibrated_costs(calibration: Calibration, config: RunConfig) -> Costs:
    """Costs in seconds of the run's engines, and of its trainer over `trainer.ranks` machines like the calibrated one.

    A rollout's measured overhead includes its share of its group's prefill, and is charged when the rollout ends.
    With another number of ranks than in the calibration, the cost per token changes in proportion. The fixed cost of a step
    stays, and so does that of a rollout, which rank 0 alone prepares.
    """
    return Costs(
        decode_step_s=tuple(calibration.utilisation().step_time(np.arange(config.engine.slots + 1)).tolist()),
        rollout_s=calibration.rollout_s,
        update_pause_s=calibration.update_pause_s,
        train_step_s=calibration.train_step_s,
        train_token_s=calibration.train_token_s * calibration.ranks / config.trainer.ranks,
        prepare_s=calibration.prepare_s,
    )


def calibrated_workload(calibration: Calibration, config: RunConfig) -> DrawnWorkload:
    """Lengths and the share of groups with a gradient as they were in the calibration."""
    return DrawnWorkload(
        LengthDistribution.of_histogram(calibration.lengths),
        config.actor.group_size,
        seed=config.seed,
        used_share=calibration.used_share,
        prompt_tokens=calibration.prompt_tokens_mean,
    )


def run_scenario(config: RunConfig, calibration: Calibration, workload: Workload, *, steps: int | None = None) -> Scenario:
    """The run that `config` describes, on the calibrated machine. `steps` overrides the run file's."""
    return Scenario(
        schedule=make_schedule(config),
        engines=config.engine.processes,
        slots=config.engine.slots,
        group_size=config.actor.group_size,
        batch_size=config.trainer.batch_size,
        steps=steps or config.trainer.steps,
        costs=calibrated_costs(calibration, config),
        workload=workload,
        capacity=stream_capacity(config),
        when_full=config.stream.when_full,
        max_open_rollouts=config.actor.max_open_rollouts,
    )


def doubts(config: RunConfig, calibration: Calibration) -> list[str]:
    """Reasons why this calibration may not fit this run, one sentence each."""
    made = calibration
    pairs = {"model": (made.model, config.model.path), "trainer.ranks": (made.ranks, config.trainer.ranks)}
    if made.slots < config.engine.slots:
        pairs["engine.slots"] = (made.slots, config.engine.slots)
    if config.engine.device == "cpu":  # processes that share cores slow each other down
        pairs["engine.processes"] = (made.processes, config.engine.processes)
    if "pipeline" in (made.schedule, name_of(config)):  # it decides whether generation and training share the machine
        pairs["schedule"] = (made.schedule, name_of(config))
    found = [f"it was made with {what} {then}, the run has {now}" for what, (then, now) in pairs.items() if then != now]
    if made.disturbed:
        load = f"load average {made.load_average:g}, {made.machine.cores} cores"
        found.append(f"the machine was busy when it was made ({load})")
    return found


# ---- from the records of a run: its workload, and what it measured


def read_workload(run_dir: Path, config: RunConfig) -> ReplayedWorkload:
    """The groups that a run finished, except those with a failed attempt. Raises RunDirectoryError."""
    groups = [group for group in read_groups(run_dir) if len(group.rollouts) == config.actor.group_size]
    groups = [group for group in groups if all(rollout.tokens for rollout in group.rollouts)]
    if not groups:
        raise RunDirectoryError(f"{run_dir} has no finished group of {config.actor.group_size} attempts")
    used = config.preprocess.zero_advantage == "keep" or config.trainer.kl_coefficient > 0
    return ReplayedWorkload(
        {group.index: _work(group, config.preprocess, all_used=used) for group in groups},
        prompt_tokens_mean(groups),
    )


def _work(group: RecordedGroup, config: PreprocessConfig, *, all_used: bool) -> GroupWork:
    rewards = [rollout.reward for rollout in group.rollouts]
    values = advantages(rewards, baseline=config.advantage, normalize_std=config.normalize_std)
    no_gradient = [value == 0.0 for value in values]
    cut = [rollout.turns[-1].completion.finish_reason == "length" for rollout in group.rollouts]
    return GroupWork(
        lengths=tuple(rollout.tokens for rollout in group.rollouts),
        used=tuple(all_used or not zero for zero in no_gradient),
        dropped=tuple(
            (zero and config.zero_advantage == "drop") or (long and config.overlong == "drop")
            for zero, long in zip(no_gradient, cut, strict=True)
        ),
    )


def read_measured(run_dir: Path, config: RunConfig) -> dict[str, float | None]:
    """What a run measured, by the names of the same quantities in `RunPrediction`; None: not recorded.

    Time starts when the trainer was ready and any evaluation before training had ended. Lag and the engine's busy fraction
    are those of `summary.json`; the latter is over a session, evaluations included. Raises RunDirectoryError without
    optimizer steps, or if records can't be read.
    """
    run = read_run(run_dir)
    steps, begin = run.steps, begin_s(run.steps, (), run.evaluations)
    found = measure(steps, begin)
    later: tuple[float | None, float | None] = (found.samples_per_s, found.tokens_per_s)
    if fill := first_fifth(found.steps, make_schedule(config)):
        later = rates_after(steps, fill) or (None, None)
    ready_s = steps[0].time_s - steps[0].train_s - steps[0].wait_s
    waited_s = sum(step.wait_s for step in steps) - (begin - ready_s)
    summarized = ("lag_mean", "lag_max", "engine_busy_fraction")
    return {
        "steps": found.steps,
        "time_s": found.training_s,
        "samples_per_s": found.samples_per_s,
        "samples_per_s_later": later[0],
        "trained_tokens_per_s_later": later[1],
        "trainer_busy_fraction": 1 - max(0.0, waited_s) / found.training_s,
        **{name: (run.summary or {}).get(name) for name in summarized},
    }


def first_fifth(steps: int, schedule: Schedule) -> int:
    """How many initial steps a steady rate excludes: a fifth, rounded down to whole rounds."""
    return max((version for version in range(1, steps // 5 + 1) if schedule.publishes(version)), default=0)
