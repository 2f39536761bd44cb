"""Which rollouts were started and are neither trained nor dropped yet, over all generation processes. Pure bookkeeping."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Outstanding(msgspec.Struct):
    """The record that generation processes share; small, whatever the size of the run.

    next_index       groups from here on were never started in this session
    opened           groups may be started (the evaluation before training is over)
    newest_version   the newest weights that any engine has taken
    settled          rollouts that the trainer is known to have trained or dropped, since the beginning of the run
    in_progress      rollouts of groups that were started and not handed over, by the version they were started with
    handed_over      rollouts in the stream or with the trainer, in stream order, as runs of (version, rollouts)

    The trainer reports counts only, how many rollouts it has trained or dropped. It takes groups in order, so these counts
    say how much of `handed_over` it is through with. All that is asked of what is left is its number and its lowest
    version, so a run keeps the lowest version of itself *and all behind it*: versions ascend, and there are few runs.
    """

    next_index: int = 0
    opened: bool = False
    newest_version: int = 0
    settled: int = 0
    in_progress: dict[int, int] = {}
    handed_over: list[tuple[int, int]] = []

    @classmethod
    def at_start(cls, kept: Iterable[tuple[int, int]] = (), settled: int = 0) -> Outstanding:
        """`kept` is in the stream already (a resumed run): version and rollouts still to be trained of each group."""
        state = cls(settled=settled)
        for version, rollouts in kept:
            state._append(version, rollouts)
        return state

    @property
    def rollouts(self) -> int:
        return sum(self.in_progress.values()) + sum(rollouts for _, rollouts in self.handed_over)

    @property
    def oldest_version(self) -> int | None:
        """The lowest version that any of them was started with; None without any."""
        versions = [*self.in_progress, *(version for version, _ in self.handed_over[:1])]
        return min(versions, default=None)

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
        self._append(version, rollouts)

    def drop(self, rollouts: int) -> None:
        """The stream replaced these by fresher ones.

        They are taken off the newest: which ones they were is not known any more, and so the lowest version is never
        overestimated.
        """
        while rollouts > 0 and self.handed_over:
            version, last = self.handed_over.pop()
            if last > rollouts:
                self.handed_over.append((version, last - rollouts))
            rollouts -= last

    def settle(self, total: int) -> None:
        """The trainer has dealt with `total` rollouts by now, since the beginning. Fewer than before changes nothing."""
        newly, self.settled = total - self.settled, max(total, self.settled)
        while newly > 0 and self.handed_over:
            version, first = self.handed_over[0]
            if first > newly:
                self.handed_over[0] = (version, first - newly)
            else:
                del self.handed_over[0]
            newly -= first

    def _append(self, version: int, rollouts: int) -> None:
        if rollouts == 0:
            return
        while self.handed_over and self.handed_over[-1][0] >= version:
            rollouts += self.handed_over.pop()[1]
        self.handed_over.append((version, rollouts))
