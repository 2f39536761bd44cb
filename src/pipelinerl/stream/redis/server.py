"""A Redis for one run on one machine: started with it, used by nobody else, gone with it."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from pipelinerl.child import ChildProcess
from pipelinerl.errors import MissingDependencyError, PipelineRLError, StreamError
from pipelinerl.ports import free_port
from pipelinerl.stream.redis.connection import RedisConnection

STARTUP_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 20.0
_LONGEST_SOCKET_PATH = 100
"""Bytes; the system's limit is 107."""

# The server, and beside it a shell that watches the parent-death pipe for it.
_COMMAND = 'exec 3<&0; (read -r _ <&3; kill -TERM $$) & exec "$1" "$2" </dev/null 3<&-'


class RedisServer(ChildProcess):
    """A server that runs. `url` is for `RedisStreamWriter` and `RedisStreamReader`; it may have a password in it."""

    def __init__(self, url: str, program: str, configuration: Path, log: Path, socket_folder: Path | None) -> None:
        self.url = url
        self._socket_folder = socket_folder
        command = ["/bin/sh", "-c", _COMMAND, "sh", program, str(configuration)]
        super().__init__(command, log=log, watches_parent=True, patience_s=STOP_TIMEOUT_S)

    def failure(self) -> str | None:
        """Why it does not run, in a line; None while it does."""
        if self.running:
            return None
        last = f"ends with: {lines[-1].strip()}" if (lines := self.log_lines()) else "is empty"
        return f"redis-server (pid {self.pid}) {self.how_it_ended()}; its log, {self.log}, {last}"

    def stop(self) -> None:
        super().stop()
        if self._socket_folder is not None:
            shutil.rmtree(self._socket_folder, ignore_errors=True)


@contextmanager
def start_server(
    directory: Path, *, port: int | None = None, durable: bool = False, program: str = "redis-server"
) -> Iterator[RedisServer]:
    """A server that runs within the `with`, or until this process is gone.

    It listens on a socket file that only this user can open or, given a `port` (0: any that is free), on that port of the
    loopback interface, with a password. Configuration, log and data are in `directory`. It keeps nothing on disk unless
    `durable`: then the next server in `directory` has all that this one confirmed, even if it was killed. (If the machine
    loses power, a second may be missing.)
    Raises MissingDependencyError if there is no such program, StreamError if it does not start.
    """
    path = shutil.which(program)
    if path is None:
        raise MissingDependencyError(
            f"{program} is not installed: apt-get install redis-server (Debian, Ubuntu), brew install redis (macOS), or "
            "name a Redis that runs in stream.url"
        )
    directory = directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    server = _start(path, directory, port, durable)
    with server:
        _wait_until_ready(server)
        yield server


def _start(program: str, directory: Path, port: int | None, durable: bool) -> RedisServer:
    folder: Path | None = None
    lines = ["daemonize no", "protected-mode yes", 'save ""', "maxmemory-policy noeviction"]
    lines += [f"appendonly {'yes' if durable else 'no'}", "appendfsync everysec"]
    lines += [f"dir {_quoted(directory)}"]
    if port is None:
        address = directory / "redis.sock"
        if len(os.fsencode(address)) > _LONGEST_SOCKET_PATH:
            folder = Path(tempfile.mkdtemp(prefix="pipelinerl-redis-"))
            address = folder / "redis.sock"
        lines += ["port 0", f"unixsocket {_quoted(address)}", "unixsocketperm 700"]
        url = f"unix://{quote(str(address))}"
    else:
        port, password = port or free_port(), secrets.token_hex(16)
        lines += [f"port {port}", "bind 127.0.0.1", f"requirepass {password}"]
        url = f"redis://:{password}@127.0.0.1:{port}/0"
    configuration = directory / "redis.conf"
    configuration.unlink(missing_ok=True)
    with os.fdopen(os.open(configuration, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write("\n".join(lines) + "\n")
    return RedisServer(url, program, configuration, directory / "redis.log", folder)


def _wait_until_ready(server: RedisServer) -> None:
    deadline_s = time.monotonic() + STARTUP_TIMEOUT_S
    while True:
        try:
            RedisConnection(server.url, name="pipelinerl-launcher", patience_s=0.5).close()
            return
        except PipelineRLError as error:
            if failure := server.failure():
                raise StreamError(f"redis-server did not start: {failure}") from error
            if time.monotonic() > deadline_s:
                raise StreamError(f"redis-server does not answer after {STARTUP_TIMEOUT_S:.0f} s: {error}") from error
            time.sleep(0.01)


def _quoted(path: Path) -> str:
    """A path as Redis' configuration reads it."""
    text = str(path)
    if not text.isprintable():
        raise StreamError(f"redis-server can't be started in {text!r}: choose a run_dir of printable characters")
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
