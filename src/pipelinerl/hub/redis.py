"""A stream in a Redis server, with one key: the item of offset n has id 0-(n+1) and one field, `item`. Needs the extra
`redis`.

Ids only grow, also over restarts, so an append that is repeated because its answer was lost is not done twice.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pipelinerl.errors import ConfigError, StreamError
from pipelinerl.extras import require
from pipelinerl.hub.stream import GroupStream

require("redis", "a stream in Redis")  # before the import, which fails without
from redis import Redis, exceptions  # noqa: E402
from redis.backoff import NoBackoff  # noqa: E402
from redis.retry import Retry  # noqa: E402

Result = TypeVar("Result")

PATIENCE_S = 20.0
"""How long a lost connection is retried."""
OPENING_PATIENCE_S = 5.0
"""The same for the first connection, where a wrong address is the likelier cause."""
REPLY_TIMEOUT_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0


class RedisStream(GroupStream):
    """See `GroupStream`. All methods raise StreamError, which says what to do."""

    def __init__(self, url: str, key: str, patience_s: float = PATIENCE_S) -> None:
        """`url` is redis://[[user]:[password]@]host[:port][/db], rediss://... or unix://PATH[?db=0].

        Raises ConfigError for a wrong URL or password.
        """
        super().__init__()
        self._url, self._key, self._patience_s = without_password(url), key, min(patience_s, OPENING_PATIENCE_S)
        self._client: Any = _connect(url, min(REPLY_TIMEOUT_S, patience_s))
        try:
            offsets, self._written = self._patiently(self._look)
        except BaseException:
            self._client.close()
            raise
        self.waiting, self._cursor = len(offsets), offsets[0] if offsets else self._written
        self._patience_s = patience_s

    def _append(self, item: bytes, place: int | None) -> int:  # noqa: ARG002 - it is in no file
        offset = self._written

        def add() -> None:
            try:
                self._client.xadd(self._key, {"item": item}, id=_id(offset))
            except exceptions.ResponseError as error:
                smaller = "equal or smaller" in str(error)
                if not smaller or self._client.xinfo_stream(self._key)["last-generated-id"] != _id(offset).encode():
                    raise  # otherwise it was added before, and the answer was lost

        self._patiently(add)
        self._written += 1
        return offset

    def commit(self, offset: int) -> None:
        super().commit(offset)
        self._patiently(lambda: self._client.xtrim(self._key, minid=_id(offset), approximate=False))

    def close(self) -> None:
        self._client.close()

    def _look(self) -> tuple[list[int], int]:
        """The offsets of all items, and the offset of the next one to be written."""
        if not self._client.exists(self._key):
            return [], 0
        last = self._client.xinfo_stream(self._key)["last-generated-id"]
        return [_offset(entry) for entry, _ in self._client.xrange(self._key)], _offset(last) + 1

    def _entries(self, start: int, limit: int | None = None) -> list[tuple[int, bytes]]:
        found = self._patiently(lambda: self._client.xrange(self._key, min=_id(start), count=limit))
        return [(_offset(entry), fields[b"item"]) for entry, fields in found]

    def _remove(self, offsets: Sequence[int]) -> None:
        if offsets:
            self._patiently(lambda: self._client.xdel(self._key, *map(_id, offsets)))

    def _patiently(self, operation: Callable[[], Result]) -> Result:
        """The operation's result. Repeats it while there is no connection; raises StreamError when the patience is over."""
        begin_s, pause_s = time.monotonic(), _FIRST_PAUSE_S
        while True:
            try:
                return operation()
            except (exceptions.AuthenticationError, exceptions.AuthorizationError) as error:
                raise ConfigError(f"stream.url {self._url}: Redis does not let us in: {error}") from error
            except (exceptions.ConnectionError, exceptions.TimeoutError) as error:
                tried_s = time.monotonic() - begin_s
                if tried_s + pause_s > self._patience_s:
                    why = f"no connection, tried for {tried_s:.1f} s ({error})"
                    raise StreamError(f"{self._url}: {why}; start Redis, or correct stream.url") from error
            except exceptions.RedisError as error:
                raise StreamError(f"{self._url}: Redis refuses: {error}") from error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def without_password(url: str) -> str:
    """The URL as it may be shown."""
    return re.sub(r"(?<=password=)[^&]*", "***", re.sub(r"(?<=//).*@", "***@", url))


def _connect(url: str, timeout_s: float) -> Redis:
    """A client that tries each command once. It connects when it is used. Raises ConfigError."""
    timeouts = {"socket_connect_timeout": timeout_s, "socket_timeout": timeout_s}
    try:
        client = Redis.from_url(url, client_name="pipelinerl", protocol=2, retry=Retry(NoBackoff(), 0), **timeouts)
        client.connection_pool.make_connection()  # does not connect, but checks the options in the URL
    except (ValueError, TypeError) as error:
        shown = without_password(url)
        raise ConfigError(f"stream.url {shown}: {error}. It is like redis://HOST:6379/0 or unix:///PATH") from None
    return client


def _id(offset: int) -> str:
    return f"0-{offset + 1}"


def _offset(entry: bytes) -> int:
    return int(entry.rpartition(b"-")[2]) - 1
