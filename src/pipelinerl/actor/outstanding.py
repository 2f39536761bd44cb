"""Which rollouts were started and are neither trained nor dropped yet, over all generation processes. Pure bookkeeping."""

from __future__ import annotations

import msgspec


class Outstanding(msgspec.Struct):
    """The record that generation processes share; small, whatever the size of the run.

    next_index       groups from here on were never started in this session
    opened           groups may be started (the evaluation before training is over)
    newest_version   the newest weights that any engine has taken
    settled          rollouts that the trainer is known to have trained or dropped, since the beginning of the run
    in_progress      rollouts of groups that were started and not handed over, by the version they were started with
    handed_over      rollouts in the stream or with the trainer
    """

    next_index: int = 0
    opened: bool = False
    newest_version: int = 0
    settled: int = 0
    in_progress: dict[int, int] = {}
    handed_over: int = 0

    @property
    def rollouts(self) -> int:
        return sum(self.in_progress.values()) + self.handed_over

    @property
    def oldest_in_progress(self) -> int | None:
        """The lowest version that a rollout in progress was started with; None without any."""
        return min(self.in_progress, default=None)

    def in_progress_before(self, version: int) -> int:
        """Rollouts of groups that are not handed over and were started with older weights than those of `version`."""
        return sum(rollouts for started, rollouts in self.in_progress.items() if started < version)

    def start(self, index: int, version: int, rollouts: int) -> None:
        """The group `index` is started, by an engine with the weights of `version`."""
        self.next_index = index + 1
        self.in_progress[version] = self.in_progress.get(version, 0) + rollouts

    def hand_over(self, version: int, *, started: int, rollouts: int) -> None:
        """A group of `started` attempts is in the stream, with `rollouts` rollouts; the others are dropped."""
        left = self.in_progress[version] - started
        if left:
            self.in_progress[version] = left
        else:
            del self.in_progress[version]
        self.handed_over += rollouts

    def drop(self, rollouts: int) -> None:
        """The stream replaced these by fresher ones."""
        self.handed_over = max(0, self.handed_over - rollouts)

    def settle(self, total: int) -> None:
        """The trainer has dealt with `total` rollouts by now, since the beginning. Fewer than before changes nothing."""
        newly, self.settled = max(0, total - self.settled), max(total, self.settled)
        self.handed_over = max(0, self.handed_over - newly)
