"""Counts rollouts that were started and are neither trained nor dropped yet, over all generation processes."""

from __future__ import annotations

import msgspec

LATENCY_WEIGHT = 0.1
"""Weight of the latest group in the running mean `Outstanding.latency`."""


class Outstanding(msgspec.Struct):
    """Counts of a session, over all generation processes. Their size does not grow with the run.

    next_index       lowest group index that was not started in this session
    returned         indices of groups whose process died, to be started again first
    opened           groups may be started (the evaluation before training is over)
    newest_version   newest weights that any engine has applied
    settled          rollouts that the trainer has trained or dropped since the beginning of the run, as far as known here
    in_progress      rollouts of groups in progress, by the version at their start
    handed_over      rollouts in the stream or with the trainer
    most_in_progress highest number of rollouts in progress so far in this session
    first_version    version of the weights that the session's first group was started with
    latency          optimizer steps from the start of a group to its hand-over, a running mean over the groups that were
                     started after the session's first weight update; None before the first of them
    """

    next_index: int = 0
    returned: list[int] = []
    opened: bool = False
    newest_version: int = 0
    settled: int = 0
    in_progress: dict[int, int] = {}
    handed_over: int = 0
    most_in_progress: int = 0
    first_version: int | None = None
    latency: float | None = None

    @property
    def rollouts(self) -> int:
        return sum(self.in_progress.values()) + self.handed_over

    @property
    def oldest_in_progress(self) -> int | None:
        """The lowest version that a rollout in progress was started with; None if there is none."""
        return min(self.in_progress, default=None)

    def in_progress_before(self, version: int) -> int:
        """Rollouts in progress that were started with weights older than `version`."""
        return sum(rollouts for started, rollouts in self.in_progress.items() if started < version)

    def start(self, index: int, version: int, rollouts: int) -> None:
        """Count group `index` as started, by an engine with the weights of `version`."""
        self.next_index = max(self.next_index, index + 1)
        self.in_progress[version] = self.in_progress.get(version, 0) + rollouts
        self.most_in_progress = max(self.most_in_progress, sum(self.in_progress.values()))
        if self.first_version is None:
            self.first_version = version

    def restart(self, version: int, later: int, rollouts: int) -> None:
        """Rollouts that were counted as started with `version` start with a `later` one."""
        self._remove(version, rollouts)
        self.in_progress[later] = self.in_progress.get(later, 0) + rollouts

    def hand_over(self, version: int, *, started: int, rollouts: int) -> None:
        """Count a group of `started` attempts as finished with `rollouts` rollouts. Its other attempts were dropped."""
        self._remove(version, started)
        self.handed_over += rollouts
        if version == self.first_version or not rollouts:
            return  # the trainer had nothing to train on while this group was generated, or there is nothing in it
        steps = max(0, self.newest_version - version)
        self.latency = steps if self.latency is None else self.latency + LATENCY_WEIGHT * (steps - self.latency)

    def drop(self, rollouts: int) -> None:
        """Count `rollouts` as dropped: the stream replaced them by newer ones."""
        self.handed_over = max(0, self.handed_over - rollouts)

    def settle(self, total: int) -> None:
        """The trainer has trained or dropped `total` rollouts since the beginning of the run. A lower total is ignored."""
        newly, self.settled = max(0, total - self.settled), max(total, self.settled)
        self.handed_over = max(0, self.handed_over - newly)

    def _remove(self, version: int, rollouts: int) -> None:
        left = self.in_progress[version] - rollouts
        if left:
            self.in_progress[version] = left
        else:
            del self.in_progress[version]
