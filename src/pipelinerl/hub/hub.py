"""The hub: the methods of a session's state, and what of it outlives the launcher."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from pipelinerl.errors import RunDirectoryError
from pipelinerl.files import JsonLines, remedy
from pipelinerl.hub.admission import AdmissionState
from pipelinerl.hub.wire import HandOver, decoded, handed_over
from pipelinerl.interfaces import Admitted, Board, Verdict
from pipelinerl.types import TRAINER, Group, trainer_progress

if TYPE_CHECKING:
    from pipelinerl.hub.stream import GroupStream

T = TypeVar("T")

ROLLOUTS_FILE = "rollouts/rollouts.jsonl"
MOST_OPEN = 16
"""Files of records that are open at once: a run has one for each evaluation."""
RECORDS = re.compile(r"(rollouts/)?[A-Za-z0-9][\w-]*\.jsonl", re.ASCII)


class Hub:
    """The state of a session, which decides by its status board. One thread at a time calls it."""

    def __init__(
        self,
        admission: AdmissionState,
        rollouts: GroupStream,
        root: Path,
        board: Board,
        *,
        capacity: int | None = None,
        drops: bool = False,
    ) -> None:
        """`root` is the run directory. While `capacity` groups wait, no group is started or, with `drops`, each new one
        replaces the oldest.
        """
        self.admission, self.rollouts, self.board = admission, rollouts, board
        self.prepared: deque[tuple[int, bytes]] = deque()  # the trainer has not taken them yet
        self.passed_on = 0  # the offset of the next group to be prepared
        self._root, self._capacity, self._drops = root, capacity, drops
        self._files: dict[str, JsonLines] = {}

    @property
    def waiting(self) -> int:
        """Rollouts that neither the trainer nor a preprocessor of its own has read, and prepared ones."""
        return self.rollouts.rollouts + sum(self.rollouts.left[offset] for offset, _ in self.prepared)

    # ---- groups

    def claim(self, process: int, engine_version: int, rollouts: int) -> Admitted:
        """A group of `rollouts` attempts for generation process number `process`, if it may start one now."""
        self.admission.trainer = trainer_progress(self.board.read(TRAINER)) or self.admission.trainer
        waiting = self.rollouts.waiting
        if self._capacity is not None and not self._drops and waiting >= self._capacity:
            return Admitted(None, Verdict(False, f"the trainer: the stream is full ({waiting} groups)", (TRAINER,)))
        return self.admission.claim(process, engine_version, rollouts)

    def hand_over(self, group: HandOver) -> int:
        """Record a group, and write it to the stream.

        The record comes first, so that every group that is trained on has one, even if this process is killed in between.
        Returns how many rollouts the stream dropped for it. Raises RunDirectoryError and StreamError.
        """
        place = self.append(ROLLOUTS_FILE, group.line)
        replaced = 0
        while self._capacity is not None and self._drops and self.rollouts.waiting >= self._capacity:
            replaced += self.rollouts.drop()
        self.rollouts.append(group.line, group.rollouts, place)
        process = self.admission.hand_over(
            group.index, rollouts=group.rollouts, skipped=group.skipped, dropped=group.dropped
        )
        self.admission.replace(process, replaced)
        return replaced

    def pass_on(self, offset: int, item: bytes) -> None:
        """The group at `offset` is prepared: the trainer reads `item`. After a resume it is prepared again."""
        self.prepared.append((offset, item))
        self.passed_on = offset + 1

    # ---- records

    def append(self, path: str, line: bytes, *, empty: bool = False) -> int:
        """Append a line to a file of records. Returns where it begins. `path` is relative to the run directory.

        Raises RunDirectoryError.
        """
        if not RECORDS.fullmatch(path):
            raise RunDirectoryError(f"{path!r} is no file of records")
        try:
            file = self._files.pop(path, None)
            if empty and file is not None:
                file.close()
                file = None
            self._files[path] = file = file or JsonLines(self._root / path, empty=empty)  # the most recently used one
            if len(self._files) > MOST_OPEN:
                self._files.pop(next(iter(self._files))).close()
            place = file.size
            if line:
                file.write(msgspec.Raw(line))
        except OSError as error:
            where = error.filename or self._root / path
            raise RunDirectoryError(
                f"can't write to {where}: {error.strerror or error}; {remedy(error)} and resume"
            ) from error
        return place

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self.rollouts.close()


class DirectReader(Generic[T]):
    """The groups for a trainer in this process, as `prepare` makes them. See `interfaces.StreamReader`."""

    def __init__(self, hub: Hub, prepare: Callable[[Group], T]) -> None:
        self._hub, self._prepare, self._decoder = hub, prepare, msgspec.json.Decoder(Group)
        self.commit = hub.rollouts.commit

    def read(self, limit: int) -> Sequence[tuple[int, T]]:
        """Raises StreamError for an item that is not a group, and what `prepare` raises."""
        items = self._hub.rollouts.read(limit)
        return [(offset, self._prepare(decoded(self._decoder, offset, json))) for offset, json in items]


class Direct:
    """The hub for the generation process that has it: the embedded launcher's. See `interfaces.Admission`."""

    def __init__(self, hub: Hub, process: int = 0) -> None:
        self.in_rounds = hub.admission.schedule.in_rounds
        self._hub, self._process, self._dropped = hub, process, 0
        self._encoder = msgspec.json.Encoder()

    @property
    def opened(self) -> bool:
        return self._hub.admission.opened

    def open(self) -> None:
        self._hub.admission.opened = True

    def claim(self, engine_version: int, rollouts: int, *, room: int = 0) -> Admitted:
        del room  # nothing is asked for ahead
        return self._hub.claim(self._process, engine_version, rollouts)

    def hand_over(self, group: Group) -> None:
        self._dropped += self._hub.hand_over(handed_over(group, self._encoder))

    def settle(self) -> None:
        """Nothing is on its way."""

    def take_dropped(self) -> int:
        dropped, self._dropped = self._dropped, 0
        return dropped

    def may_take(self, version: int) -> bool:
        return self._hub.admission.may_take(version).allowed


class DirectMessages:
    """The messages about weights in a process that has both ends: what is sent is handled at once. See `Messages`."""

    def __init__(self) -> None:
        self._handlers: dict[type[Any], Any] = {}

    def handle(self, kind: type[Any], handler: Any) -> None:
        self._handlers[kind] = handler

    def send(self, message: Any) -> None:
        self._handlers[type(message)](message)

    def take(self) -> None:
        """Everything was handled."""
