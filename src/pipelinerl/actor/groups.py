"""Groups while their K attempts are running."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass, field
from statistics import fmean

import msgspec

from pipelinerl.actor.client import EngineClient, RolloutClient, derive_seed
from pipelinerl.actor.rollouts import Failure, FailureLog, TimeLimits, attempt, problem_for
from pipelinerl.interfaces import Environment, Tokenizer
from pipelinerl.types import Group, Problem, Rollout, SamplingParams

RECENT_ATTEMPTS = 1024
"""How many attempts `started_length_mean` is over."""


@dataclass
class OpenGroup:
    """`problem` is the one that is recorded; `outcomes` has one entry per attempt that has ended, by attempt. `lengths` are
    their sampled tokens, in order of completion."""

    index: int
    problem: Problem
    size: int
    started_version: int
    outcomes: dict[int, Rollout | Failure] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    failed: int = 0

    @property
    def complete(self) -> bool:
        return len(self.outcomes) == self.size

    @property
    def running(self) -> int:
        return self.size - len(self.outcomes)

    @property
    def in_progress(self) -> int:
        """Attempts that are neither dropped nor handed over: running, or waiting for the others."""
        return self.size - self.failed

    def rollout_name(self, number: int) -> str:
        return f"g{self.index}.a{number}"

    def record(self) -> Group:
        """The finished group, rollouts in the order of their attempts. All may have failed: then it has none."""
        ended = sorted(self.outcomes.items())
        rollouts = tuple(
            msgspec.structs.replace(outcome, id=self.rollout_name(number), attempt=number)
            for number, outcome in ended
            if isinstance(outcome, Rollout)
        )
        dropped: Counter[str] = Counter(outcome.reason for _, outcome in ended if isinstance(outcome, Failure))
        return Group(
            index=self.index,
            problem=self.problem,
            rollouts=rollouts,
            started=self.size,
            dropped=dict(dropped),
            started_version=self.started_version,
        )


class GroupRunner:
    """Runs the attempts of groups as tasks of the event loop.

    `finished` holds complete groups, first finished first; `running` counts attempts that have not ended.
    """

    def __init__(
        self,
        environment: Environment,
        client: EngineClient,
        tokenizer: Tokenizer,
        *,
        sampling: SamplingParams,
        limits: TimeLimits,
        group_size: int,
        seed: int,
        failures: FailureLog,
    ) -> None:
        self.group_size = group_size
        self.finished: deque[Group] = deque()
        self.groups_started = 0
        self.running = 0
        self._environment = environment
        self._client = client
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._limits = limits
        self._seed = seed
        self._failures = failures
        self._open: dict[int, OpenGroup] = {}
        self._ended_early: dict[int, list[int]] = {}  # lengths of complete groups that started after an open one
        self._started_lengths: deque[int] = deque(maxlen=RECENT_ATTEMPTS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._crash: BaseException | None = None

    @property
    def in_progress(self) -> int:
        """Rollouts that are neither dropped nor taken from `finished`."""
        waiting = sum(len(group.rollouts) for group in self.finished)
        return waiting + sum(group.in_progress for group in self._open.values())

    @property
    def started_lengths(self) -> int:
        """How many attempts `started_length_mean` is over."""
        return len(self._started_lengths)

    @property
    def started_length_mean(self) -> float | None:
        """Mean sampled tokens of the latest attempts in order of start, of groups before the oldest one that is open.

        In order of completion, what is there of the latest groups is the short ones.
        """
        return fmean(self._started_lengths) if self._started_lengths else None

    def start(self, index: int, version: int) -> None:
        """Start the attempts at problem `index`; the engine has the weights of `version`. They begin at the next turn.

        A problem that the environment can't make is a group all of whose attempts failed.
        """
        self.groups_started += 1
        made = problem_for(self._environment, index, self._limits)
        recorded = Problem(id=f"problem {index}", payload={}) if isinstance(made, Failure) else made[1]
        group = OpenGroup(index, recorded, self.group_size, version)
        self._open[index] = group
        self.running += group.size
        for number in range(self.group_size):
            if isinstance(made, Failure):
                self._ended(group, number, made, 0)
                continue
            task = asyncio.create_task(self._attempt(group, number, made[0]))
            self._tasks.add(task)
            task.add_done_callback(self._forget)

    def check(self) -> None:
        """Raises TooManyFailuresError when too many attempts failed."""
        if self._crash is not None:
            raise self._crash
        self._failures.check()

    def cancel(self) -> None:
        """Cancel what is running. It stays counted as in progress."""
        for task in tuple(self._tasks):
            task.cancel()

    async def _attempt(self, group: OpenGroup, number: int, problem: Problem) -> None:
        seed = derive_seed(self._seed, group.index, number)
        name = group.rollout_name(number)
        client = RolloutClient(self._client, self._tokenizer, self._sampling, name=name, seed=seed)
        outcome = await attempt(self._environment, problem, client, self._limits)
        self._ended(group, number, outcome, sum(len(one.token_ids) for one in client.completions))

    def _ended(self, group: OpenGroup, number: int, outcome: Rollout | Failure, length: int) -> None:
        group.outcomes[number] = outcome
        group.lengths.append(length)
        self.running -= 1
        if isinstance(outcome, Failure):
            group.failed += 1
            self._failures.failure(outcome, group.rollout_name(number), length)
        else:
            self._failures.success()
        if group.complete:
            del self._open[group.index]
            self.finished.append(group.record())
            self._ended_early[group.index] = group.lengths
            oldest = min(self._open, default=None)
            for index in sorted(self._ended_early):
                if oldest is None or index < oldest:
                    self._started_lengths.extend(self._ended_early.pop(index))

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._crash = task.exception()  # not the environment's doing, so `check` raises it
