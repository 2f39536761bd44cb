"""Which rollouts that were handed over the trainer has yet to deal with. Pure bookkeeping."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from pipelinerl.types import Group


@dataclass
class _Waiting:
    index: int
    started_version: int
    rollouts: int


class HandedOver:
    """Groups in the stream or with the trainer, in stream order.

    The trainer reports counts only, how many rollouts it has trained or dropped. It takes groups in order, so these counts
    say which groups it is through with.
    """

    def __init__(self, groups: Iterable[tuple[Group, int]] = ()) -> None:
        """`groups` are in the stream already (a resumed run), each with the number of its rollouts still to be trained."""
        self._groups = deque(_Waiting(group.index, group.started_version, rollouts) for group, rollouts in groups)
        self._rollouts = sum(group.rollouts for group in self._groups)
        self._settled = 0

    @property
    def rollouts(self) -> int:
        return self._rollouts

    @property
    def oldest_version(self) -> int | None:
        """The lowest version that any of the groups was started with; None without groups."""
        return min((group.started_version for group in self._groups), default=None)

    def add(self, group: Group) -> None:
        self._groups.append(_Waiting(group.index, group.started_version, len(group.rollouts)))
        self._rollouts += len(group.rollouts)

    def remove(self, index: int) -> int:
        """The stream dropped this group. Returns how many of its rollouts were waiting, 0 if it isn't here."""
        for group in self._groups:
            if group.index == index:
                self._groups.remove(group)
                self._rollouts -= group.rollouts
                return group.rollouts
        return 0

    def settle(self, total: int) -> None:
        """The trainer has dealt with `total` rollouts by now, since the beginning. Fewer than before changes nothing."""
        newly, self._settled = total - self._settled, max(total, self._settled)
        while self._groups and (newly > 0 or self._groups[0].rollouts == 0):
            first = self._groups[0]
            part = min(first.rollouts, newly)
            first.rollouts -= part
            self._rollouts -= part
            newly -= part
            if first.rollouts == 0:
                self._groups.popleft()
