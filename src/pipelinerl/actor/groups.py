"""Runs the K attempts of each open group, and counts what becomes of them."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

import msgspec

from pipelinerl.actor.client import RolloutClient, derive_seed
from pipelinerl.actor.failures import Failure, FailureLog
from pipelinerl.actor.rollouts import RolloutContext, attempt, problem_for, score
from pipelinerl.config.schema import ActorConfig
from pipelinerl.interfaces import ScoresGroups
from pipelinerl.types import STREAM_DROP, ActorProgress, Group, Problem, Rollout

if TYPE_CHECKING:
    from pipelinerl.actor.difficulty import OnlineFilter

RECENT_ATTEMPTS = 1024
"""Number of attempts that `started_length_mean` is computed over."""


@dataclass
class OpenGroup:
    """A group with running attempts.

    `problem` is as recorded. `outcomes` maps the number of each ended attempt to its outcome. `lengths` are the
    sampled tokens of ended attempts, in order of completion.
    """

    index: int
    problem: Problem
    size: int
    started_version: int
    outcomes: dict[int, Rollout | Failure] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    failed: int = 0

    def rollout_name(self, number: int) -> str:
        return f"g{self.index}.a{number}"


class GroupRunner:
    """Runs the attempts of groups as tasks of the event loop. `skips` decides which problems are skipped.

    `open` has the groups by index, `finished` the complete ones in order of completion. `running` counts attempts that have
    not ended, and groups whose rollouts are being scored together. `dropped_by_stream` counts rollouts of groups that were
    handed over, and that the stream has replaced by newer ones.
    """

    def __init__(
        self,
        context: RolloutContext,
        config: ActorConfig,
        skips: OnlineFilter | None = None,
        failures: FailureLog | None = None,
    ) -> None:
        self.context = context
        self.config = config
        self.finished: deque[Group] = deque()
        self.groups_started = 0
        self.groups_skipped = 0
        self.running = 0
        self._filter = skips
        self._failures = failures or FailureLog(config.max_failure_fraction, config.failure_window)
        self.open: dict[int, OpenGroup] = {}
        self._waiting_lengths: dict[int, list[int]] = {}  # lengths of complete groups started after an open one
        self._started_lengths: deque[int] = deque(maxlen=RECENT_ATTEMPTS)
        self._handed_over = 0
        self._cut = 0
        self.dropped_by_stream = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._crash: BaseException | None = None

    def progress(self) -> ActorProgress:
        """Counts since the actor was made, without those of evaluations.

        `started_length_mean` is over the latest attempts in order of start, among groups started before the oldest open
        group. A mean over completed attempts would be biased: of the latest groups, short attempts complete first.
        """
        waiting = sum(len(group.rollouts) for group in self.finished)
        dropped = dict(self._failures.counts)
        if self.dropped_by_stream:
            dropped[STREAM_DROP] = self.dropped_by_stream
        return ActorProgress(
            groups_started=self.groups_started,
            groups_skipped=self.groups_skipped,
            rollouts_started=self.groups_started * self.config.group_size,
            rollouts_handed_over=self._handed_over - self.dropped_by_stream,
            rollouts_cut=self._cut,
            rollouts_dropped=dropped,
            dropped_tokens=dict(self._failures.tokens),
            rollouts_in_progress=waiting + sum(group.size - group.failed for group in self.open.values()),
            started_length_mean=fmean(self._started_lengths) if self._started_lengths else None,
            started_lengths=len(self._started_lengths),
        )

    def start(self, index: int, version: int) -> bool:
        """Start the attempts at problem `index`; `version` is the engine's. They begin in the next event-loop pass.

        If the environment can't create the problem, all attempts count as failed. Returns False if the problem is skipped.
        """
        made = problem_for(self.context.environment, index)
        recorded = Problem(id=f"problem {index}", payload={}) if isinstance(made, Failure) else made[1]
        if self._filter is not None and (skip := self._filter.decide(index, recorded.id)) is not None:
            self.groups_skipped += 1
            group = Group(index=index, problem=recorded, rollouts=(), started=0, started_version=version, skipped=skip)
            self.finished.append(group)
            return False
        self.groups_started += 1
        self.open[index] = opened = OpenGroup(index, recorded, self.config.group_size, version)
        self.running += opened.size
        for number in range(opened.size):
            if isinstance(made, Failure):
                self._ended(opened, number, made, 0)
                continue
            seed = derive_seed(self.context.seed, index, number)
            client = self.context.rollout_client(opened.rollout_name(number), seed, version)
            self._run(self._attempt(opened, number, made[0], client))
        return True

    def check(self) -> None:
        """Raises TooManyFailuresError when too many attempts failed, and errors that are not the environment's."""
        for completion in self.context.engine.take_cancelled():
            rollout, _, _turn = completion.request_id.rpartition(".")
            self._failures.cancelled(rollout, len(completion.token_ids))
        if self._crash is not None:
            raise self._crash
        self._failures.check()

    def handed_over(self) -> None:
        """Remove the oldest finished group, which is in the stream now."""
        group = self.finished.popleft()
        if self._filter is not None:
            self._filter.observe(group.index, group.problem.id, [rollout.reward for rollout in group.rollouts])
        self._handed_over += len(group.rollouts)
        self._cut += sum(rollout.turns[-1].completion.finish_reason == "length" for rollout in group.rollouts)

    def cancel(self) -> None:
        """Cancel running attempts. They stay counted as in progress."""
        for task in tuple(self._tasks):
            task.cancel()

    async def _attempt(self, group: OpenGroup, number: int, problem: Problem, client: RolloutClient) -> None:
        outcome = await attempt(self.context.environment, problem, client, self.context.rollout_timeout_s)
        if isinstance(outcome, Failure):
            outcome = outcome._replace(turns=tuple(one for one in client.produced().values() if one.completion.token_ids))
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
        if len(group.outcomes) < group.size:
            return
        if isinstance(self.context.environment, ScoresGroups) and group.failed < group.size:
            self.running += 1
            self._run(self._score(group, self.context.environment))
        else:
            self._close(group)

    async def _score(self, group: OpenGroup, environment: ScoresGroups) -> None:
        """Give the rollouts of a group their final rewards. If that fails, they count as failed attempts."""
        ended = {number: one for number, one in sorted(group.outcomes.items()) if isinstance(one, Rollout)}
        scored = await score(environment, group.problem, list(ended.values()), self.context.rollout_timeout_s)
        self.running -= 1
        for place, (number, rollout) in enumerate(ended.items()):
            if isinstance(scored, Failure):
                group.failed += 1
                group.outcomes[number] = failure = scored._replace(turns=rollout.turns)
                length = sum(len(turn.completion.token_ids) for turn in rollout.turns)
                self._failures.failure(failure, group.rollout_name(number), length)
            else:
                group.outcomes[number] = scored[place]
        self._close(group)

    def _close(self, group: OpenGroup) -> None:
        """The group is finished, with rollouts in order of attempt; without rollouts if all attempts failed."""
        del self.open[group.index]
        ended = sorted(group.outcomes.items())
        rollouts = tuple(
            msgspec.structs.replace(outcome, id=group.rollout_name(number), attempt=number)
            for number, outcome in ended
            if isinstance(outcome, Rollout)
        )
        finished = Group(
            index=group.index,
            problem=group.problem,
            rollouts=rollouts,
            started=group.size,
            dropped=dict(Counter(outcome.reason for _, outcome in ended if isinstance(outcome, Failure))),
            started_version=group.started_version,
        )
        self.finished.append(finished)
        self._waiting_lengths[group.index] = group.lengths
        oldest = min(self.open, default=None)
        for index in sorted(self._waiting_lengths):
            if oldest is None or index < oldest:
                self._started_lengths.extend(self._waiting_lengths.pop(index))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._crash = task.exception()  # an error of ours, not of the environment: `check` raises it
