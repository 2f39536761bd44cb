"""The trainer's queue: prepared groups come from the stream and leave in batches of B rollouts.

It is where conservation is kept: every rollout that came in is queued, in hand (taken, not yet settled), trained or
dropped for a counted reason, and `position` says exactly what a resumed run must not do again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Protocol

import msgspec

from pipelinerl.errors import StreamError
from pipelinerl.interfaces import StreamReader
from pipelinerl.ledger import GroupLedger, LedgerRecord
from pipelinerl.types import TrainingSample

RECENT_ROLLOUTS = 1024
"""How many of the latest rollouts `sampled_length_mean` is over."""


class PreparedGroup(Protocol):
    """What became of the rollouts of group `index`, `ids`: samples to train on; lengths and ids of those left out."""

    @property
    def index(self) -> int: ...

    @property
    def ids(self) -> Sequence[str]: ...

    @property
    def samples(self) -> Sequence[TrainingSample]: ...

    @property
    def dropped_by_length(self) -> Mapping[str, Sequence[int]]: ...

    @property
    def dropped_ids(self) -> Mapping[str, Sequence[str]]: ...


class QueuePosition(msgspec.Struct, frozen=True, kw_only=True):
    """How far the trainer has come in the stream.

    Everything before `offset` is dealt with. `settled_ids` are the rollouts of later, partly dealt with groups that were
    trained or dropped, and `ledger` the indices of all groups that are wholly dealt with.
    """

    offset: int = 0
    settled_ids: tuple[str, ...] = ()
    ledger: LedgerRecord = LedgerRecord()


class QueueCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Rollouts that left the queue over the whole run."""

    trained: int = 0
    dropped: dict[str, int] = {}


class _OpenGroup:
    """A group with rollouts that are neither trained nor dropped."""

    def __init__(self, offset: int, ids: Iterable[str]) -> None:
        self.offset = offset
        self.open_ids = set(ids)
        self.settled_ids: set[str] = set()


class SampleQueue:
    """First in, first out; with `by_index`, of those at hand the lowest group index first.

    Reads a group only when asked to (`pull`): what the trainer does not need yet stays in the stream, whose bound then
    holds the actor back or replaces old groups by fresh ones.
    """

    def __init__(
        self,
        reader: StreamReader[PreparedGroup],
        *,
        by_index: bool = False,
        position: QueuePosition | None = None,
        counts: QueueCounts | None = None,
    ) -> None:
        """`position` and `counts` are those of the checkpoint a run resumes from."""
        position, counts = position or QueuePosition(), counts or QueueCounts()
        self._reader = reader
        self._by_index = by_index
        self._samples: deque[TrainingSample] = deque()
        self._oldest_version = 0
        self._too_old_reason = ""
        self._groups: dict[int, _OpenGroup] = {}
        self._next_offset = position.offset
        self._settled_before = set(position.settled_ids)  # of groups that did not come again yet
        self._ledger = GroupLedger.from_record(position.ledger)
        self._trained = counts.trained
        self._dropped = dict(counts.dropped)
        self._dropped_lengths: dict[str, list[int]] = {}
        self._dropped_ids: dict[str, list[str]] = {}
        self._recent_lengths: deque[int] = deque(maxlen=RECENT_ROLLOUTS)

    @property
    def queued(self) -> int:
        """Rollouts at hand, to be taken."""
        return len(self._samples)

    @property
    def outstanding(self) -> int:
        """Rollouts that came in and are neither trained nor dropped: those at hand, and those in a step right now."""
        return sum(len(group.open_ids) for group in self._groups.values())

    @property
    def trained(self) -> int:
        return self._trained

    @property
    def dropped(self) -> dict[str, int]:
        """Rollouts dropped so far, by reason."""
        return dict(self._dropped)

    @property
    def counts(self) -> QueueCounts:
        return QueueCounts(trained=self._trained, dropped=self.dropped)

    @property
    def sampled_length_mean(self) -> float | None:
        """Mean sampled tokens of the latest rollouts that came in, whatever became of them."""
        return fmean(self._recent_lengths) if self._recent_lengths else None

    def pull(self) -> bool:
        """Read one more group if the stream has one now. False if not.

        Raises StreamError for a group that is already open, and what the reader raises.
        """
        items = self._reader.read(1)
        for offset, group in items:
            self._next_offset = offset + 1
            if group.index in self._groups:
                raise StreamError(f"group {group.index} came twice, the second time at offset {offset} of the stream")
            if group.index not in self._ledger:  # else it is of the time before a resume, and dealt with
                self._admit(offset, group)
        return bool(items)

    def take(self, count: int) -> list[TrainingSample]:
        """The first `count` samples, of at least as many. The caller settles them by `mark_trained` or `drop`."""
        if self._by_index:
            self._samples = deque(sorted(self._samples, key=lambda sample: sample.group_index))
        return [self._samples.popleft() for _ in range(count)]

    def require(self, version: int, reason: str) -> None:
        """From now on drop samples with a token of an earlier version: those at hand, and those that come later.

        The next call replaces this one.
        """
        self._oldest_version, self._too_old_reason = version, reason
        self._drop_too_old(self._samples)

    def mark_trained(self, samples: Sequence[TrainingSample]) -> None:
        """These went through an optimizer step."""
        self._trained += len(samples)
        for sample in samples:
            self._settle(sample)

    def drop(self, samples: Sequence[TrainingSample], reason: str) -> None:
        """These won't be trained on."""
        for sample in samples:
            self._count_dropped(reason, [sample.sampled_count], [sample.id])
            self._settle(sample)

    def dropped_lengths(self) -> dict[str, list[int]]:
        """Sampled tokens of each rollout dropped since the last call, by reason."""
        lengths, self._dropped_lengths = self._dropped_lengths, {}
        return lengths

    def dropped_ids(self) -> dict[str, list[str]]:
        """Likewise, which rollouts these were."""
        ids, self._dropped_ids = self._dropped_ids, {}
        return ids

    def position(self) -> QueuePosition:
        """What a checkpoint needs so that nothing is trained on twice or counted twice, and nothing is lost."""
        return QueuePosition(
            offset=min((group.offset for group in self._groups.values()), default=self._next_offset),
            settled_ids=tuple(sorted(self._settled_before.union(*(group.settled_ids for group in self._groups.values())))),
            ledger=self._ledger.to_record(),
        )

    def commit(self, position: QueuePosition) -> None:
        """A checkpoint with this position is safely written: the stream may forget what is before it."""
        self._reader.commit(position.offset)

    def _admit(self, offset: int, group: PreparedGroup) -> None:
        if len(set(group.ids)) != len(group.ids):
            raise StreamError(f"group {group.index} has two rollouts of the same id")
        opened = _OpenGroup(offset, (sample.id for sample in group.samples))
        opened.settled_ids = set(group.ids) - opened.open_ids
        settled_before = self._settled_before.intersection(group.ids)
        self._settled_before -= settled_before
        if not settled_before:  # else its drops were counted when it came first
            for reason, lengths in group.dropped_by_length.items():
                self._count_dropped(reason, lengths, group.dropped_ids.get(reason, ()))
        self._recent_lengths.extend(sample.sampled_count for sample in group.samples)
        self._recent_lengths.extend(length for lengths in group.dropped_by_length.values() for length in lengths)
        opened.open_ids -= settled_before
        opened.settled_ids |= settled_before
        self._samples.extend(sample for sample in group.samples if sample.id not in settled_before)
        if opened.open_ids:
            self._groups[group.index] = opened
            self._drop_too_old(group.samples)
        else:
            self._ledger.add(group.index)

    def _drop_too_old(self, among: Iterable[TrainingSample]) -> None:
        too_old = {sample.id for sample in among if min(sample.versions) < self._oldest_version}
        if too_old:
            dropped = [sample for sample in self._samples if sample.id in too_old]
            self._samples = deque(sample for sample in self._samples if sample.id not in too_old)
            self.drop(dropped, self._too_old_reason)

    def _settle(self, sample: TrainingSample) -> None:
        group = self._groups[sample.group_index]
        group.open_ids.remove(sample.id)
        group.settled_ids.add(sample.id)
        if not group.open_ids:
            del self._groups[sample.group_index]
            self._ledger.add(sample.group_index)

    def _count_dropped(self, reason: str, lengths: Sequence[int], ids: Sequence[str]) -> None:
        self._dropped[reason] = self._dropped.get(reason, 0) + len(lengths)
        self._dropped_lengths.setdefault(reason, []).extend(lengths)
        self._dropped_ids.setdefault(reason, []).extend(ids)
