"""One worker process, seen from the pool: started, asked, ended."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from pipelinerl.environments.pool.messages import MAX_REPLY_BYTES, OUT_OF_MEMORY, Call, Limits, Reply, Start

DYING_S = 1.0
"""How long a process may take from closing its socket to being gone."""
LOOK_EVERY_S = 0.005


class WorkerProcess:
    """Its process group is its own: what it starts is ended with it, and Ctrl-C does not reach it."""

    def __init__(self, functions: Mapping[str, str], limits: Limits) -> None:
        """Returns at once; `reply(0)` says when it is ready. Raises OSError if it can't be started."""
        self._memory_mb = limits.memory_mb
        self._killed = False
        # A pipe for this process alone: whom the kernel tells of its end is noted with the pipe, not with who reads it.
        lifeline_fd, self._held_fd = os.pipe()
        start = Start(functions=dict(functions), limits=limits, lifeline_fd=lifeline_fd)
        self._socket, its_end = socket.socketpair()
        self._socket.setblocking(False)
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-P", "-m", "pipelinerl.environments.pool.worker", msgspec.json.encode(start).decode()],
                stdin=its_end.fileno(),
                pass_fds=[lifeline_fd],
                process_group=0,
                env={"OMP_NUM_THREADS": "1", **os.environ},  # several workers, each of one thread
            )
        except OSError:
            self._let_go()
            raise
        finally:
            os.close(lifeline_fd)
            its_end.close()

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    async def ask(self, call: Call, timeout_s: float) -> Reply:
        """Raises TimeoutError, MemoryError, or ChildProcessError if it died or broke the protocol: end it then."""
        deadline_s = time.monotonic() + timeout_s
        loop = asyncio.get_running_loop()
        left = memoryview(msgspec.json.encode(call) + b"\n")
        while left:
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                await self._wait(loop.add_writer, loop.remove_writer, deadline_s)
            except OSError:
                raise await self._death() from None
        return await self.reply(call.number, deadline_s)

    async def reply(self, number: int, deadline_s: float) -> Reply:
        """The reply to call `number`, by `deadline_s` of the monotonic clock. Raises as `ask` does."""
        loop = asyncio.get_running_loop()
        line = bytearray()
        while not line.endswith(b"\n"):
            if len(line) > MAX_REPLY_BYTES:
                raise ChildProcessError(f"it replied with more than {MAX_REPLY_BYTES} bytes")
            try:
                received = self._socket.recv(1 << 16)
            except BlockingIOError:
                await self._wait(loop.add_reader, loop.remove_reader, deadline_s)
                continue
            except OSError:
                received = b""
            if not received:
                raise await self._death()
            line += received
        try:
            reply = msgspec.json.decode(line, type=Reply)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise ChildProcessError("it wrote something into the pool's socket that is no reply") from None
        if reply.number != number:
            raise ChildProcessError(f"it replied to call {reply.number}, but was asked {number}")
        return reply

    def kill(self) -> None:
        """At once, with all that it has started. Twice is fine."""
        if self._killed:
            return
        self._killed = True
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._let_go()

    def gone(self) -> bool:
        """Whether it has ended. To be asked until it has, lest a zombie be left."""
        return self._process.poll() is not None

    def wait(self, timeout_s: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)

    def _let_go(self) -> None:
        self._socket.close()
        os.close(self._held_fd)

    async def _wait(self, add: Callable[..., Any], remove: Callable[..., Any], deadline_s: float) -> None:
        """Wait for the socket. That it is ready counts before the time does: this loop may itself have come late."""
        ready = asyncio.get_running_loop().create_future()
        add(self._socket, lambda: None if ready.done() else ready.set_result(None))
        try:
            await asyncio.wait({ready}, timeout=max(0.0, deadline_s - time.monotonic()))
        finally:
            remove(self._socket)
        if not ready.done():
            raise TimeoutError

    async def _death(self) -> Exception:
        """Why it has closed its socket."""
        until_s = time.monotonic() + DYING_S
        while not self.gone() and time.monotonic() < until_s:
            await asyncio.sleep(LOOK_EVERY_S)
        status = self._process.returncode
        if status is None:
            return ChildProcessError("it closed the pool's socket")
        if status == OUT_OF_MEMORY:
            return MemoryError(f"it needed more than {self._memory_mb} MB")
        if status == -signal.SIGXCPU:
            return TimeoutError("it used up its CPU time")
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        return ChildProcessError(f"its process {how}")
