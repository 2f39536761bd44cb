"""Rewind a file stream to a checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import msgspec

from pipelinerl.files import AppendFile, sync_directory
from pipelinerl.stream.segments import decode_item, encode_line, read_records, segment_path
from pipelinerl.stream.state import (
    Counts,
    Role,
    StreamState,
    disk_errors_explained,
    ensure_directory,
    generation_path,
    newest_generation,
)

T = TypeVar("T")


def rewind(directory: Path, item_type: type[T], from_offset: int, keep: Callable[[T], bool]) -> list[T]:
    """Rewind the stream to a checkpoint, before either end is opened. Returns the items that stay, oldest first.

    Items before `from_offset`, dropped items, and those for which `keep` is false are removed. The others are renumbered
    without gaps: the first has offset `from_offset`, which becomes the committed offset. The counts continue as if every
    item before it had been taken or dropped. Atomic: if the process is killed, the stream is either unchanged or rewound.
    Raises StreamError if an end is open or a record is damaged (a partial last record is skipped).
    """
    with disk_errors_explained(directory):
        roles = [Role(ensure_directory(directory), "writer")]
        try:
            roles.append(Role(directory, "reader"))
            return _rewind(directory, item_type, from_offset, keep)
        finally:
            for role in roles:
                role.release()


def _rewind(directory: Path, item_type: type[T], from_offset: int, keep: Callable[[T], bool]) -> list[T]:
    number = newest_generation(directory)
    old = ensure_directory(generation_path(directory, number))
    with closing(StreamState(old)) as state, state.locked():
        earlier_drops = state.drops.before(from_offset)
        decoder = msgspec.json.Decoder(item_type)
        kept: list[tuple[bytes, T]] = []
        for offset, payload, path, line in read_records(old, from_offset):
            if offset not in state.drops and keep(item := decode_item(decoder, payload, path, line)):
                kept.append((payload, item))

    new = directory / f"{number + 1:06d}.partial"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    segment = AppendFile(segment_path(new, from_offset))
    for payload, _ in kept:
        segment.append(encode_line(payload))
    segment.sync()
    segment.close()
    with closing(StreamState(new)) as state:
        for offset in earlier_drops:
            state.drops.append(offset)
        taken = from_offset - len(earlier_drops)
        state.store(
            Counts(
                written=from_offset + len(kept),
                taken=taken,
                cursor=from_offset,
                committed=from_offset,
                segment=from_offset,
                size=segment.size,
            )
        )
        state.sync()
    sync_directory(new)
    new.rename(generation_path(directory, number + 1))
    sync_directory(directory)
    for left_over in range(number + 1):  # `old`, and what an interrupted rewind left behind
        shutil.rmtree(generation_path(directory, left_over), ignore_errors=True)
    return [item for _, item in kept]
