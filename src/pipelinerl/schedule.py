"""The schedule of a run: the pipeline, conventional or asynchronous RL.

Pure decisions: no I/O, no tensors, no clock.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from pipelinerl.config.schema import RunConfig
from pipelinerl.interfaces import ALLOWED, PipelineState, Verdict
from pipelinerl.types import ACTOR, TRAINER

LATENCY_MARGIN = 1.5
"""Factor on the number of rollouts in progress that Little's law gives, because latencies vary."""


class Schedule(ABC):
    """Decides which stage may proceed: the difference between pipeline, conventional and asynchronous RL.

    batch_size       B, samples of an optimizer step
    steps_per_round  G, steps after which weights are published to the engines
    too_old_reason   the drop reason for rollouts older than `oldest_trained`
    in_rounds        the samples of several steps are available before the first of them; batches are then in problem order:
                     in completion order, the first would hold the round's short rollouts and the last its long ones
    takes_turns      generation and training never overlap, so that each phase can use the whole machine
    """

    name: str
    batch_size: int
    steps_per_round: int
    too_old_reason: str
    in_rounds = takes_turns = False

    @abstractmethod
    def oldest_trained(self, version: int) -> int:
        """The lowest version of tokens that the trainer may train on at `version`."""

    @abstractmethod
    def may_start(self, state: PipelineState, rollouts: int) -> Verdict:
        """Whether the actor may start `rollouts` more rollouts now."""

    def may_take_weights(self, in_progress: int) -> Verdict:
        """Whether an engine may apply new weights at this token boundary: in rounds, only when none is in progress.

        `in_progress` counts the rollouts, over all engines, that were started with older weights and are not yet in the
        stream.
        """
        if not self.in_rounds or in_progress == 0:
            return ALLOWED
        return Verdict(False, f"the round's last {in_progress} rollouts to finish")

    def may_train(self, version: int, queued: int) -> Verdict:
        """Whether the trainer, at `version` with `queued` samples, may take its next optimizer step."""
        needed = self.batch_size * (self.steps_per_round - version % self.steps_per_round)
        if queued >= needed:
            return ALLOWED
        return Verdict(False, f"samples from the actor: {queued} of {needed} have arrived", (ACTOR,))

    def publishes(self, version: int) -> bool:
        """Whether the weights of `version` are published to the engines."""
        return version % self.steps_per_round == 0


@dataclass(frozen=True)
class PipelineSchedule(Schedule):
    """PipelineRL (Algorithm 2): generation and training run concurrently, with a weight update after every optimizer step.

    `max_lag` bounds lag without dropping. The trainer takes rollouts in stream order, so a rollout in the stream can't be
    overtaken: its position, and so its lag, is fixed. Only rollouts *in progress* can be overtaken, at worst by all others.
    With v the trainer's version, N outstanding rollouts and K rollouts in the new group, a group is admitted if

        v + ceil((N + K) / B) - 1 - (oldest version in progress, or the engine's) <= max_lag

    This keeps the bound for every rollout in progress: a step raises v by one and lowers N by B, writing a group to the
    stream fixes its position at N or less, and weight updates only make later tokens newer. A group is always admitted
    while the trainer has less than a batch (N < B). If B is not a multiple of K, this can exceed the bound by one step;
    such rollouts are dropped when batches are formed.

    `stock` limits the rollouts that wait for the trainer, because they only get older. If a group takes `latency` steps,
    the trainer consumes B * latency rollouts while it is generated (Little's law), so no group is admitted while
    stock + 1.5 * B * latency rollouts are outstanding. The limit counts finished and unfinished rollouts: if many more
    than B are in progress, they finish in bursts, and a limit on finished rollouts would idle the engines after each
    burst. Until the latency is known, the highest number in progress so far replaces B * latency.

    The limit never applies while less than a batch is finished, because then the trainer is about to wait. `latency` is
    the mean of the finished groups, so it is too low where a few groups take far longer than the rest: long
    answers and slow rewards stay in progress, and without this exception they would fill the limit alone and starve both
    sides.
    """

    batch_size: int
    max_lag: int | None = None
    stock: int | None = None
    name: str = "pipeline"
    too_old_reason: str = "stale"
    steps_per_round = 1

    def oldest_trained(self, version: int) -> int:
        return 0 if self.max_lag is None else version - self.max_lag

    def may_start(self, state: PipelineState, rollouts: int) -> Verdict:
        if state.outstanding < self.batch_size:
            return ALLOWED
        needed = state.most_in_progress if state.latency is None else self.batch_size * state.latency
        most = math.inf if self.stock is None else self.stock + LATENCY_MARGIN * needed
        if state.handed_over >= self.batch_size and state.outstanding >= most:
            return Verdict(
                False,
                f"the trainer (version {state.trainer_version}): {state.outstanding} rollouts are outstanding, and the "
                f"limit is {most:.0f}",
                (TRAINER,),
            )
        if self.max_lag is None:
            return ALLOWED
        steps_ahead = -(-(state.outstanding + rollouts) // self.batch_size) - 1
        worst_lag = state.trainer_version + steps_ahead - min(state.oldest_in_progress, state.engine_version)
        if worst_lag <= self.max_lag:
            return ALLOWED
        return Verdict(
            False,
            f"the trainer (version {state.trainer_version}): {state.outstanding} rollouts are outstanding, and with one "
            f"more group the oldest in progress could reach lag {worst_lag} > max_lag {self.max_lag}",
            (TRAINER,),
        )


# ---- schedules with rounds of several optimizer steps


@dataclass(frozen=True)
class ConventionalSchedule(Schedule):
    """Conventional RL (Algorithm 1): B*G rollouts with frozen weights, then G steps, alternately. Lag is at most G - 1.

    These are rounds of G optimizer steps: weights change between rounds only, when no rollout is in progress. If rollouts of
    a round are dropped, whole groups are started to replace them. Rollouts left over at the end of a round
    are dropped (`round_surplus`). A resumed run may begin within a round, which is then shorter. `ahead`: number of rounds
    that are generated before the trainer is done with the current one.
    """

    batch_size: int
    steps_per_round: int
    name: str = "conventional"
    too_old_reason: str = "round_surplus"
    in_rounds = takes_turns = True
    ahead = 0

    def oldest_trained(self, version: int) -> int:
        return (version // self.steps_per_round - self.ahead) * self.steps_per_round

    def may_start(self, state: PipelineState, rollouts: int) -> Verdict:
        due = max(state.newest_version, self.oldest_trained(state.trainer_version))
        if state.engine_version < due:
            why = f"the round's weights (version {due}); the engine has {state.engine_version}"
            return Verdict(False, why, (TRAINER,))
        # Rollouts of the round of these weights may be outstanding, and of the rounds ahead.
        end = (state.engine_version // self.steps_per_round + 1 + self.ahead) * self.steps_per_round
        if state.outstanding >= self.batch_size * (end - state.trainer_version):
            return Verdict(False, f"the trainer to finish its round (version {state.trainer_version})", (TRAINER,))
        share = -(-self.batch_size * self.steps_per_round // state.processes)  # else the first engine takes all of a round
        if state.processes == 1 or state.own < share:
            return ALLOWED
        return Verdict(False, "the other engines to start the rest of the round", (ACTOR,))


@dataclass(frozen=True)
class AsyncSchedule(ConventionalSchedule):
    """Asynchronous RL: rounds, too, but the rollouts of the next G steps are generated while the trainer takes G steps.

    Lag is at most 2G - 1.
    """

    name: str = "async"
    takes_turns = False
    ahead = 1


def make_schedule(config: RunConfig) -> Schedule:
    """The schedule that the run file configures."""
    kind, batch, rounds = config.schedule.kind, config.trainer.batch_size, config.schedule.steps_per_round
    if kind != "pipeline":
        return (ConventionalSchedule if kind == "conventional" else AsyncSchedule)(batch, rounds)
    return PipelineSchedule(batch, config.schedule.max_lag, stock=2 * batch if stream_capacity(config) is None else None)


def stream_capacity(config: RunConfig) -> int | None:
    """How many groups may wait in the rollout stream. None: any number, because the schedule limits what is outstanding."""
    if config.stream.when_full == "drop_oldest":
        return config.stream.capacity or 2 * config.groups_needed
    return config.stream.capacity
