"""The two ends of a stream in Redis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Literal, TypeVar

import msgspec

from pipelinerl.errors import StreamError
from pipelinerl.interfaces import StreamStats
from pipelinerl.stream.redis import scripts
from pipelinerl.stream.redis.connection import PATIENCE_S, ConnectionLostError
from pipelinerl.stream.redis.stream import RedisStream, decode_item, decoded

T = TypeVar("T")

MAX_ITEM_BYTES = 256 << 20
"""Redis takes twice as much."""
ITEMS_AT_ONCE = 32
"""How many items one script hands out: meanwhile Redis does nothing else."""


class RedisStreamWriter(Generic[T]):
    """A writing end. There may be several, which need no lock between them."""

    def __init__(
        self,
        url: str,
        stream: str,
        item_type: type[T],
        *,
        capacity: int,
        when_full: Literal["block", "drop_oldest"] = "block",
        on_drop: Callable[[T], None] | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`capacity` is in items; `on_drop` is told every item that `drop_oldest` drops. For `url` see `RedisConnection`.

        A lost connection is tried again for `patience_s`, by every method; then StreamError. Raises StreamError, or
        ConfigError for a wrong URL or password.
        """
        if capacity < 1:
            raise ValueError(f"a stream's capacity is at least 1: {capacity}")
        self._capacity = capacity
        self._when_full = when_full
        self._on_drop = on_drop
        self._encoder = msgspec.json.Encoder()
        self._decoder = msgspec.json.Decoder(item_type)
        self._appended = 0
        self._underway: bytes | None = None  # what was sent, and not answered
        self._was_full = False
        self._stream = RedisStream(url, stream, "writer", patience_s)
        try:
            self._stream.call(scripts.ENROL, self._stream.word)
        except BaseException:
            self._stream.close()
            raise

    def try_write(self, item: T, encoded: bytes | None = None) -> bool:
        """Append one item. False when the stream is full and set to block (nothing was written then).

        `encoded`: the item as JSON, if the caller has it already. Raises StreamError. If that is for a lost connection,
        the item may be there or not: writing the same one again is safe, any other is refused.
        """
        if self._was_full and self.stats().pending >= self._capacity:  # a look costs less than to send the item
            return False
        payload = self._encoder.encode(item) if encoded is None else encoded
        if len(payload) > MAX_ITEM_BYTES:
            raise StreamError(f"{self._stream.place}: an item of {len(payload)} bytes; {MAX_ITEM_BYTES} is the most")
        if self._underway not in (None, payload):
            raise StreamError(
                f"{self._stream.place}: the connection was lost with an item underway: write that one again first"
            )
        self._underway = payload
        tell = int(self._on_drop is not None)
        options = (self._appended + 1, self._capacity, self._when_full, tell)
        try:
            answer, *results = self._stream.call(scripts.APPEND, self._stream.word, *options, payload)
        except StreamError as error:
            if not isinstance(error, ConnectionLostError):
                self._underway = None
            raise
        self._underway = None
        self._was_full = answer == "full"
        if self._was_full:
            return False
        self._appended += 1
        if self._on_drop is not None:
            for dropped in results[0]:
                self._on_drop(decode_item(self._decoder, dropped, self._stream.place))
        return True

    def stats(self) -> StreamStats:
        return self._stream.stats()

    def close(self) -> None:
        """Closing twice is fine."""
        self._stream.close(scripts.DISMISS)


class RedisStreamReader(Generic[T]):
    """The reading end. One process at a time; a later one starts again at the committed offset."""

    def __init__(self, url: str, stream: str, item_type: type[T], *, patience_s: float = PATIENCE_S) -> None:
        """For `url` see `RedisConnection`, for `patience_s` the writer. There need not be a writer yet.

        Raises StreamError, also if the stream has a reader (which Redis knows by its connection), or ConfigError for a
        wrong URL or password.
        """
        self._decoder = msgspec.json.Decoder(item_type)
        self._found: list[tuple[int, T]] = []  # of a read that failed halfway
        self._stream = RedisStream(url, stream, "reader", patience_s)
        try:
            before = self._stream.refuse_second_reader()
            _, self._taken, self._committed = self._stream.call(scripts.CLAIM, before, self._stream.word)
        except BaseException:
            self._stream.close()
            raise

    def read(self, limit: int) -> Sequence[tuple[int, T]]:
        """Take up to `limit` items that are there now, oldest first, each with its offset. Never waits for any.

        Raises StreamError, naming the offset, for an item of another type.
        """
        while len(self._found) < limit:
            count = min(limit - len(self._found), ITEMS_AT_ONCE)
            _, entries = self._stream.call(scripts.TAKE, self._stream.word, self._taken, self._committed, count)
            self._taken += len(entries)
            self._found += decoded(self._decoder, entries, self._stream.place)
            if len(entries) < count:
                break
        found, self._found = self._found[:limit], self._found[limit:]
        return found

    def commit(self, offset: int) -> None:
        """Everything before `offset` is dealt with for good: a reader opened later starts there, memory is freed.

        As durable on return as the Redis is. Committing less than before changes nothing. Raises ValueError if an item
        before `offset` was neither taken nor dropped.
        """
        known = (self._stream.word, self._taken, self._committed)
        answer, *results = self._stream.call(scripts.COMMIT, *known, offset)
        if answer == "early":
            raise ValueError(f"can't commit up to offset {offset}: items from {results[0]} on were not taken yet")
        self._committed = max(self._committed, offset)

    def stats(self) -> StreamStats:
        return self._stream.stats()

    def close(self) -> None:
        """Let another process read. What was taken and not committed will be read again."""
        self._stream.close(scripts.RELEASE)
