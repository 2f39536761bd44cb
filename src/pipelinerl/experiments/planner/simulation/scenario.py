"""The inputs of a simulation: machines and their costs, the workload, and the schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from pipelinerl.interfaces import Schedule


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Durations in seconds (or flashes, or any other unit of time, used throughout).

    decode_step_s   a decode step with h sequences in progress, at index h: entries 0 .. H
    prompt_s        added to a step for each prompt prefilled in it (a group's attempts share one prompt)
    rollout_s       the actor's time for each rollout that ended, after the step in which it ended
    update_pause_s  an engine's pause to take new weights
    train_step_s    fixed part of an optimizer step, publishing the weights included
    train_token_s   the trainer's time for each token that goes through the model, prompts included
    prepare_s       the trainer's time for each rollout that it takes from the stream
    """

    decode_step_s: tuple[float, ...]
    prompt_s: float = 0.0
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

    The stream holds up to `capacity` groups. `max_open_rollouts` is the actor's setting. The run ends after `steps`
    optimizer steps.
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
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if len(self.costs.decode_step_s) <= self.slots:
            raise ValueError(
                f"decode_step_s has {len(self.costs.decode_step_s)} entries; {self.slots} slots need {self.slots + 1}"
            )
        if min(self.costs.decode_step_s[1:]) <= 0:
            raise ValueError("decode step times must be above 0")
