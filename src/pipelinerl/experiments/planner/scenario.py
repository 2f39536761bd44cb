"""What is simulated: a schedule, costs and work, from a run file or the records of a run; and one generation process.

An engine advances from event to event instead of token by token. Between two events the same h sequences advance by a token
every `decode_step_s[h]` seconds, so a *segment* of n steps takes one computation. Events are: a sequence ends, a reward
arrives, or the engine is woken because weights were published or something else that it was waiting for has changed.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from pipelinerl.actor.actor import open_limit
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import RunDirectoryError
from pipelinerl.experiments.planner.calibration import Calibration, LengthDistribution, Utilisation, prompt_tokens_mean
from pipelinerl.preprocess.advantages import advantages
from pipelinerl.report.curves import begin_s
from pipelinerl.report.series import measure, rates_after, read_groups, read_run
from pipelinerl.schedule import Schedule, make_schedule, stream_capacity

# ---- the inputs


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


BLOCK = 1024
"""Number of groups that are drawn together."""
RECENT = 64
"""Number of a run's last groups that replace groups without a record."""
WAIT_SIGMA = 1.0
"""Standard deviation of the logarithm of a wait."""


class DrawnWorkload:
    """K independent lengths per group. All attempts of a share `used_share` of the groups have a gradient, and no others.

    Each attempt waits a lognormal time for its reward, with median `wait_median_s`, cut at `wait_most_s`. With a median of 0
    no attempt waits. A pure function of (seed, index): it does not depend on the engine or the time of the start.
    """

    def __init__(
        self,
        lengths: LengthDistribution,
        group_size: int,
        *,
        seed: int,
        used_share: float = 1.0,
        prompt_tokens: float = 0.0,
        wait_median_s: float = 0.0,
        wait_most_s: float = math.inf,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self._lengths, self._group_size = lengths, group_size
        self._seed, self._used_share = seed, used_share
        self._wait_median_s, self._wait_most_s = wait_median_s, wait_most_s
        self._block = -1
        self._drawn: list[GroupWork] = []

    def group(self, index: int) -> GroupWork:
        """The work of the group with this index."""
        block, number = divmod(index, BLOCK)
        if block != self._block:
            rng, shape = np.random.default_rng((self._seed, block)), (BLOCK, self._group_size)
            lengths_GK = rng.choice(self._lengths.longest, size=BLOCK * self._group_size, p=self._lengths.probabilities)
            used_G = rng.random(BLOCK) < self._used_share
            waits_G: list[tuple[float, ...]] = [()] * BLOCK
            if self._wait_median_s > 0:
                drawn_GK = rng.lognormal(math.log(self._wait_median_s), WAIT_SIGMA, shape)
                waits_G = [tuple(waits) for waits in np.minimum(drawn_GK, self._wait_most_s).tolist()]
            rows = zip((lengths_GK + 1).reshape(shape).tolist(), used_G.tolist(), waits_G, strict=True)
            self._drawn = [
                GroupWork(tuple(lengths), (used,) * self._group_size, waits_s=waits) for lengths, used, waits in rows
            ]
            self._block = block
        return self._drawn[number]


class ReplayedWorkload:
    """The groups of a run, under their own indices. The prediction is then of the machine, not of the model's lengths.

    An index without a record (a group that was in progress when the run ended, or a later one) gets the work of one of the
    run's last groups. There is at least one group.
    """

    def __init__(self, groups: Mapping[int, GroupWork], prompt_tokens: float) -> None:
        self.prompt_tokens = prompt_tokens
        self._groups = groups
        self._recent = [groups[index] for index in sorted(groups)[-RECENT:]]

    def group(self, index: int) -> GroupWork:
        """The work of the group with this index."""
        recorded = self._groups.get(index)
        return self._recent[index % len(self._recent)] if recorded is None else recorded


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A run to simulate. In the paper's notation: I engines of H slots, K attempts per problem, B rollouts per step.

    The stream holds up to `capacity` groups; None: any number. `max_open_rollouts` is the actor's setting. The run ends
    after `steps` optimizer steps. `workload.prompt_tokens` is the mean length of a prompt.
    """

    schedule: Schedule
    engines: int
    slots: int
    group_size: int
    batch_size: int
    steps: int
    costs: Costs
    workload: DrawnWorkload | ReplayedWorkload
    capacity: int | None = None
    when_full: Literal["block", "drop_oldest"] = "block"
    max_open_rollouts: int | None = None


# ---- the scenario of a run


def run_scenario(
    config: RunConfig, calibration: Calibration, workload: ReplayedWorkload | None = None, *, steps: int | None = None
) -> Scenario:
    """The run that `config` describes, on the calibrated machine, with a trainer on `trainer.ranks` such machines.

    Without a `workload`, lengths and the share of groups with a gradient are as in the calibration. `steps`: in place of the
    run file's. A rollout's measured overhead includes its share of its group's prefill, and is charged at its end. With
    another number of ranks than in the calibration, the cost per token changes in proportion. The fixed cost of a step
    stays, and so does the cost to prepare a rollout, which rank 0 alone does.
    """
    drawn = DrawnWorkload(
        LengthDistribution(calibration.lengths),
        config.actor.group_size,
        seed=config.seed,
        used_share=calibration.used_share,
        prompt_tokens=calibration.prompt_tokens_mean,
    )
    decode_step_s = Utilisation(calibration.decode_s).step_time(np.arange(config.engine.slots + 1))
    return Scenario(
        schedule=make_schedule(config),
        engines=config.engine.processes,
        slots=config.engine.slots,
        group_size=config.actor.group_size,
        batch_size=config.trainer.batch_size,
        steps=steps or config.trainer.steps,
        costs=Costs(
            decode_step_s=tuple(decode_step_s.tolist()),
            rollout_s=calibration.rollout_s,
            update_pause_s=calibration.update_pause_s,
            train_step_s=calibration.train_step_s,
            train_token_s=calibration.train_token_s * calibration.ranks / config.trainer.ranks,
            prepare_s=calibration.prepare_s,
        ),
        workload=workload or drawn,
        capacity=stream_capacity(config),
        when_full=config.stream.when_full,
        max_open_rollouts=config.actor.max_open_rollouts,
    )


def read_workload(run_dir: Path, config: RunConfig) -> ReplayedWorkload:
    """The groups that a run finished, except those with a failed attempt. Raises RunDirectoryError."""
    groups = [group for group in read_groups(run_dir) if len(group.rollouts) == config.actor.group_size]
    groups = [group for group in groups if all(rollout.tokens for rollout in group.rollouts)]
    if not groups:
        raise RunDirectoryError(f"{run_dir} has no finished group of {config.actor.group_size} attempts")
    preprocess = config.preprocess
    by_reward = preprocess.advantage in ("group_mean", "leave_one_out")
    all_used = preprocess.zero_advantage == "keep" or config.trainer.kl_coefficient > 0 or not by_reward
    works = {}
    for group in groups:
        rewards = [rollout.reward for rollout in group.rollouts]
        values = advantages(rewards, baseline="group_mean")  # the others are 0 for the same rollouts
        zero_dropped, cut_dropped = preprocess.zero_advantage == "drop", preprocess.overlong == "drop"
        cut = [rollout.turns[-1].completion.finish_reason == "length" for rollout in group.rollouts]
        works[group.index] = GroupWork(
            lengths=tuple(rollout.tokens for rollout in group.rollouts),
            used=tuple(all_used or value != 0.0 for value in values),
            dropped=tuple(
                (zero_dropped and value == 0.0) or (cut_dropped and long) for value, long in zip(values, cut, strict=True)
            ),
        )
    return ReplayedWorkload(works, prompt_tokens_mean(groups))


def read_measured(run_dir: Path, config: RunConfig) -> dict[str, float | None]:
    """What a run measured, by the names of the same quantities in `RunPrediction`; None: not recorded.

    Time starts when the trainer was ready and any evaluation before training had ended. Lag and the engine's busy fraction
    are from `summary.json`; the latter is over a session, evaluations included. Raises RunDirectoryError without optimizer
    steps, or if records can't be read.
    """
    run = read_run(run_dir)
    begin, first = begin_s(run.steps, (), run.evaluations), run.steps[0]
    found = measure(run.steps, begin)
    waited_s = sum(step.wait_s for step in run.steps) - (begin - first.time_s + first.train_s + first.wait_s)
    later: tuple[float | None, float | None] = (found.samples_per_s, found.tokens_per_s)
    if fill := first_fifth(len(run.steps), make_schedule(config)):
        later = rates_after(run.steps, fill) or (None, None)
    summarized = ("lag_mean", "lag_max", "engine_busy_fraction")
    return {
        "steps": len(run.steps),
        "samples_per_s": found.samples_per_s,
        "samples_per_s_later": later[0],
        "trained_tokens_per_s_later": later[1],
        "trainer_busy_fraction": 1 - max(0.0, waited_s) / found.training_s,
        **{name: (run.summary or {}).get(name) for name in summarized},
    }


def first_fifth(steps: int, schedule: Schedule) -> int:
    """How many initial steps a steady rate excludes: a fifth, rounded down to whole rounds."""
    return max((version for version in range(1, steps // 5 + 1) if schedule.publishes(version)), default=0)


# ---- records of the simulated pipeline, with slots because there may be millions


@dataclass(slots=True, eq=False)
class SimulatedGroup:
    """K attempts that run in one engine. `open` of them are queued, in progress or waiting for their reward."""

    index: int
    work: GroupWork
    open: int = 0
    rollouts: list[SimulatedRollout] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class SimulatedRollout:
    """One attempt. `engine` samples its tokens in decode steps `start_step` .. `start_step + length - 1`.

    `first_update` and `last_update` index the engine's `update_versions`: the weights of its first and last token.
    """

    group: SimulatedGroup
    length: int
    used: bool
    engine: SimulatedEngine
    wait_s: float = 0.0
    start_step: int = 0
    first_update: int = 0
    last_update: int = 0


class DecodeSegment(NamedTuple):
    """`steps` decode steps of `step_s` each, after a pause from the token boundary at `begin_s` on."""

    begin_s: float
    pause_s: float
    step_s: float
    steps: int

    def steps_until(self, time_s: float, *, later: bool = False) -> int:
        """Steps (at least one) to the first token boundary at or after `time_s`; strictly after it if `later`."""
        steps = (time_s - self.begin_s - self.pause_s) / self.step_s
        return max(1, math.floor(steps) + 1 if later else math.ceil(steps))


class SimulatedEngine:
    """H slots and the queue of rollouts for them. `segment` is the current segment; None: there is no open rollout.

    If no sequence is in progress but rollouts wait for rewards, the segment is the time until the next reward.
    """

    def __init__(self, index: int, scenario: Scenario) -> None:
        self.index = index
        self.slots = scenario.slots
        self.version = 0
        self.active = 0
        self.steps_done = 0
        self.decode_s = self.slot_s = 0.0
        self.finished: deque[SimulatedGroup] = deque()
        self.segment: DecodeSegment | None = None
        self.event_number = 0
        """Number of the engine's latest event. Events in the queue with an older number are stale."""
        self.update_steps = [0]
        self.update_versions = [self.version]
        self._costs = scenario.costs
        in_rounds = scenario.schedule.in_rounds
        self._max_open = open_limit(scenario.max_open_rollouts, scenario.slots, in_rounds=in_rounds)
        self._waiting: deque[SimulatedRollout] = deque()
        self._ends: list[int] = []
        self._ending: dict[int, list[SimulatedRollout]] = {}
        self._rewards: list[tuple[float, int, int, SimulatedRollout]] = []
        """A heap of (time of the reward, tie-breakers, rollout)."""
        self._pause_s = 0.0

    @property
    def room(self) -> int:
        """Free slots; 0 while the actor's limit on open rollouts is reached."""
        running = self.active + len(self._waiting)
        if self._max_open is not None and running + len(self._rewards) >= self._max_open:
            return 0
        return self.slots - running

    # ---- at a token boundary

    def take_weights(self, version: int) -> None:
        """Use the weights of `version` from the next decode step on."""
        self.version, step = version, self.steps_done
        self._pause_s = self._costs.update_pause_s
        if self.update_steps[-1] == step:
            self.update_versions[-1] = version
        else:
            self.update_steps.append(step)
            self.update_versions.append(version)

    def submit(self, group: SimulatedGroup) -> None:
        work = group.work
        triples = zip(work.lengths, work.used, work.waits_s or (0.0,) * len(work.lengths), strict=True)
        group.rollouts = [SimulatedRollout(group, length, used, self, wait_s) for length, used, wait_s in triples]
        group.open = len(group.rollouts)
        self._waiting.extend(group.rollouts)

    def begin(self, now_s: float) -> None:
        """Fill the slots and begin a segment, until the next sequence ends or the next reward arrives."""
        entering = min(self.slots - self.active, len(self._waiting))
        for _ in range(entering):
            rollout = self._waiting.popleft()
            rollout.start_step = self.steps_done
            rollout.first_update = len(self.update_steps) - 1
            end = self.steps_done + rollout.length
            if end not in self._ending:
                self._ending[end] = []
                heapq.heappush(self._ends, end)
            self._ending[end].append(rollout)
        self.active += entering
        if self.active:
            steps = self._ends[0] - self.steps_done
            step_s = self._costs.decode_step_s[self.active]
            self.segment = DecodeSegment(now_s, self._pause_s, step_s, steps)
            if self._rewards:
                self.segment = self.segment._replace(steps=min(steps, self.segment.steps_until(self._rewards[0][0])))
        elif self._rewards:
            self.segment = DecodeSegment(now_s, 0.0, self._rewards[0][0] - now_s, 1)
        else:
            self.segment = None
        self._pause_s = 0.0

    # ---- within a segment

    def end_s(self) -> float:
        """The end of the segment, including the actor's work on the rollouts that end then."""
        segment = self.segment
        assert segment is not None  # noqa: S101 - called only with a segment
        ending = len(self._ending[self._ends[0]]) if self._ends and self.steps_done + segment.steps == self._ends[0] else 0
        return segment.begin_s + segment.pause_s + segment.steps * segment.step_s + ending * self._costs.rollout_s

    def stop_at_boundary(self, now_s: float, *, later: bool) -> bool:
        """End the segment at the first boundary at or after `now_s` (`later`: after). False if it ends there anyway."""
        segment = self.segment
        assert segment is not None  # noqa: S101 - called only with a segment
        if not self.active:  # nothing decodes, so the segment can end now
            self.segment = DecodeSegment(now_s, 0.0, 0.0, 1)
            return True
        steps = segment.steps_until(now_s, later=later)
        if steps >= segment.steps:
            return False
        self.segment = segment._replace(steps=steps)
        return True

    def finish_segment(self) -> None:
        """Free the slots of sequences that ended with the segment. Complete groups go to `finished`, oldest first."""
        if self.segment is None:
            return
        now_s = self.end_s()
        self._account(self.segment, self.segment.steps)
        self.segment = None
        ended: list[SimulatedRollout] = []
        if self._ends and self._ends[0] == self.steps_done:
            ended = self._ending.pop(heapq.heappop(self._ends))
        for number, rollout in enumerate(ended):
            rollout.last_update = len(self.update_steps) - 1
            self.active -= 1
            if rollout.wait_s > 0:
                heapq.heappush(self._rewards, (now_s + rollout.wait_s, self.steps_done, number, rollout))
        rewarded = [rollout for rollout in ended if rollout.wait_s <= 0]
        while self._rewards and self._rewards[0][0] <= now_s:
            rewarded.append(heapq.heappop(self._rewards)[-1])
        complete = []
        for rollout in rewarded:
            rollout.group.open -= 1
            if rollout.group.open == 0:
                complete.append(rollout.group)
        self.finished.extend(sorted(complete, key=lambda group: group.index))

    def interrupt(self, now_s: float) -> None:
        """Account for the part of the segment before `now_s`, the end of the run."""
        if self.segment is not None and self.active:
            done_s = now_s - self.segment.begin_s - self.segment.pause_s
            steps = min(self.segment.steps, max(0, math.floor(done_s / self.segment.step_s)))
            self._account(self.segment, steps)
        self.segment = None

    # ---- helpers

    def _account(self, segment: DecodeSegment, steps: int) -> None:
        """Count `steps` of the segment as done. Without a sequence in progress they are not decode steps."""
        if not self.active:
            return
        decode_s = steps * segment.step_s
        self.steps_done += steps
        self.decode_s += decode_s
        self.slot_s += decode_s * self.active
