"""One worker process, as the pool sees it: starts it and sends calls."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from pipelinerl.child import ChildProcess
from pipelinerl.environments.pool.messages import MAX_REPLY_BYTES, OUT_OF_MEMORY, Call, Limits, Reply, Start

EXIT_TIMEOUT_S = 1.0
"""How long a process may take to exit after it closed its socket."""
POLL_S = 0.005


class WorkerProcess(ChildProcess):
    """A process that runs user functions."""

    def __init__(self, functions: Mapping[str, str], limits: Limits) -> None:
        """Returns at once; reply 0 arrives when the process is ready. Raises OSError if it can't be started."""
        self._memory_mb = limits.memory_mb
        start = msgspec.json.encode(Start(functions=dict(functions), limits=limits)).decode()
        self._socket, worker_socket = socket.socketpair()
        self._socket.setblocking(False)
        try:
            super().__init__(
                [sys.executable, "-P", "-m", "pipelinerl.environments.pool.worker", start],
                stdin=worker_socket.fileno(),
                environment={"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},  # several workers, one thread each
            )
        except OSError:
            self._socket.close()
            raise
        finally:
            worker_socket.close()

    async def ask(self, call: Call, timeout_s: float) -> Reply:
        """Send a call and return the reply.

        Raises TimeoutError, MemoryError, or ChildProcessError if the process died or broke the protocol. The caller must
        kill the process after any of these.
        """
        deadline_s = time.monotonic() + timeout_s
        loop = asyncio.get_running_loop()
        unsent = memoryview(msgspec.json.encode(call) + b"\n")
        while unsent:
            try:
                unsent = unsent[self._socket.send(unsent) :]
            except BlockingIOError:
                await self._wait(loop.add_writer, loop.remove_writer, deadline_s)
            except OSError:
                raise await self._exit_error() from None
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
                raise await self._exit_error()
            line += received
        try:
            reply = msgspec.json.decode(line, type=Reply)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise ChildProcessError("it wrote something to the pool's socket that is not a reply") from None
        if reply.number != number:
            raise ChildProcessError(f"it replied to call {reply.number}, but was asked {number}")
        return reply

    def kill(self) -> None:
        super().kill()
        self._socket.close()

    async def _wait(self, add: Callable[..., Any], remove: Callable[..., Any], deadline_s: float) -> None:
        """Wait until the socket is ready. Readiness wins over the deadline, because the event loop itself may be late."""
        ready = asyncio.get_running_loop().create_future()
        add(self._socket, lambda: None if ready.done() else ready.set_result(None))
        try:
            await asyncio.wait({ready}, timeout=max(0.0, deadline_s - time.monotonic()))
        finally:
            remove(self._socket)
        if not ready.done():
            raise TimeoutError

    async def _exit_error(self) -> Exception:
        """The error that explains why the process closed its socket."""
        until_s = time.monotonic() + EXIT_TIMEOUT_S
        while self.running and time.monotonic() < until_s:
            await asyncio.sleep(POLL_S)
        if self.status is None:
            return ChildProcessError("it closed the pool's socket")
        if self.status == OUT_OF_MEMORY:
            return MemoryError(f"it needed more than {self._memory_mb} MB")
        if self.status == -signal.SIGXCPU:
            return TimeoutError("it used up its CPU time")
        return ChildProcessError(f"its process {self.how_it_ended()}")
