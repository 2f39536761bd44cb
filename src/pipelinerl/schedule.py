"""The three methods as one policy object each. Pure decisions: no I/O, no tensors, no clock."""

from __future__ import annotations

from dataclasses import dataclass

from pipelinerl.config.schema import RunConfig
from pipelinerl.interfaces import PipelineState, Schedule, Verdict

ALLOWED = Verdict(True)


@dataclass(frozen=True)
class PipelineSchedule:
    """PipelineRL (Algorithm 2): everything at once, weights in flight after every optimizer step.

    With `max_lag`, a group is admitted only if, were every outstanding rollout trained before the oldest one, the oldest
    one's first token would still be within the bound. That keeps the bound without dropping anything; a trainer that is
    short of a batch is always fed, and what then exceeds the bound is dropped where batches are made.
    """

    batch_size: int
    max_lag: int | None = None
    name: str = "pipeline"

    def may_start(self, state: PipelineState, rollouts: int) -> Verdict:
        if self.max_lag is None or state.outstanding < self.batch_size:
            return ALLOWED
        steps_ahead = -(-(state.outstanding + rollouts) // self.batch_size) - 1
        worst_lag = state.trainer_version + steps_ahead - min(state.oldest_version, state.engine_version)
        if worst_lag <= self.max_lag:
            return ALLOWED
        return Verdict(
            False,
            f"the trainer (version {state.trainer_version}): {state.outstanding} rollouts are outstanding, and with one "
            f"more group the oldest could reach lag {worst_lag} > max_lag {self.max_lag}",
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
    """Conventional RL (Algorithm 1): B*G rollouts with frozen weights, then G optimizer steps, in turn."""

    batch_size: int
    steps_per_round: int
    name: str = "conventional"

    def may_start(self, state: PipelineState, rollouts: int) -> Verdict:
        round_start = state.trainer_version - state.trainer_version % self.steps_per_round
        if state.engine_version != round_start:
            return Verdict(False, f"the round's weights (version {round_start}); the engine has {state.engine_version}")
        # What the rest of the round still needs: exactly the outstanding rollouts, unless some were dropped.
        needed = self.batch_size * (round_start + self.steps_per_round - state.trainer_version)
        if state.outstanding >= needed:
            return Verdict(False, f"the trainer to finish its round (version {state.trainer_version})")
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

    Weights change only between rounds, when nothing is in progress. Lag is at most 2G - 1.
    """

    batch_size: int
    steps_per_round: int
    name: str = "async"

    def may_start(self, state: PipelineState, rollouts: int) -> Verdict:
        if state.engine_version < state.newest_version:
            return Verdict(False, f"the round's weights (version {state.newest_version}); it has {state.engine_version}")
        # With the weights of round r in the engine, the rollouts of round r (being trained on) and r + 1 may be outstanding.
        rounds_end = (state.engine_version // self.steps_per_round + 2) * self.steps_per_round
        if state.outstanding >= self.batch_size * (rounds_end - state.trainer_version):
            return Verdict(False, f"the trainer to finish its round (version {state.trainer_version})")
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
    return ALLOWED if queued >= needed else Verdict(False, f"samples from the actor: {queued} of {needed} are here")


def _within_share(state: PipelineState, round_size: int) -> Verdict:
    """Of several engines, none has more than its share of a round in progress: else the first takes all, and others idle."""
    if state.processes == 1 or state.own < -(-round_size // state.processes):
        return ALLOWED
    return Verdict(False, "the other engines to start the rest of the round")


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
    return PipelineSchedule(batch, config.schedule.max_lag)
