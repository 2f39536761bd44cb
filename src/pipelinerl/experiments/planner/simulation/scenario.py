"""What a simulation is given: machines and their speeds, the work, and the schedule under which they do it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from pipelinerl.interfaces import Schedule


@dataclass(frozen=True, kw_only=True)
class Costs:
    """How long everything takes, in seconds (or flashes, or any one unit of time).

    decode_step_s   of one decode step with h sequences in progress, at index h: entries 0 .. H
    prompt_s        added to a step for each prompt that is prefilled in it (a group's attempts share one)
    rollout_s       the actor's own time for each rollout that ended, after the step in which it did
    update_pause_s  of an engine that takes new weights
    train_step_s    of an optimizer step, whatever is in it; publishing the weights included
    train_token_s   of the trainer, for each token that goes through the model, prompts included
    prepare_s       of the trainer, for each rollout that it takes from the stream
    """

    decode_step_s: tuple[float, ...]
    prompt_s: float = 0.0
    rollout_s: float = 0.0
    update_pause_s: float = 0.0
    train_step_s: float = 0.0
    train_token_s: float = 0.0
    prepare_s: float = 0.0


class GroupWork(NamedTuple):
    """One group's attempts: sampled tokens of each (at least 1), and which of them have a gradient.

    `dropped` are left out when the trainer prepares them, and count for nothing; empty: none are. `waits_s` is the time from
    an attempt's last token to its reward, for a tool or a judge; it takes no slot. Empty: no attempt waits.
    """

    lengths: tuple[int, ...]
    used: tuple[bool, ...]
    dropped: tuple[bool, ...] = ()
    waits_s: tuple[float, ...] = ()


class Workload(Protocol):
    """The work: a pure function of a group's index, whoever starts it and whenever."""

    @property
    def prompt_tokens(self) -> float:
        """Mean length of a prompt."""
        ...

    def group(self, index: int) -> GroupWork: ...


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A run to be simulated, in the paper's letters: I engines of H slots, K attempts a problem, B rollouts a step.

    `capacity` groups fit into the stream. `max_open_rollouts` is the actor's. The run is over after `steps` optimizer steps.
    """

    schedule: Schedule
    engines: int
    slots: int
    group_size: int
    batch_size: int
    steps: int
    costs: Costs
    workload: Workload
    capacity: int
    when_full: Literal["block", "drop_oldest"] = "block"
    max_open_rollouts: int | None = None

    def __post_init__(self) -> None:
        for name in ("engines", "slots", "group_size", "batch_size", "steps", "capacity"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1, not {getattr(self, name)}")
        if len(self.costs.decode_step_s) <= self.slots:
            raise ValueError(
                f"decode_step_s has {len(self.costs.decode_step_s)} entries; {self.slots} slots need {self.slots + 1}"
            )
        if min(self.costs.decode_step_s[1:]) <= 0:
            raise ValueError("every decode step takes time")
