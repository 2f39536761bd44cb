"""A pool of processes that run user functions under limits, awaited from the event loop of generation."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import sys
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from pipelinerl.environments.user.code import LINE_SIGNAL, OUT_OF_MEMORY, FunctionCall, Limits, Reply, Start, TaskSource
from pipelinerl.errors import INVALID_DATA, EnvironmentSetupError, RolloutError
from pipelinerl.interfaces import Tokenizer
from pipelinerl.process.child import ChildProcess

if TYPE_CHECKING:
    from pipelinerl.environments.single_turn import Task

__all__ = ["CALL_ENDED", "FunctionPool", "Limits"]

T = TypeVar("T")

START_TIMEOUT_S = 600.0
"""How long an instance of a user's class may take to construct. Rollouts that wait for it have their own limit."""
CLOSE_TIMEOUT_S = 2.0
EXIT_TIMEOUT_S = 1.0
"""How long a process may take to exit after it closed its socket, and to write where its call is."""
POLL_S = 0.005
MAX_REPLY_BYTES = 4 << 20
"""Longest reply line of a worker."""
CALL_ENDED = (TimeoutError, MemoryError, ChildProcessError)
"""Raised for a call that exceeded a limit or crashed its process."""


class FunctionPool:
    """Calls functions (`path/to/file.py:function` or `package.module:function`) by name, in processes with limits.

    A process is started when a call finds none idle, and imports all the files. Arguments and results are JSON. A call that
    takes too long, needs too much memory or crashes its process loses that process and nothing else. The processes end with
    the pool: when it is closed or garbage-collected, or when its own process exits or crashes.

    Functions can't rely on state from earlier calls: each process has its own.
    """

    def __init__(
        self, functions: Mapping[str, str], limits: Limits | None = None, *, task: TaskSource | None = None
    ) -> None:
        """`task`: see `Start`."""
        self._limits = limits or Limits()
        self._start = Start(functions=dict(functions), limits=self._limits, task=task)
        self._numbers = count(1)
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._slots = asyncio.Semaphore(self._limits.workers)
        self._close = weakref.finalize(self, _kill_all, self._all)

    async def call(self, name: str, /, *arguments: Any, **named: Any) -> Any:
        """What the function returns for these arguments. The wait for a free process has no time limit.

        Raises RuntimeError with one line if the function raised, ConnectionError if that `is_unreachable`, RolloutError
        if it returned something that isn't JSON (such as a number that isn't finite), TimeoutError, MemoryError,
        ChildProcessError if its process died, and EnvironmentSetupError if no process can be started.
        """
        return await retried(partial(self._call, name, arguments, named), self._limits.retries)

    async def _call(self, name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        async with self._slots:
            while self._idle and not self._idle[-1].running:
                self._idle.pop().kill()
            worker = self._idle.pop() if self._idle else await self._start_worker()
            try:
                call = FunctionCall(number=next(self._numbers), name=name, arguments=arguments, named=named)
                reply = await worker.ask(call, self._limits.timeout_s)
            except BaseException as error:
                file, ended = Path(self._start.functions[name]).name, ""
                try:
                    if isinstance(error, TimeoutError):
                        ended = f"{await worker.line(file.rpartition(':')[0])}; its process was ended"
                finally:
                    worker.kill()
                if isinstance(error, CALL_ENDED):
                    raise type(error)(f"{name} ({file}): {error}{ended}") from None
                raise
            self._idle.append(worker)
        if reply.outcome == "returned":
            return reply.value
        kinds = {"bad_value": RolloutError, "unreachable": ConnectionError}
        raise kinds.get(reply.outcome, RuntimeError)(reply.error)

    def close(self) -> None:
        """Kill all processes. Idempotent."""
        self._close()

    async def _start_worker(self) -> _Worker:
        """A new process that is ready for calls."""
        if not self._close.alive:
            raise RuntimeError("the pool is closed")
        self._all -= {worker for worker in self._all if not worker.running}
        specs = ", ".join(self._start.functions.values())
        try:
            worker = _Worker(self._start)
        except OSError as error:
            raise EnvironmentSetupError(f"can't start a process for {specs}: {error}") from error
        self._all.add(worker)
        try:
            reply = await worker.ask(None, self._limits.start_timeout_s)
        except BaseException as error:
            worker.kill()
            if isinstance(error, CALL_ENDED):
                raise EnvironmentSetupError(f"can't import {specs}: {error}") from None
            raise
        if reply.outcome != "returned":
            worker.kill()
            raise EnvironmentSetupError(reply.error)
        return worker


async def retried(call: Callable[[], Coroutine[Any, Any, T]], retries: int) -> T:
    """The result of `call`, which is made again, after 1, 4, 16, ... s, if it raises ConnectionError."""
    for number in range(retries):
        try:
            return await call()
        except ConnectionError:
            await asyncio.sleep(4**number)
    return await call()


def reward_pool(task: Task, kind: str, args: Mapping[str, Any], tokenizer: Tokenizer, seed: int) -> FunctionPool:
    """A pool with the function `reward`: the method of an instance of the user's class.

    Raises EnvironmentSetupError for limits that are none, and for arguments that can't be sent to a process.
    """
    if old := [name for name in Limits.__struct_fields__ if hasattr(task, f"reward_{name}")]:
        now = f"reward_limits = {{{old[0]!r}: {getattr(task, f'reward_{old[0]}')!r}}}"
        raise EnvironmentSetupError(f"environment {kind}: instead of its attribute reward_{old[0]}, write `{now}`")
    source = TaskSource(
        kind=kind,
        args=dict(args),
        seed=seed,
        tokenizer=getattr(tokenizer, "name_or_path", ""),
        chat_template=getattr(tokenizer, "chat_template", None),
        remote_code=type(tokenizer).__module__.startswith("transformers_modules"),
        search=[str(place) for place in sys.path],
    )
    try:
        limits = msgspec.convert({"retries": 2, "start_timeout_s": START_TIMEOUT_S, **task.reward_limits}, Limits)
    except (msgspec.ValidationError, TypeError) as error:
        raise EnvironmentSetupError(f"environment {kind}: its attribute reward_limits: {error}") from error
    try:
        msgspec.json.encode(source)
    except TypeError as error:
        raise EnvironmentSetupError(
            f"environment.args of {kind} are not JSON, so no other process can have them ({error}); use JSON, or set "
            "`isolate_reward = False` in the class"
        ) from error
    return FunctionPool({"reward": kind}, limits, task=source)


class _Worker(ChildProcess):
    """A process that runs user functions (`worker.py`)."""

    def __init__(self, start: Start) -> None:
        """Returns at once; reply 0 arrives when the process is ready. Raises OSError if it can't be started."""
        self._memory_mb = start.limits.memory_mb
        self._socket, worker_socket = socket.socketpair()
        self._socket.setblocking(False)
        try:
            super().__init__(
                [sys.executable, "-P", "-m", "pipelinerl.environments.user.worker", msgspec.json.encode(start).decode()],
                stdin=worker_socket.fileno(),
                environment={"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},  # several workers, one thread each
            )
        except OSError:
            self._socket.close()
            raise
        finally:
            worker_socket.close()

    async def ask(self, call: FunctionCall | None, timeout_s: float) -> Reply:
        """Send a call and return the reply. Without a call: reply 0, which says that the process is ready.

        Raises TimeoutError, MemoryError, or ChildProcessError if the process died or broke the protocol. The caller must
        kill the process after any of these.
        """
        unsent = msgspec.json.encode(call) + b"\n" if call else b""
        with suppress(OSError):  # at once: the process computes while the event loop is busy; `_exchange` meets errors again
            unsent = unsent[self._socket.send(unsent) :]
        exchange = asyncio.ensure_future(self._exchange(unsent))
        try:
            await asyncio.wait({exchange}, timeout=timeout_s)  # a reply counts also if the event loop comes late
            if not exchange.done():
                raise TimeoutError(f"it took longer than {timeout_s:g} s")
            reply = msgspec.json.decode(exchange.result(), type=Reply)
        except INVALID_DATA:
            raise ChildProcessError("it wrote something to the pool's socket that is not a reply") from None
        finally:
            exchange.cancel()
        if reply.number != (number := call.number if call else 0):
            raise ChildProcessError(f"it replied to call {reply.number}, but was asked {number}")
        return reply

    async def _exchange(self, sent: bytes) -> bytes:
        """The line that the process writes after `sent`."""
        loop, line = asyncio.get_running_loop(), bytearray()
        with suppress(OSError):  # as if it had closed the socket
            await loop.sock_sendall(self._socket, sent)
            while len(line) <= MAX_REPLY_BYTES and (received := await loop.sock_recv(self._socket, 1 << 16)):
                line += received
                if line.endswith(b"\n"):
                    return bytes(line)
        if len(line) > MAX_REPLY_BYTES:
            raise ChildProcessError(f"it replied with more than {MAX_REPLY_BYTES} bytes")
        raise await self._exit_error()

    async def line(self, file: str) -> str:
        """End the process. Returns the innermost line of `file` that its call had reached, as in ", in line 9", or ""."""
        self.send_signal(LINE_SIGNAL)
        loop, stack = asyncio.get_running_loop(), b""
        with suppress(OSError):  # as TimeoutError is
            async with asyncio.timeout(EXIT_TIMEOUT_S):
                while len(stack) < MAX_REPLY_BYTES and (received := await loop.sock_recv(self._socket, 1 << 16)):
                    stack += received
        found = re.search(rf'/{re.escape(file)}", line (\d+)'.encode(), stack)
        return f", in line {int(found[1])}" if found else ""

    def kill(self) -> None:
        super().kill()
        self._socket.close()

    async def _exit_error(self) -> Exception:
        """The error that explains why the process closed its socket."""
        until_s = time.monotonic() + EXIT_TIMEOUT_S
        while self.running and time.monotonic() < until_s:
            await asyncio.sleep(POLL_S)
        if self.status is None:
            return ChildProcessError("it closed the pool's socket")
        if self.status == OUT_OF_MEMORY:
            return MemoryError(f"it needed more than {self._memory_mb} MB")
        return ChildProcessError(f"its process {self.how_it_ended()}")


def _kill_all(workers: set[_Worker]) -> None:
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.wait(CLOSE_TIMEOUT_S)
    workers.clear()
