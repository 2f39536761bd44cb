"""What is done to a stream in Redis before a run begins and after it has ended."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, TypeVar

import msgspec

from pipelinerl.errors import StreamError
from pipelinerl.stream.redis import scripts
from pipelinerl.stream.redis.ends import ITEMS_AT_ONCE
from pipelinerl.stream.redis.stream import RedisStream, decoded

T = TypeVar("T")


def waiting_in_redis(url: str, stream: str, item_type: type[T]) -> list[T]:
    """The items that were written and neither taken nor dropped, oldest first. Takes nothing; raises StreamError."""
    decoder = msgspec.json.Decoder(item_type)
    with closing(RedisStream(url, stream, "looker")) as held:
        return [item for _, item in decoded(decoder, list(_entries(held, 0, "waiting")), held.place)]


def rewind_stream(url: str, stream: str, item_type: type[T], from_offset: int, keep: Callable[[T], bool]) -> list[T]:
    """Take the stream back to a checkpoint, before either end is opened. Returns the items that stay, oldest first.

    Items before `from_offset`, dropped items, and those for which `keep` is false are removed. The others are numbered
    anew, without gaps: the first has offset `from_offset`, which becomes the committed offset. Counts go on as if all
    before it had been taken or dropped. Of a stream that is not there, nothing stays. Ends that are open all the same can't
    use it any more. Raises StreamError if it has a reader, or was committed beyond `from_offset`.
    """
    decoder = msgspec.json.Decoder(item_type)
    with closing(RedisStream(url, stream, "rewinder")) as held:
        held.refuse_second_reader()
        _, written, committed, settled = held.call(scripts.POSITION)
        if from_offset < committed:
            raise StreamError(
                f"{held.place}: the checkpoint needs the items from {from_offset} on, those before {committed} are deleted; "
                "resume from a newer checkpoint"
            )
        entries = list(_entries(held, 0))
        found = decoded(decoder, entries, held.place)
        before = sum(offset < from_offset for offset, _ in found)
        drops_before = min(from_offset, written) - settled - before
        kept = [(entry[0], item) for entry, (offset, item) in zip(entries, found, strict=True) if offset >= from_offset]
        kept = [(entry_id, item) for entry_id, item in kept if keep(item)]
        held.call(scripts.REWIND, secrets.token_hex(8), from_offset, drops_before, *(entry_id for entry_id, _ in kept))
    return [item for _, item in kept]


def remove_stream(url: str, stream: str) -> None:
    """Delete the stream and all that is in it. Raises StreamError."""
    with closing(RedisStream(url, stream, "remover")) as held:
        held.call(scripts.REMOVE)


def _entries(held: RedisStream, offset: int, which: str = "all") -> Iterator[Any]:
    """The entries from `offset` on, some at a time."""
    while True:
        _, entries = held.call(scripts.PEEK, offset, which, ITEMS_AT_ONCE)
        yield from entries
        if len(entries) < ITEMS_AT_ONCE:
            return
        offset = int(entries[-1][0].partition(b"-")[0]) + 1
