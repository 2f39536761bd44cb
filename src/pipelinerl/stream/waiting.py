"""Inspect a file stream without being its reader."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TypeVar

import msgspec

from pipelinerl.stream.segments import decode_item, read_records
from pipelinerl.stream.state import StreamState, disk_errors_explained, generation_path, newest_generation

T = TypeVar("T")


def waiting_items(directory: Path, item_type: type[T]) -> list[T]:
    """The items that were written and neither taken nor dropped, oldest first. Empty if the stream does not exist.

    Does not take them. Raises StreamError for a damaged item.
    """
    if not generation_path(directory, newest_generation(directory)).is_dir():
        return []
    with disk_errors_explained(directory):
        path = generation_path(directory, newest_generation(directory))
        decoder = msgspec.json.Decoder(item_type)
        with closing(StreamState(path)) as state, state.locked():
            counts = state.load()
            return [
                decode_item(decoder, payload, file, line)
                for offset, payload, file, line in read_records(path, counts.cursor)
                if offset < counts.written and offset not in state.drops
            ]
