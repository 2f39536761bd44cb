"""A stream in Redis, for stages on several machines. Needs the extra `redis`.

    {NAME}:items     a Redis stream: the item of offset n has id 0-(n+1) and one field, `item`, its JSON
    {NAME}:counts    a hash
        epoch        random, new when the stream is created or rewound
        written      the offset of the next item
        dropped      number of dropped items; they are deleted
        settled      number of items that were taken and committed; they are deleted, too
        reader       the token of the open reader, or empty
        writer-...   the number of this writer's last append

The consumer group `reader` delivers each item once: to the reader, or to a writer that drops it. Its pending entries are
acknowledged and deleted when they are committed or dropped; items that it has not delivered yet wait.

Every call first looks at the stream, then changes it in one transaction. If the connection is lost, both are repeated: the
writer's number, the pending entries and `settled` show what was executed, so nothing is written or taken twice. (A Redis
that stands still for longer than `REPLY_TIMEOUT_S` may still execute an append after its repetition: then it is there twice,
and the trainer skips the second.) Writers at the same moment may exceed the capacity, by one item each.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import msgspec

from pipelinerl.errors import INVALID_DATA, ConfigError, StreamError
from pipelinerl.interfaces import StreamReader, StreamStats, StreamWriter
from pipelinerl.redis_connection import PATIENCE_S, RedisConnection, exceptions
from pipelinerl.stream import checked_capacity

T = TypeVar("T")
Entries = Sequence[tuple[int, bytes]]
"""Offsets of items, each with the item's JSON."""

_OLDEST_VERSION = 7
_GROUP = b"reader"
_LOST = (
    "it is not in Redis any more as this process left it: a later session of the run has begun, Redis was restarted without "
    "its data or with older data, or a key was deleted, evicted or written to by others. Resume the run from its checkpoint"
)


class _State(NamedTuple):
    """A stream at one moment. `appended` is the number of this process's last append, 0 if there is none."""

    stats: StreamStats
    settled: int
    delivered: int
    """The offset after the last item that was taken or dropped since a reader was opened; 0 if there is none."""
    reader: str
    appended: int


class RedisStream(RedisConnection, Generic[T]):
    """A process's access to a stream of JSON items. The stream is created if it does not exist."""

    def __init__(self, url: str, stream: str, item_type: type[T], role: str, patience_s: float = PATIENCE_S) -> None:
        """`url` is redis://[[user]:[password]@]host[:port][/db], rediss://... or unix://PATH[?db=0].

        Raises ConfigError for a wrong URL or password; StreamError if there is no Redis (7 or later) or the name is taken.
        """
        super().__init__(url, role, patience_s)
        self.items, self.counts = f"{{{stream}}}:items", f"{{{stream}}}:counts"
        self.place = f"{self.url}, stream {stream}"
        self._epochs: set[bytes] = set()
        self._decoder = msgspec.json.Decoder(item_type)
        self.opened(self._open)

    def look(self) -> _State:
        """The stream now. Raises StreamError if it is not the one that this process opened, or is damaged."""
        pipe = self.client.pipeline()
        pipe.hmget(self.counts, "epoch", "reader", "written", "dropped", "settled", self.token)
        pipe.xlen(self.items)
        pipe.xinfo_groups(self.items)
        try:
            (epoch, reader, *numbers), length, groups = pipe.execute()
        except exceptions.ResponseError as error:
            if "no such key" not in str(error):
                raise
            raise StreamError(f"{self.place}: {_LOST}") from error
        group = next((group for group in groups if group["name"] == _GROUP), None)
        written, dropped, settled, appended = (int(number or 0) for number in numbers)
        if epoch not in self._epochs or group is None or length != written - dropped - settled:
            raise StreamError(f"{self.place}: {_LOST}")
        delivered = int(group["last-delivered-id"].partition(b"-")[2])
        stats = StreamStats(written, settled + group["pending"], dropped)
        return _State(stats, settled, delivered, reader.decode(), appended)

    def entries(self, start: int, limit: int | None = None) -> Entries:
        """The first items from offset `start` on. Takes none."""
        return _entries([(self.items, self.client.xrange(self.items, min=_id(start), count=limit))])

    def deliver(self, consumer: str, after: str, limit: int | None = None) -> Entries:
        """Take up to `limit` items (`after` is ">"), or read the consumer's pending entries with higher ids again."""
        return _entries(self.client.xreadgroup(_GROUP, consumer, {self.items: after}, limit))

    def decoded(self, entries: Entries) -> list[tuple[int, T]]:
        """The items, each with its offset. Raises StreamError, naming the offset, for JSON that is not an `item_type`."""
        items: list[tuple[int, T]] = []
        for offset, payload in entries:
            try:
                items.append((offset, self._decoder.decode(payload)))
            except INVALID_DATA as error:
                place = f"{self.place}, item {offset}"
                raise StreamError(f"{place}: not an item of this stream ({error}); use another stream name") from error
        return items

    def begin(self, pipe: Any, settled: int = 0, dropped: int = 0, payloads: Sequence[bytes] = ()) -> None:
        """Queue commands that replace the stream: `payloads` wait, and follow on settled and dropped items."""
        first = settled + dropped
        self._epochs.add(epoch := secrets.token_hex(8).encode())
        counts = {"epoch": epoch, "reader": "", "settled": settled, "dropped": dropped, "written": first + len(payloads)}
        pipe.hset(self.counts, mapping=counts)
        pipe.delete(self.items)
        pipe.xgroup_create(self.items, _GROUP, id="0", mkstream=True)
        pipe.execute_command("XSETID", self.items, f"0-{first}")
        for payload in payloads:
            pipe.xadd(self.items, {"item": payload}, id="0-*")

    def remove(self, pipe: Any, offsets: Sequence[int]) -> None:
        """Queue commands that remove items that were taken."""
        if offsets:
            ids = [_id(offset) for offset in offsets]
            pipe.xack(self.items, _GROUP, *ids)
            pipe.xdel(self.items, *ids)

    def refuse_second_reader(self) -> None:
        """Raises StreamError if there is a connected reader and the Redis user may see it."""

        def connected() -> set[str]:
            with suppress(exceptions.NoPermissionError):
                return {client["name"] for client in self.client.client_list("normal")} - {""}
            return set()

        reader = self.patiently(self.look).reader
        if reader in self.patiently(connected):
            raise StreamError(
                f"{self.place} is open already, by another reader ({reader}: its host and process): end that process, or "
                "wait until Redis notices that its host is gone"
            )

    def stats(self) -> StreamStats:
        return self.patiently(self.look).stats

    def _open(self) -> None:
        with suppress(exceptions.NoPermissionError):
            version = str(self.client.info("server").get("redis_version", ""))
            if version and int(version.partition(".")[0]) < _OLDEST_VERSION:
                raise StreamError(f"{self.url}: this is Redis {version}; streams need {_OLDEST_VERSION} or later")
        with self.client.pipeline() as pipe:
            pipe.watch(self.counts)
            exists = pipe.exists(self.counts, self.items)  # first, as another process may create the stream now
            if epoch := pipe.hget(self.counts, "epoch"):
                self._epochs.add(epoch)
                return
            if exists:
                raise StreamError(f"{self.place}: its keys hold something else; delete them, or use another stream name")
            pipe.multi()
            self.begin(pipe)
            pipe.execute()


class RedisStreamWriter(RedisStream[T]):
    """A writing end. There may be several, which need no lock between them."""

    def __init__(
        self,
        url: str,
        stream: str,
        item_type: type[T],
        *,
        capacity: int | None = None,
        when_full: Literal["block", "drop_oldest"] = "block",
        on_drop: Callable[[T], None] | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`capacity` is in items; None: no limit. `on_drop` is called with every item that `drop_oldest` drops. For `url`
        see `RedisStream`.

        Every method retries a lost connection for `patience_s`, then raises StreamError.
        """
        self._capacity = checked_capacity(capacity)
        self._when_full = when_full
        self._on_drop = on_drop
        self._attempted = self._confirmed = 0  # numbers of appends
        self.companion: Callable[[Any, Sequence[T]], Callable[[], None] | None] | None = None
        """Called with the pipe of each append, which it may let watch keys, and the items that are dropped for the new one.
        Queues commands for the same transaction.
        """
        super().__init__(url, stream, item_type, "writer", patience_s)
        self.consumer = self.token
        """Takes the items to drop. A later writer of the same name drops those that this one could not."""

    def try_write(self, item: T, encoded: bytes | None = None) -> bool:
        """Append one item. Returns False, and writes nothing, if the stream is full and configured to block.

        `encoded`: the item as JSON, if the caller has already encoded it. After a StreamError for a lost connection, the
        item may be in the stream or not.
        """
        payload = msgspec.json.encode(item) if encoded is None else encoded
        self._attempted += 1
        dropped: Entries = ()

        def append() -> bool:
            nonlocal dropped
            state = self.look()
            if state.appended == self._attempted:
                return True  # executed before its answer was lost
            if state.appended < self._confirmed:
                raise StreamError(f"{self.place}: {_LOST}")
            excess = state.stats.pending - self._capacity + 1
            if self._when_full == "drop_oldest":
                if excess > 0:
                    self.deliver(self.consumer, ">", excess)
                dropped = self.deliver(self.consumer, "0")  # with those of a call that failed
            elif excess > 0:
                return False
            with self.client.pipeline() as pipe:
                items = [item for _, item in self.decoded(dropped)] if self.companion else []
                joined = self.companion(pipe, items) if self.companion else None
                if joined is not None:
                    pipe.multi()
                    joined()
                self.remove(pipe, [offset for offset, _ in dropped])
                pipe.xadd(self.items, {"item": payload}, id="0-*")
                pipe.hincrby(self.counts, "written", 1)
                pipe.hincrby(self.counts, "dropped", len(dropped))
                pipe.hset(self.counts, self.token, self._attempted)
                pipe.execute()
            return True

        if not self.patiently(append):
            return False
        self._confirmed = self._attempted
        if self._on_drop is not None:
            for _, oldest in self.decoded(dropped):
                self._on_drop(oldest)
        return True


class RedisStreamReader(RedisStream[T]):
    """The reading end. One process at a time; a new one starts at the committed offset."""

    def __init__(self, url: str, stream: str, item_type: type[T], *, patience_s: float = PATIENCE_S) -> None:
        """For `url` see `RedisStream`, for `patience_s` the writer. A writer is not required yet.

        Raises StreamError if the stream already has a reader.
        """
        self._next = 0  # the offset after the last item that was returned
        self._taken: list[int] = []  # offsets that were returned and not committed
        self._settled = 0
        super().__init__(url, stream, item_type, "reader", patience_s)
        self.refuse_second_reader()
        self.patiently(self._claim)

    def read(self, limit: int) -> Sequence[tuple[int, T]]:
        """Take up to `limit` of the available items, oldest first, each with its offset. Never waits.

        Raises StreamError, naming the offset, for an item of another type. What a failed call took, the next one returns.
        """

        def take() -> Entries:
            state = self._look()
            again = f"0-{self._next}"
            if limit < 1:
                return ()
            if state.stats.taken - state.settled > len(self._taken) and (missed := self.deliver("reader", again, limit)):
                return missed  # their answer was lost
            found = self.deliver("reader", ">", limit) if state.stats.pending else ()
            if found and found[0][0] > self._next:  # the items between were dropped, or their answer was lost just now
                return self.deliver("reader", again, limit)
            return found

        items = self.decoded(self.patiently(take))
        for offset, _ in items:
            self._taken.append(offset)
            self._next = offset + 1
        return items

    def commit(self, offset: int) -> None:
        """Mark everything before `offset` as processed: a later reader starts there, and memory is freed.

        As durable on return as the Redis is. A lower offset than before has no effect. Raises ValueError if an item before
        `offset` was neither taken nor dropped.
        """
        done = [taken for taken in self._taken if taken < offset]

        def settle() -> None:
            state = self._look()
            following = self.entries(self._next, 1) if offset > self._next else ()
            reached = following[0][0] if following else state.stats.written
            if offset > reached:
                raise ValueError(f"can't commit up to offset {offset}: items from {reached} on were not taken yet")
            with self.client.pipeline() as pipe:
                self.remove(pipe, done)
                pipe.hset(self.counts, "settled", self._settled + len(done))
                pipe.execute()

        self.patiently(settle)
        self._settled += len(done)
        del self._taken[: len(done)]

    def close(self) -> None:
        """Let another process read. Items that were taken but not committed will be read again. May be called twice."""
        self._patience_s = 0.0
        with suppress(StreamError, ConfigError):  # without a connection, Redis knows that this reader is gone
            self.patiently(lambda: self._look() and self.client.hset(self.counts, "reader", ""))
        super().close()

    def _look(self) -> _State:
        """The stream now. Raises StreamError if this is not its reader, or Redis has forgotten what it confirmed."""
        state = self.look()
        if state.reader != self.token:
            raise StreamError(f"{self.place}: another process reads it now; end one of the two")
        if state.delivered < self._next or state.settled < self._settled:
            raise StreamError(f"{self.place}: {_LOST}")
        return state

    def _claim(self) -> None:
        self._settled = self.look().settled
        with self.client.pipeline() as pipe:
            pipe.xgroup_destroy(self.items, _GROUP)  # with its pending entries: the new group delivers them again
            pipe.xgroup_create(self.items, _GROUP, id="0")
            pipe.hset(self.counts, "reader", self.token)
            pipe.execute()


class RedisStore:
    """Streams in Redis, under a prefix that is unique to the run."""

    def __init__(self, url: str, prefix: str = "", patience_s: float = PATIENCE_S) -> None:
        """`patience_s`: how long a lost connection is retried."""
        self._url, self._prefix, self._patience_s = url, prefix, patience_s

    def writer(
        self,
        name: str,
        item_type: type[T],
        *,
        capacity: int | None,
        when_full: Literal["block", "drop_oldest"],
        on_drop: Callable[[T], None] | None,
    ) -> StreamWriter[T]:
        return RedisStreamWriter(
            self._url,
            self._prefix + name,
            item_type,
            capacity=capacity,
            when_full=when_full,
            on_drop=on_drop,
            patience_s=self._patience_s,
        )

    def reader(self, name: str, item_type: type[T]) -> StreamReader[T]:
        return RedisStreamReader(self._url, self._prefix + name, item_type, patience_s=self._patience_s)

    def waiting(self, name: str, item_type: type[T]) -> list[T]:
        """The items that were written and neither taken nor dropped, oldest first. Takes none. Raises StreamError."""
        with closing(RedisStream(self._url, self._prefix + name, item_type, "observer")) as opened:
            waiting = opened.patiently(lambda: opened.entries(opened.look().delivered))
            return [item for _, item in opened.decoded(waiting)]

    def rewind(self, name: str, item_type: type[T], from_offset: int, keep: Callable[[T], bool]) -> list[T]:
        """Rewind the stream to a checkpoint, before either end is opened, as `FileStore.rewind` does.

        Ends that are open all the same can't use it any more. Raises StreamError if it has a reader.
        """
        with closing(RedisStream(self._url, self._prefix + name, item_type, "rewinder")) as opened:
            opened.refuse_second_reader()

            def replace() -> list[T]:
                state, entries = opened.look(), opened.entries(0)
                later = [entry for entry in entries if entry[0] >= from_offset]
                items = zip(later, opened.decoded(later), strict=True)
                kept = [(payload, item) for (_, payload), (_, item) in items if keep(item)]
                taken = state.settled + len(entries) - len(later)
                dropped = max(min(from_offset, state.stats.written) - taken, 0)
                with opened.client.pipeline() as pipe:
                    opened.begin(pipe, from_offset - dropped, dropped, [payload for payload, _ in kept])
                    pipe.execute()
                return [item for _, item in kept]

            return opened.patiently(replace)


def _id(offset: int) -> str:
    return f"0-{offset + 1}"


def _entries(delivery: Sequence[Any]) -> Entries:
    """The entries of all streams in an answer: [[stream, [(id, fields), ...]], ...]."""
    return [(int(entry.partition(b"-")[2]) - 1, fields[b"item"]) for _, entries in delivery for entry, fields in entries]
