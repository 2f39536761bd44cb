"""A Redis server for one run on one machine: it starts with the run, serves only the run, and ends with it."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import quote

from pipelinerl.child import ChildProcess
from pipelinerl.errors import MissingDependencyError, StreamError
from pipelinerl.files import write_atomically
from pipelinerl.ports import free_port
from pipelinerl.redis_connection import is_ready

STARTUP_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 20.0
_LONGEST_SOCKET_PATH = 100
"""Bytes; the system's limit is 107."""

# The server, and beside it a shell that watches the parent-death pipe for it.
_COMMAND = 'exec 3<&0; (read -r _ <&3; kill -TERM $$) & exec "$1" "$2" </dev/null 3<&-'


class RedisServer(ChildProcess):
    """A running server. `url` is for `RedisStreamWriter` and `RedisStreamReader`."""

    def __init__(self, program: str, configuration: Path, url: str, log: Path, fds: Sequence[int] = ()) -> None:
        self.url = url
        command = ["/bin/sh", "-c", _COMMAND, "sh", program, str(configuration)]
        super().__init__(command, log=log, fds=fds, watches_parent=True, patience_s=STOP_TIMEOUT_S)

    def failure(self) -> str | None:
        """Why the server has ended, in one line; None while it runs."""
        if self.running:
            return None
        last = f"ends with: {lines[-1].strip()}" if (lines := self.log_lines()) else "is empty"
        return f"redis-server (pid {self.pid}) {self.how_it_ended()}; its log, {self.log}, {last}"


@contextmanager
def start_server(
    directory: Path,
    *,
    durable: bool = False,
    address: str | None = None,
    fds: Sequence[int] = (),
    program: str = "redis-server",
) -> Iterator[RedisServer]:
    """A server that runs within the `with`, or until this process has ended.

    It listens on a socket file that only this user can open. With `address`, it listens for other machines, on a port of
    that address of this one, and asks for a random password, which is in the URL. It inherits `fds`. Configuration, log and
    data are in `directory`. Nothing is kept on disk unless `durable`: then the next server there has everything that
    this one confirmed, even if it was killed. If the machine loses power, the last second may be missing.

    Raises MissingDependencyError if there is no such program, StreamError if it does not start.
    """
    path = shutil.which(program)
    if path is None:
        raise MissingDependencyError(
            f"{program} is not installed: apt-get install redis-server (Debian, Ubuntu), brew install redis (macOS), or "
            "name a running Redis in stream.url"
        )
    directory = directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        socket, log, configuration = (directory / f"redis.{suffix}" for suffix in ("sock", "log", "conf"))
        if len(os.fsencode(socket)) > _LONGEST_SOCKET_PATH:
            socket = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pipelinerl-redis-"))) / "redis.sock"
        lines = ["daemonize no", "protected-mode yes"]
        if address is None:
            url = f"unix://{quote(str(socket))}"
            lines += ["port 0", f"unixsocket {_quoted(socket)}", "unixsocketperm 700"]
        else:
            port, password = free_port(address), secrets.token_hex(32)
            url = f"redis://:{password}@{address}:{port}/0"
            lines += [f"bind {address}", f"port {port}", f"requirepass {password}"]
        lines += [f"dir {_quoted(directory)}", "maxmemory-policy noeviction", 'save ""']
        lines += [f"appendonly {'yes' if durable else 'no'}", "appendfsync everysec"]
        write_atomically(configuration, ("\n".join(lines) + "\n").encode(), mode=0o600)
        server = stack.enter_context(RedisServer(path, configuration, url, log, fds))
        deadline_s = time.monotonic() + STARTUP_TIMEOUT_S
        while not is_ready(server.url):
            if failure := server.failure():
                raise StreamError(f"redis-server did not start: {failure}")
            if time.monotonic() > deadline_s:
                raise StreamError(f"redis-server does not answer after {STARTUP_TIMEOUT_S:.0f} s; its log is {log}")
            time.sleep(0.01)
        yield server


def _quoted(path: Path) -> str:
    """A path as Redis reads it in its configuration."""
    text = str(path)
    if not text.isprintable():
        raise StreamError(f"redis-server can't be started in {text!r}: choose a run_dir of printable characters")
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
