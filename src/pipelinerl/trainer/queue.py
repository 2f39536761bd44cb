"""The trainer's queue: reads prepared groups from the stream and returns batches of B rollouts.

Every rollout that was read is queued, taken for a step, trained, or dropped for a counted reason. Trained and dropped
rollouts are retired; `position` records which ones, so that a resumed run does not train on or count them again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from pipelinerl.checkpoint import QueueCounts, QueuePosition
from pipelinerl.errors import StreamError
from pipelinerl.interfaces import StreamReader
from pipelinerl.types import DroppedRollout, Prepared, TrainingSample

RECENT_ROLLOUTS = 1024
"""Number of rollouts that `sampled_length_mean` is computed over."""


@dataclass
class _OpenGroup:
    """A group with rollouts that are neither trained nor dropped."""

    offset: int
    open_ids: set[str]
    retired_ids: set[str]


class SampleQueue:
    """First in, first out. With `by_index`, the queued rollout with the lowest group index comes first.

    Groups are read only by `pull`. What the trainer does not need yet stays in the stream, whose capacity then blocks the
    actor or replaces old groups by newer ones.
    """

    def __init__(
        self,
        reader: StreamReader[Prepared],
        *,
        by_index: bool = False,
        position: QueuePosition | None = None,
        counts: QueueCounts | None = None,
    ) -> None:
        """`position` and `counts` come from the checkpoint of a resume."""
        position, counts = position or QueuePosition(), counts or QueueCounts()
        self._reader = reader
        self._by_index = by_index
        self._samples: deque[TrainingSample] = deque()
        self._oldest_version = 0
        self._too_old_reason = ""
        self._groups: dict[int, _OpenGroup] = {}
        self._next_offset = position.offset
        self._retired_before = set(position.settled_ids)  # of groups that were not read again yet
        self._ledger = position.ledger.copy()
        self.trained = counts.trained
        self._dropped = Counter(counts.dropped)
        self._dropped_tokens = Counter(counts.dropped_tokens)
        self._latest_dropped: list[DroppedRollout] = []
        self._recent_lengths: deque[int] = deque(maxlen=RECENT_ROLLOUTS)

    @property
    def queued(self) -> int:
        """Rollouts ready for `take`."""
        return len(self._samples)

    @property
    def outstanding(self) -> int:
        """Rollouts that were read and not retired: in the queue or in the current step."""
        return sum(len(group.open_ids) for group in self._groups.values())

    @property
    def dropped(self) -> dict[str, int]:
        """Rollouts dropped so far, by reason."""
        return dict(self._dropped)

    @property
    def counts(self) -> QueueCounts:
        return QueueCounts(trained=self.trained, dropped=self.dropped, dropped_tokens=dict(self._dropped_tokens))

    @property
    def sampled_length_mean(self) -> float | None:
        """Mean sampled tokens of the latest rollouts that were read, dropped ones included."""
        return fmean(self._recent_lengths) if self._recent_lengths else None

    def pull(self) -> bool:
        """Read one more group if the stream has one now. Returns False if not.

        A stream may deliver a group a second time; it is skipped. Raises StreamError for another group of the same index,
        and errors of the reader.
        """
        items = self._reader.read(1)
        for offset, group in items:
            self._next_offset = offset + 1
            if (first := self._groups.get(group.index)) is not None:
                if first.open_ids | first.retired_ids != set(group.ids):
                    raise StreamError(f"two groups of index {group.index} came, the second at offset {offset} of the stream")
            elif group.index not in self._ledger:  # otherwise it was retired, before a resume or a repeated delivery
                self._admit(offset, group)
        return bool(items)

    def take(self, count: int) -> list[TrainingSample]:
        """Take the first `count` samples; as many must be queued. The caller retires them by `mark_trained` or `drop`."""
        if self._by_index:
            self._samples = deque(sorted(self._samples, key=lambda sample: sample.group_index))
        return [self._samples.popleft() for _ in range(count)]

    def require(self, version: int, reason: str) -> None:
        """From now on drop samples with a token older than `version`, both queued samples and later ones.

        The next call replaces this requirement.
        """
        self._oldest_version, self._too_old_reason = version, reason
        self._drop_too_old(self._samples)

    def mark_trained(self, samples: Sequence[TrainingSample]) -> None:
        """Retire samples that an optimizer step was taken on."""
        self.trained += len(samples)
        for sample in samples:
            self._retire(sample)

    def drop(self, samples: Sequence[TrainingSample], reason: str) -> None:
        """Retire samples that won't be trained on."""
        for sample in samples:
            self._count_dropped(DroppedRollout.of(sample, reason))
            self._retire(sample)

    def take_dropped(self) -> list[DroppedRollout]:
        """The rollouts dropped since the last call."""
        dropped, self._latest_dropped = self._latest_dropped, []
        return dropped

    def position(self) -> QueuePosition:
        """The position for a checkpoint. With it, a resumed run trains on and counts no rollout twice, and loses none."""
        return QueuePosition(
            offset=min((group.offset for group in self._groups.values()), default=self._next_offset),
            settled_ids=tuple(sorted(self._retired_before.union(*(group.retired_ids for group in self._groups.values())))),
            ledger=self._ledger.copy(),
        )

    def commit(self, position: QueuePosition) -> None:
        """Allow the stream to discard what is before `position`. Call it once a checkpoint with this position is written."""
        self._reader.commit(position.offset)

    def _admit(self, offset: int, group: Prepared) -> None:
        if len(set(group.ids)) != len(group.ids):
            raise StreamError(f"group {group.index} has two rollouts of the same id")
        retired_before = self._retired_before.intersection(group.ids)
        self._retired_before -= retired_before
        if not retired_before:  # otherwise its drops were counted when it was first read
            for rollout in group.dropped:
                self._count_dropped(rollout)
        self._recent_lengths.extend(sample.sampled_count for sample in group.samples)
        self._recent_lengths.extend(rollout.tokens for rollout in group.dropped)
        samples = [sample for sample in group.samples if sample.id not in retired_before]
        self._samples.extend(samples)
        if samples:
            open_ids = {sample.id for sample in samples}
            self._groups[group.index] = _OpenGroup(offset, open_ids, set(group.ids) - open_ids)
            self._drop_too_old(samples)
        else:
            self._ledger.add(group.index)

    def _drop_too_old(self, among: Iterable[TrainingSample]) -> None:
        too_old = {sample.id for sample in among if min(sample.versions) < self._oldest_version}
        if too_old:
            dropped = [sample for sample in self._samples if sample.id in too_old]
            self._samples = deque(sample for sample in self._samples if sample.id not in too_old)
            self.drop(dropped, self._too_old_reason)

    def _retire(self, sample: TrainingSample) -> None:
        group = self._groups[sample.group_index]
        group.open_ids.remove(sample.id)
        group.retired_ids.add(sample.id)
        if not group.open_ids:
            del self._groups[sample.group_index]
            self._ledger.add(sample.group_index)

    def _count_dropped(self, rollout: DroppedRollout) -> None:
        self._dropped[rollout.reason] += 1
        self._dropped_tokens[rollout.reason] += rollout.tokens
        self._latest_dropped.append(rollout)
