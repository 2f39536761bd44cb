"""A connection with a Redis server: of the streams, admission and the status board of a run. Needs the extra `redis`."""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any, TypeVar

from pipelinerl.errors import ConfigError, StreamError
from pipelinerl.extras import require

require("redis", "a stream in Redis")  # before the import, which fails without
from redis import Redis, exceptions  # noqa: E402
from redis.backoff import NoBackoff  # noqa: E402
from redis.retry import Retry  # noqa: E402

__all__ = ["PATIENCE_S", "RedisConnection", "connect", "exceptions", "is_ready", "without_password"]

Result = TypeVar("Result")

PATIENCE_S = 15.0
"""How long a lost connection is retried. Less than the time that other actors wait for admission's lock on one machine."""
OPENING_PATIENCE_S = 5.0
"""The same for the first connection, where a wrong address is the likelier cause."""
REPLY_TIMEOUT_S = 5.0
"""Redis answers in milliseconds. The last attempt may end this much later than the patience."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0


class RedisConnection:
    """`token` is unique: role, host, process and a random part. Redis shows it as the name of the connections.

    `url` may be shown: it is without the password.
    """

    def __init__(self, url: str, role: str, patience_s: float = PATIENCE_S) -> None:
        """`url` is redis://[[user]:[password]@]host[:port][/db], rediss://... or unix://PATH[?db=0]. It is not opened yet.

        Raises ConfigError for a wrong URL.
        """
        self.token = f"{role}{_process(os.getpid())}{secrets.token_hex(8)}"
        self.url = without_password(url)
        self.client: Any = connect(url, self.token, min(REPLY_TIMEOUT_S, patience_s))
        self._patience_s = patience_s

    def opened(self, operation: Callable[[], Result]) -> Result:
        """The result of the first operation, with less patience. Raises ConfigError for a wrong password, StreamError."""
        patience_s, self._patience_s = self._patience_s, min(OPENING_PATIENCE_S, self._patience_s)
        try:
            return self.patiently(operation)
        finally:
            self._patience_s = patience_s

    def patiently(self, operation: Callable[[], Result]) -> Result:
        """The operation's result. Repeats it while there is no connection; raises StreamError when the patience is over."""
        begin_s, pause_s = time.monotonic(), _FIRST_PAUSE_S
        while True:
            try:
                return operation()
            except exceptions.WatchError:
                continue  # another process has just created the stream, or the connection was lost
            except (exceptions.AuthenticationError, exceptions.AuthorizationError) as error:
                raise ConfigError(f"stream.url {self.url}: Redis does not let us in: {error}") from error
            except (exceptions.ConnectionError, exceptions.TimeoutError) as error:
                tried_s = time.monotonic() - begin_s
                if tried_s + pause_s > self._patience_s:
                    raise StreamError(
                        f"{self.url}: no connection, tried for {tried_s:.1f} s ({error}); start Redis, or correct stream.url"
                    ) from error
            except exceptions.RedisError as error:
                text = str(error).rpartition(" of pipeline caused error: ")[2]
                raise StreamError(f"{self.url}: Redis refuses: {text}") from error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def disconnect(self, pid: int) -> None:
        """End the connections of a process of this machine that has died: what Redis has not read of it is not executed.

        Raises StreamError, also if the Redis user may not do that.
        """

        def end() -> None:
            for client in self.client.client_list("normal"):
                if _process(pid) in client["name"]:
                    self.client.client_kill_filter(_id=client["id"])

        self.patiently(end)

    def close(self) -> None:
        """May be called twice."""
        self.client.close()


def _process(pid: int) -> str:
    """The part of a token that names a process of this machine."""
    host = re.sub(r"[^\w.-]", "_", socket.gethostname(), flags=re.ASCII)
    return f"-{host}-{pid}-"


def connect(url: str, name: str, timeout_s: float) -> Redis:
    """A client of the Redis at `url` that tries each command once. It connects when it is used. Raises ConfigError."""
    timeouts = {"socket_connect_timeout": timeout_s, "socket_timeout": timeout_s}
    try:
        client = Redis.from_url(url, client_name=name, protocol=2, retry=Retry(NoBackoff(), 0), **timeouts)
        client.connection_pool.make_connection()  # does not connect, but checks the options in the URL
    except (ValueError, TypeError) as error:
        shown = without_password(url)
        raise ConfigError(f"stream.url {shown}: {error}. It is like redis://HOST:6379/0 or unix:///PATH") from None
    return client


def is_ready(url: str) -> bool:
    """Whether the Redis at `url` answers and has loaded its data."""
    with closing(connect(url, "pipelinerl-launcher", 0.5)) as client, suppress(exceptions.RedisError):
        return bool(client.ping())
    return False


def without_password(url: str) -> str:
    """The URL as it may be shown."""
    return re.sub(r"(?<=password=)[^&]*", "***", re.sub(r"(?<=//).*@", "***@", url))
