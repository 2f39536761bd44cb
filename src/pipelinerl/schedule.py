"""The three methods as one policy object each. Pure decisions: no I/O, no tensors, no clock."""

from __future__ import annotations

from dataclasses import dataclass

from pipelinerl.config.schema import RunConfig
from pipelinerl.interfaces import PipelineState, Schedule, Verdict
from pipelinerl.types import ACTOR, TRAINER

ALLOWED = Verdict(True)


@dataclass(frozen=True)
class PipelineSchedule:
    """PipelineRL (Algorithm 2): everything at once, weights in flight after every optimizer step.

    `max_lag` bounds lag without dropping. The trainer takes rollouts in stream order, so what is in the stream can't be
    overtaken: its place, and so its lag, is fixed. Only rollouts *in progress* can be overtaken, at worst by all the others.
    With v the trainer's version, N all outstanding rollouts and K those of the new group, a group is admitted if

        v + ceil((N + K) / B) - 1 - (oldest version in progress, or the engine's) <= max_lag

    This keeps the bound for every rollout in progress: a step raises v by one and lowers N by B, a hand-over fixes a place
    that is at most N, and weight updates only make later tokens newer. A trainer that is short of a batch (N < B) is always
    fed. If B is no multiple of K, this can exceed the bound by one step; such rollouts are dropped where batches are made.

    `stock` limits the finished rollouts that wait for the trainer or are in its current step: more of them would only age.
    """

    batch_size: int
    max_lag: int | None = None
    stock: int | None = None
    name: str = "pipeline"
    too_old_reason: str = "stale"

    def oldest_trained(self, version: int) -> int:
        return 0 if self.max_lag is None else version - self.max_lag

    def may_start(self, state: PipelineState, rollouts: int) -> Verdict:
        if state.outstanding < self.batch_size:
            return ALLOWED
        if self.stock is not None and state.handed_over >= self.stock:
            return Verdict(
                False, f"the trainer (version {state.trainer_version}): {state.handed_over} rollouts are ready", (TRAINER,)
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

    def may_take_weights(self, in_progress: int) -> Verdict:
        return ALLOWED

    def may_train(self, version: int, queued: int) -> Verdict:
        return _enough(queued, self.batch_size)

    def publishes(self, version: int) -> bool:
        return True

    def trains_in_rounds(self) -> bool:
        return False

    def takes_turns(self) -> bool:
        return False


@dataclass(frozen=True)
class ConventionalSchedule:
    """Conventional RL (Algorithm 1): B*G rollouts with frozen weights, then G optimizer steps, in turn.

    A round that loses rollouts starts whole groups in their place. What is left over when the round ends is dropped
    (`round_surplus`), so that lag is at most G - 1. A resumed run may begin in the middle of a round: that round is shorter.
    """

    batch_size: int
    steps_per_round: int
    name: str = "conventional"
    too_old_reason: str = "round_surplus"

    def oldest_trained(self, version: int) -> int:
        return version - version % self.steps_per_round

    def may_start(self, state: PipelineState, rollouts: int) -> Verdict:
        round_start = self.oldest_trained(state.trainer_version)
        if state.engine_version < round_start:
            return Verdict(
                False, f"the round's weights (version {round_start}); the engine has {state.engine_version}", (TRAINER,)
            )
        # What the rest of the round still needs: exactly the outstanding rollouts, unless some were dropped.
        needed = self.batch_size * (round_start + self.steps_per_round - state.trainer_version)
        if state.outstanding >= needed:
            return Verdict(False, f"the trainer to finish its round (version {state.trainer_version})", (TRAINER,))
        return _within_share(state, self.batch_size * self.steps_per_round)

    def may_take_weights(self, in_progress: int) -> Verdict:
        return _drained(in_progress)

    def may_train(self, version: int, queued: int) -> Verdict:
        return _enough(queued, self.batch_size * (self.steps_per_round - version % self.steps_per_round))

    def publishes(self, version: int) -> bool:
        return version % self.steps_per_round == 0

    def trains_in_rounds(self) -> bool:
        return True

    def takes_turns(self) -> bool:
        return True


@dataclass(frozen=True)
class AsyncSchedule:
    """Asynchronous RL: rollouts for the next G steps are generated while the trainer works on the last ones.

    Weights change only between rounds, when nothing is in progress. Lag is at most 2G - 1: what a round leaves over is
    dropped, as in `ConventionalSchedule`.
    """

    batch_size: int
    steps_per_round: int
    name: str = "async"
    too_old_reason: str = "round_surplus"

    def oldest_trained(self, version: int) -> int:
        return (version // self.steps_per_round - 1) * self.steps_per_round

    def may_start(self, state: PipelineState, rollouts: int) -> Verdict:
        if state.engine_version < state.newest_version:
            return Verdict(
                False, f"the round's weights (version {state.newest_version}); it has {state.engine_version}", (TRAINER,)
            )
        # With the weights of round r in the engine, the rollouts of round r (being trained on) and r + 1 may be outstanding.
        rounds_end = (state.engine_version // self.steps_per_round + 2) * self.steps_per_round
        if state.outstanding >= self.batch_size * (rounds_end - state.trainer_version):
            return Verdict(False, f"the trainer to finish its round (version {state.trainer_version})", (TRAINER,))
        return _within_share(state, self.batch_size * self.steps_per_round)

    def may_take_weights(self, in_progress: int) -> Verdict:
        return _drained(in_progress)

    def may_train(self, version: int, queued: int) -> Verdict:
        return _enough(queued, self.batch_size * (self.steps_per_round - version % self.steps_per_round))

    def publishes(self, version: int) -> bool:
        return version % self.steps_per_round == 0

    def trains_in_rounds(self) -> bool:
        return True

    def takes_turns(self) -> bool:
        return False


def _enough(queued: int, needed: int) -> Verdict:
    return (
        ALLOWED if queued >= needed else Verdict(False, f"samples from the actor: {queued} of {needed} are here", (ACTOR,))
    )


def _within_share(state: PipelineState, round_size: int) -> Verdict:
    """Of several engines, none has more than its share of a round in progress: else the first takes all, and others idle."""
    if state.processes == 1 or state.own < -(-round_size // state.processes):
        return ALLOWED
    return Verdict(False, "the other engines to start the rest of the round", (ACTOR,))


def _drained(in_progress: int) -> Verdict:
    if in_progress == 0:
        return ALLOWED
    return Verdict(False, f"the round's last {in_progress} rollouts to finish")


def make_schedule(config: RunConfig) -> Schedule:
    """The schedule a run file asks for."""
    kind, batch, rounds = config.schedule.kind, config.trainer.batch_size, config.schedule.steps_per_round
    if kind == "conventional":
        return ConventionalSchedule(batch, rounds)
    if kind == "async":
        return AsyncSchedule(batch, rounds)
    # A stream whose capacity was set, or that replaces old groups, limits the stock by itself.
    keeps_little = config.stream.capacity is None and config.stream.when_full == "block"
    return PipelineSchedule(batch, config.schedule.max_lag, stock=2 * batch if keeps_little else None)
