"""A Redis server for one run on one machine: it starts with the run, serves only the run, and ends with it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from pipelinerl.errors import MissingDependencyError, StreamError
from pipelinerl.stream.redis import is_ready

STARTUP_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 20.0
_LONGEST_SOCKET_PATH = 100
"""Bytes; the system's limit is 107."""

# The server, and beside it a shell that waits for the end of a pipe whose other end this process holds: when this process
# ends, however it ends, so does the server. Both are in a session of their own: Ctrl-C does not reach them.
_COMMAND = 'exec 3<&0; (read -r _ <&3; kill -TERM $$) & exec "$1" "$2" </dev/null 3<&-'


class RedisServer:
    """A running server. `url` is for `RedisStreamWriter` and `RedisStreamReader`."""

    def __init__(self, program: str, configuration: Path, socket: Path, log: Path) -> None:
        self.url = f"unix://{quote(str(socket))}"
        self._log = log
        self._process = subprocess.Popen(  # noqa: S603 (a fixed command; the program and its file are arguments)
            ["/bin/sh", "-c", _COMMAND, "sh", program, str(configuration)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def failure(self) -> str | None:
        """Why the server has ended, in one line; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        try:
            lines = self._log.read_bytes()[-2000:].decode(errors="replace").splitlines()
        except OSError:
            lines = []
        last = lines[-1].strip() if lines else "no output"
        return f"redis-server (pid {self.pid}) {how}; its log, {self._log}, ends with: {last}"

    def close(self) -> None:
        """Stop the server, and wait until it has ended. May be called twice."""
        if self._process.stdin is None or self._process.stdin.closed:
            return
        try:
            os.killpg(self.pid, signal.SIGTERM)
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
        except ProcessLookupError:
            self._process.wait()
        self._process.stdin.close()


@contextmanager
def start_server(directory: Path, *, durable: bool = False, program: str = "redis-server") -> Iterator[RedisServer]:
    """A server that runs within the `with`, or until this process has ended.

    It listens on a socket file that only this user can open. Configuration, log and data are in `directory`. Nothing is
    kept on disk unless `durable`: then the next server in `directory` has everything that this one confirmed, even if it
    was killed. (If the machine loses power, the last second may be missing.)
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
        lines = ["port 0", f"unixsocket {_quoted(socket)}", "unixsocketperm 700", "daemonize no", "protected-mode yes"]
        lines += [f"dir {_quoted(directory)}", f"logfile {_quoted(log)}", "maxmemory-policy noeviction", 'save ""']
        lines += [f"appendonly {'yes' if durable else 'no'}", "appendfsync everysec"]
        configuration.write_text("\n".join(lines) + "\n")
        server = stack.enter_context(closing(RedisServer(path, configuration, socket, log)))
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
