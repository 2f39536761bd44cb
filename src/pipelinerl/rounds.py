"""Schedules with rounds of several optimizer steps: conventional and asynchronous RL. See `schedule`."""

from __future__ import annotations

from dataclasses import dataclass

from pipelinerl.interfaces import ALLOWED, PipelineState, Schedule, Verdict, enough
from pipelinerl.types import ACTOR, TRAINER


@dataclass(frozen=True)
class _Rounds(Schedule):
    """Rounds of G optimizer steps. Weights change between rounds only, when no rollout is in progress."""

    batch_size: int
    steps_per_round: int
    too_old_reason: str = "round_surplus"

    def may_take_weights(self, in_progress: int) -> Verdict:
        if in_progress == 0:
            return ALLOWED
        return Verdict(False, f"the round's last {in_progress} rollouts to finish")

    def may_train(self, version: int, queued: int) -> Verdict:
        return enough(queued, self.batch_size * (self.steps_per_round - version % self.steps_per_round))

    def publishes(self, version: int) -> bool:
        return version % self.steps_per_round == 0

    def trains_in_rounds(self) -> bool:
        return True


@dataclass(frozen=True)
class ConventionalSchedule(_Rounds):
    """Conventional RL (Algorithm 1): B*G rollouts with frozen weights, then G optimizer steps, alternately.

    If rollouts of a round are dropped, whole groups are started to replace them. Rollouts left over at the end of the
    round are dropped (`round_surplus`), so lag is at most G - 1. A resumed run may begin within a round, which is then
    shorter.
    """

    name: str = "conventional"

    def oldest_trained(self, version: int) -> int:
        return version - version % self.steps_per_round

    def may_start(self, state: PipelineState, rollouts: int) -> Verdict:
        round_start = self.oldest_trained(state.trainer_version)
        if state.engine_version < round_start:
            return Verdict(
                False, f"the round's weights (version {round_start}); the engine has {state.engine_version}", (TRAINER,)
            )
        # Rollouts that the rest of the round needs: as many as are outstanding, unless some were dropped.
        needed = self.batch_size * (round_start + self.steps_per_round - state.trainer_version)
        if state.outstanding >= needed:
            return Verdict(False, f"the trainer to finish its round (version {state.trainer_version})", (TRAINER,))
        return _within_share(state, self.batch_size * self.steps_per_round)

    def takes_turns(self) -> bool:
        return True


@dataclass(frozen=True)
class AsyncSchedule(_Rounds):
    """Asynchronous RL: rollouts for the next G steps are generated while the trainer processes the last round.

    Weights change only between rounds, when no rollout is in progress. Rollouts left over at the end of a round are
    dropped, as in `ConventionalSchedule`, so lag is at most 2G - 1.
    """

    name: str = "async"

    def oldest_trained(self, version: int) -> int:
        return (version // self.steps_per_round - 1) * self.steps_per_round

    def may_start(self, state: PipelineState, rollouts: int) -> Verdict:
        if state.engine_version < state.newest_version:
            return Verdict(
                False,
                f"the round's weights (version {state.newest_version}); the engine has {state.engine_version}",
                (TRAINER,),
            )
        # While the engine has the weights of round r, rollouts of rounds r (being trained on) and r + 1 may be outstanding.
        rounds_end = (state.engine_version // self.steps_per_round + 2) * self.steps_per_round
        if state.outstanding >= self.batch_size * (rounds_end - state.trainer_version):
            return Verdict(False, f"the trainer to finish its round (version {state.trainer_version})", (TRAINER,))
        return _within_share(state, self.batch_size * self.steps_per_round)


def _within_share(state: PipelineState, round_size: int) -> Verdict:
    """Limits each engine to its share of a round: otherwise the first would take all rollouts and the others idle."""
    if state.processes == 1 or state.own < -(-round_size // state.processes):
        return ALLOWED
    return Verdict(False, "the other engines to start the rest of the round", (ACTOR,))
