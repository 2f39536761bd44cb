"""The pipeline simulated the slow way: every engine, every decode step, every token. What `simulate` is tested against.

Shares nothing with it but the schedules, the scenario and the order of events at the same time: the trainer first, then the
engines by number.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from dataclasses import dataclass, field
from itertools import count

from pipelinerl.experiments.planner.scenario import Scenario
from pipelinerl.interfaces import PipelineState


@dataclass
class Attempt:
    group: int
    started_version: int
    length: int
    used: bool
    dropped: bool
    wait_s: float
    versions: list[int] = field(default_factory=list)
    reward_s: float = 0.0


@dataclass
class Server:
    version: int = 0
    running: list[Attempt] = field(default_factory=list)
    waiting: deque[Attempt] = field(default_factory=deque)
    finished: deque[list[Attempt]] = field(default_factory=deque)
    open: dict[int, list[Attempt]] = field(default_factory=dict)
    own: int = 0
    idle: bool = False
    turn: int = 0


class SlowSimulation:
    """After `run`: `step_end_s`, `lags` (lag -> tokens), `dropped`, `started`, `busy_s`."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.step_end_s: list[float] = []
        self.lags: dict[int, int] = defaultdict(int)
        self.dropped: dict[str, int] = defaultdict(int)
        self.started = 0
        self.busy_s = 0.0
        self._servers = [Server() for _ in range(scenario.engines)]
        self._offers: list[tuple[float, int]] = [(0.0, 0)]
        self._stream: deque[list[Attempt]] = deque()
        self._queue: deque[Attempt] = deque()
        self._batch: list[Attempt] = []
        self._in_progress: list[Attempt] = []  # of groups that are not in the stream
        self._handed_over = 0  # rollouts in the stream or beyond
        self._newest_taken = 0
        self._latency: float | None = None
        self._most_in_progress = 0
        self._version = 0
        self._free_s = 0.0
        self._events: list[tuple[float, int, int, int]] = []
        self._groups = count()

    def run(self) -> SlowSimulation:
        for number in range(len(self._servers)):
            self._look_at(number, 0.0)
        while self._version < self.scenario.steps:
            now_s, kind, number, turn = heapq.heappop(self._events)
            if kind == 0:
                self._step_ends(now_s)
            elif kind == 1:
                self._wake_idle(now_s)
            elif turn == self._servers[number].turn:
                self._boundary(self._servers[number], number, now_s)
        return self

    def _boundary(self, server: Server, number: int, now_s: float) -> None:
        costs = self.scenario.costs
        server.idle = False
        ended = [g for g, attempts in server.open.items() if all(_done(a) and a.reward_s <= now_s for a in attempts)]
        for group in ended:
            server.finished.append(server.open.pop(group))
        while server.finished and self._write(server.finished[0], now_s):
            server.own -= len(server.finished.popleft())
            self._train_if_possible(now_s)
        pause_s = 0.0
        newest = [version for time_s, version in self._offers if time_s <= now_s][-1]
        older = sum(attempt.started_version < newest for attempt in self._in_progress)
        if newest > server.version and self.scenario.schedule.may_take_weights(older).allowed:
            server.version, pause_s = newest, costs.update_pause_s
            self._newest_taken = max(self._newest_taken, newest)
            self._wake_idle(now_s)
        denied = False
        while not denied and len(server.running) + len(server.waiting) < self.scenario.slots:
            decoded = sum(_done(a) and a.reward_s > now_s for attempts in server.open.values() for a in attempts)
            full = len(server.running) + len(server.waiting) + decoded >= 4 * self.scenario.slots
            if full and not self.scenario.schedule.in_rounds:
                break
            denied = bool(server.finished) or not self._may_start(server)
            if not denied:
                self._start(server)
        while server.waiting and len(server.running) < self.scenario.slots:
            server.running.append(server.waiting.popleft())
        if not server.running:
            rewards_s = [a.reward_s for attempts in server.open.values() for a in attempts if a.reward_s > now_s]
            server.idle = denied or not rewards_s  # who only waits for rewards does not look up before the next one
            if rewards_s:
                self._look_at(number, min(rewards_s))
            return
        decode_s = costs.decode_step_s[len(server.running)]
        self.busy_s += decode_s
        for attempt in server.running:
            attempt.versions.append(server.version)
        done = [attempt for attempt in server.running if _done(attempt)]
        server.running = [attempt for attempt in server.running if not _done(attempt)]
        end_s = now_s + pause_s + decode_s + len(done) * costs.rollout_s
        for attempt in done:
            attempt.reward_s = end_s + attempt.wait_s
        self._look_at(number, end_s)

    def _look_at(self, number: int, time_s: float) -> None:
        """The server's next boundary is then, whatever was planned before."""
        self._servers[number].turn += 1
        heapq.heappush(self._events, (time_s, 2, number, self._servers[number].turn))

    def _may_start(self, server: Server) -> bool:
        versions = [attempt.started_version for attempt in self._in_progress]
        state = PipelineState(
            engine_version=server.version,
            trainer_version=self._version,
            oldest_in_progress=min(versions, default=server.version),
            outstanding=len(versions) + self._handed_over,
            handed_over=self._handed_over,
            latency=self._latency,
            most_in_progress=self._most_in_progress,
            newest_version=max(self._newest_taken, server.version),
            own=server.own,
            processes=len(self._servers),
        )
        return self.scenario.schedule.may_start(state, self.scenario.group_size).allowed

    def _start(self, server: Server) -> None:
        group = next(self._groups)
        work = self.scenario.workload.group(group)
        K = len(work.lengths)
        rows = zip(work.lengths, work.used, work.dropped or [False] * K, work.waits_s or [0.0] * K, strict=True)
        attempts = [Attempt(group, server.version, *row) for row in rows]
        server.open[group] = attempts
        server.waiting.extend(attempts)
        server.own += len(attempts)
        self._in_progress.extend(attempts)
        self._most_in_progress = max(self._most_in_progress, len(self._in_progress))
        self.started += len(attempts)

    def _write(self, group: list[Attempt], now_s: float) -> bool:
        if len(self._stream) == self.scenario.capacity:
            if self.scenario.when_full == "block":
                return False
            dropped = len(self._stream.popleft())
            self.dropped["stream_full"] += dropped
            self._handed_over -= dropped
        self._stream.append(group)
        self._in_progress = [attempt for attempt in self._in_progress if attempt.group != group[0].group]
        self._handed_over += len(group)
        if group[0].started_version > 0:
            steps = max(0, self._newest_taken - group[0].started_version)
            self._latency = steps if self._latency is None else self._latency + 0.1 * (steps - self._latency)
        self._wake_idle(now_s)
        return True

    def _train_if_possible(self, now_s: float) -> None:
        scenario, costs = self.scenario, self.scenario.costs
        while not self._batch and self._version < scenario.steps:
            self._drop_too_old(now_s)
            allowed = scenario.schedule.may_train(self._version, len(self._queue)).allowed
            if not allowed and not self._stream:
                return
            if not allowed:
                group = self._stream.popleft()
                self._wake_idle(now_s)
                kept = [attempt for attempt in group if not attempt.dropped]
                self._queue.extend(kept)
                if len(kept) < len(group):
                    self.dropped["preprocess"] += len(group) - len(kept)
                    self._settle(len(group) - len(kept), now_s)
                self._free_s = max(self._free_s, now_s) + len(group) * costs.prepare_s
                continue
            if scenario.schedule.in_rounds:
                self._queue = deque(sorted(self._queue, key=lambda attempt: attempt.group))
            self._batch = [self._queue.popleft() for _ in range(scenario.batch_size)]
            tokens = sum(a.length + scenario.workload.prompt_tokens for a in self._batch if a.used)
            self._free_s = max(self._free_s, now_s) + costs.train_step_s + tokens * costs.train_token_s
            heapq.heappush(self._events, (self._free_s, 0, 0, 0))

    def _step_ends(self, now_s: float) -> None:
        for attempt in self._batch:
            for version in attempt.versions if attempt.used else ():
                self.lags[self._version - version] += 1
        self._settle(len(self._batch), now_s)
        self._batch = []
        self._version += 1
        self.step_end_s.append(now_s)
        if self.scenario.schedule.publishes(self._version):
            self._offers.append((now_s, self._version))
            heapq.heappush(self._events, (now_s, 1, 0, 0))
        self._drop_too_old(now_s)
        self._train_if_possible(now_s)

    def _drop_too_old(self, now_s: float) -> None:
        oldest = self.scenario.schedule.oldest_trained(self._version)
        fresh = deque(attempt for attempt in self._queue if attempt.versions[0] >= oldest)
        if len(fresh) < len(self._queue):
            self.dropped[self.scenario.schedule.too_old_reason] += len(self._queue) - len(fresh)
            self._settle(len(self._queue) - len(fresh), now_s)
        self._queue = fresh

    def _settle(self, rollouts: int, now_s: float) -> None:
        self._handed_over -= rollouts
        self._wake_idle(now_s)

    def _wake_idle(self, now_s: float) -> None:
        for number, server in enumerate(self._servers):
            if server.idle:
                server.idle = False
                self._look_at(number, now_s)


def _done(attempt: Attempt) -> bool:
    return len(attempt.versions) == attempt.length
