"""A connection to Redis that mends itself, within a bound, and says in one line what is wrong if it can't."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

from pipelinerl.errors import ConfigError, MissingDependencyError, PipelineRLError, StreamError

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.exceptions import (
        AuthenticationError,
        AuthorizationError,
        NoPermissionError,
        OutOfMemoryError,
        ReadOnlyError,
        RedisError,
        ResponseError,
    )
    from redis.retry import Retry
except ImportError as error:
    raise MissingDependencyError(
        "a stream in Redis needs the package redis, which is not installed: pip install 'pipelinerl[redis]'"
    ) from error

PATIENCE_S = 15.0
"""How long a lost connection is tried again. Below the time that other actors wait for the lock held meanwhile."""
OPENING_PATIENCE_S = 5.0
"""The same for the first connection, where a wrong address is the likelier cause."""
REPLY_TIMEOUT_S = 5.0
"""Redis answers in milliseconds. The last attempt may end this much later than the patience."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0
_READ_BYTES = 256 * 1024
"""At once from the socket: items are large."""
_OLDEST_VERSION = (6, 2)


class RedisConnection:
    """Runs scripts. What it is asked to do may be done twice when a connection is lost: that is for the scripts to see."""

    def __init__(self, url: str, *, name: str, patience_s: float = PATIENCE_S) -> None:
        """`url` is redis://[[user]:[password]@]host[:port][/db], rediss://... or unix://PATH[?db=0]. Redis shows `name`.

        Raises ConfigError for a wrong URL or password, StreamError if there is no Redis (of 6.2 or later) to talk to.
        """
        self.url = without_password(url)
        self._patience_s = patience_s
        self._scripts: dict[str, Any] = {}
        timeout_s = min(REPLY_TIMEOUT_S, patience_s)
        try:
            self._client = redis.Redis.from_url(
                url,
                client_name=name,
                protocol=2,
                retry=Retry(NoBackoff(), 0),
                socket_connect_timeout=timeout_s,
                socket_timeout=timeout_s,
                socket_read_size=_READ_BYTES,
            )
            self._client.connection_pool.make_connection()  # connects to nothing: it looks at the URL's options
        except (ValueError, TypeError) as error:
            raise ConfigError(f"stream.url {self.url}: {error}. It is like redis://HOST:6379/0 or unix:///PATH") from None
        try:
            self._check_version(min(OPENING_PATIENCE_S, patience_s))
        except PipelineRLError:
            self._client.close()
            raise

    def run(self, script: str, keys: Sequence[str], arguments: Sequence[str | bytes | int]) -> list[Any]:
        """What the script answers. Tries again while there is no connection, for as long as the patience lasts.

        Raises StreamError, or ConfigError for a password that is (now) wrong.
        """
        if script not in self._scripts:
            self._scripts[script] = self._client.register_script(script)
        answer: list[Any] = self._patiently(self._patience_s, self._scripts[script], keys, arguments)
        return answer

    def is_connected(self, name: str) -> bool:
        """Whether a client of that name is connected, as far as this user may see."""
        try:
            clients = self._patiently(self._patience_s, self._client.client_list, "normal")
        except _NotAllowedError:
            return False
        return any(client["name"] == name for client in clients)

    def close(self, last_script: str = "", keys: Sequence[str] = (), arguments: Sequence[str | bytes | int] = ()) -> None:
        """Run one more script if Redis is there now, which may fail, and hang up. Closing twice is fine."""
        try:
            if last_script:
                self._client.eval(last_script, len(keys), *keys, *arguments)
        except RedisError:
            pass  # Without a connection Redis knows that this end is gone.
        self._client.close()

    def _check_version(self, patience_s: float) -> None:
        try:
            text = str(self._patiently(patience_s, self._client.info, "server").get("redis_version", ""))
        except _NotAllowedError:
            return
        numbers = text.split(".")
        if len(numbers) > 1 and all(number.isdecimal() for number in numbers[:2]):
            version = (int(numbers[0]), int(numbers[1]))
            if version < _OLDEST_VERSION:
                raise StreamError(f"{self.url}: this is Redis {text}; streams need 6.2 or later")

    def _patiently(self, patience_s: float, call: Any, *arguments: Any) -> Any:
        begin_s = time.monotonic()
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return call(*arguments)
            except (AuthenticationError, AuthorizationError) as error:
                raise ConfigError(f"stream.url {self.url}: Redis does not let us in: {error}") from error
            except (redis.ConnectionError, redis.TimeoutError) as error:
                tried_s = time.monotonic() - begin_s
                if tried_s + pause_s > patience_s:
                    raise ConnectionLostError(
                        f"{self.url}: no connection, tried for {tried_s:.1f} s ({error}); start Redis, or mend stream.url"
                    ) from error
            except RedisError as error:
                raise self._explained(error) from error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _explained(self, error: RedisError) -> StreamError:
        text = str(error).partition(" script: ")[0]
        if isinstance(error, NoPermissionError):
            return _NotAllowedError(f"{self.url}: the Redis user lacks a permission: {text}")
        if isinstance(error, OutOfMemoryError):
            return StreamError(f"{self.url}: Redis is full (its maxmemory): raise that, or lower stream.capacity")
        if isinstance(error, ReadOnlyError):
            return StreamError(f"{self.url}: this Redis is a read-only replica; stream.url must name the primary")
        if isinstance(error, ResponseError) and text.startswith("WRONGTYPE"):
            return StreamError(f"{self.url}: a key of the stream is there and is something else; use another stream name")
        return StreamError(f"{self.url}: Redis refuses: {text}")


class ConnectionLostError(StreamError):
    """There is no connection to Redis, and whether it has done what it was asked last is not known."""


class _NotAllowedError(StreamError):
    """A command that this Redis user may not use."""


def without_password(url: str) -> str:
    """The URL as it may be shown."""
    shown = re.sub(r"(?<=//).*@", "***@", url)
    return re.sub(r"(?<=password=)[^&]*", "***", shown)
