"""A pool of processes that run user functions under limits, awaited from the event loop of generation."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from pipelinerl.child import ChildProcess
from pipelinerl.config.schema import Count, Natural, Positive
from pipelinerl.environments.user.code import (
    LINE_SIGNAL,
    OUT_OF_MEMORY,
    FunctionCall,
    Limits,
    Reply,
    Start,
    TaskSource,
)
from pipelinerl.errors import INVALID_DATA, EnvironmentSetupError, RolloutError
from pipelinerl.interfaces import Tokenizer

if TYPE_CHECKING:
    from pipelinerl.environments.single_turn import Task

__all__ = ["CALL_ENDED", "FunctionPool", "Limits"]

T = TypeVar("T")

START_TIMEOUT_S = 600.0
"""How long an instance of a user's class may take to construct. Rollouts that wait for it have their own limit."""
CLOSE_TIMEOUT_S = 2.0
EXIT_TIMEOUT_S = 1.0
"""How long a process may take to exit after it closed its socket."""
LINE_TIMEOUT_S = 1.0
"""How long a process whose call took too long may take to say where it is."""
POLL_S = 0.005
MAX_REPLY_BYTES = 4 << 20
"""Longest reply line of a worker."""
CALL_ENDED = (TimeoutError, MemoryError, ChildProcessError)
"""Raised for a call that exceeded a limit or crashed its process."""


class FunctionPool:
    """Calls functions (`path/to/file.py:function` or `package.module:function`) by name, in up to `workers` processes.

    A process is started when a call finds none idle, and imports all the files. Arguments and results are JSON. A call that
    takes too long, needs too much memory or crashes its process loses that process and nothing else. The processes end with
    the pool: when it is closed or garbage-collected, or when its own process exits or crashes.

    Functions can't rely on state from earlier calls: each process has its own.
    """

    def __init__(
        self,
        functions: Mapping[str, str],
        *,
        workers: int = 2,
        limits: Limits | None = None,
        retries: int = 0,
        task: TaskSource | None = None,
    ) -> None:
        """`retries`: how often a call is made again if a server that it asks is away. `task`: see `Start`."""
        self._start = Start(functions=dict(functions), limits=limits or Limits(), task=task)
        self._retries = retries
        self._numbers = count(1)
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._slots = asyncio.Semaphore(workers)
        self._close = weakref.finalize(self, _kill_all, self._all)

    @property
    def pids(self) -> list[int]:
        """The ids of the processes that are running now."""
        return sorted(worker.pid for worker in self._all if worker.running)

    async def call(self, name: str, /, *arguments: Any, **named: Any) -> Any:
        """What the function returns for these arguments. The wait for a free process has no time limit.

        Raises RuntimeError with one line if the function raised, ConnectionError if that `is_away`, RolloutError if it
        returned something that isn't JSON (such as a number that isn't finite), TimeoutError, MemoryError, ChildProcessError
        if its process died, and EnvironmentSetupError if no process can be started.
        """
        return await retried(partial(self._call, name, arguments, named), self._retries)

    async def _call(self, name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        async with self._slots:
            worker = self._take_idle() or await self._start_worker()
            try:
                call = FunctionCall(number=next(self._numbers), name=name, arguments=arguments, named=named)
                reply = await worker.ask(call, self._start.limits.timeout_s)
            except BaseException as error:
                ended = ""
                try:
                    if isinstance(error, TimeoutError):
                        ended = f"{await worker.line()}; its process was ended"
                finally:
                    worker.kill()
                if isinstance(error, CALL_ENDED):
                    raise type(error)(f"{name} ({Path(self._start.functions[name]).name}): {error}{ended}") from None
                raise
            self._idle.append(worker)
        if reply.outcome == "returned":
            return reply.value
        kinds = {"bad_value": RolloutError, "away": ConnectionError}
        raise kinds.get(reply.outcome, RuntimeError)(reply.error)

    def close(self) -> None:
        """Kill all processes. Idempotent."""
        self._close()

    def _take_idle(self) -> _Worker | None:
        """An idle process that is still running, if there is one."""
        while self._idle:
            worker = self._idle.pop()
            if worker.running:
                return worker
            worker.kill()
        return None

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
            reply = await worker.ask(None, self._start.limits.start_timeout_s)
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


class RewardLimits(BaseModel, from_attributes=True):
    """The attributes of a class that are the limits of its reward."""

    reward_workers: Count
    reward_timeout_s: Positive
    reward_retries: Natural
    reward_memory_mb: Count
    reward_writes: tuple[str, ...] | None


def reward_pool(task: Task, kind: str, args: Mapping[str, Any], tokenizer: Tokenizer, seed: int) -> FunctionPool:
    """A pool with the function `reward`, which is that of an instance of the user's class.

    Raises EnvironmentSetupError for limits that are none, and for arguments that can't be sent to a process.
    """
    try:
        limits = RewardLimits.model_validate(task)
    except ValidationError as error:
        wrong = error.errors()[0]
        raise EnvironmentSetupError(f"environment {kind}: its attribute {wrong['loc'][0]}: {wrong['msg']}") from error
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
        msgspec.json.encode(source)
    except TypeError as error:
        raise EnvironmentSetupError(
            f"environment.args of {kind} are not JSON, so no other process can have them ({error}); use JSON, or set "
            "`isolate_reward = False` in the class"
        ) from error
    return FunctionPool(
        {"reward": kind},
        workers=limits.reward_workers,
        limits=Limits(
            timeout_s=limits.reward_timeout_s,
            memory_mb=limits.reward_memory_mb,
            start_timeout_s=START_TIMEOUT_S,
            writes=limits.reward_writes,
        ),
        retries=limits.reward_retries,
        task=source,
    )


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
        until_s = time.monotonic() + timeout_s
        unsent = memoryview(msgspec.json.encode(call) + b"\n" if call else b"")
        line = bytearray()
        while unsent or not line.endswith(b"\n"):
            try:
                if unsent:
                    unsent = unsent[self._socket.send(unsent) :]
                    continue
                received = self._socket.recv(1 << 16)
            except BlockingIOError:
                if not await self._ready(until_s, writing=bool(unsent)):
                    raise TimeoutError(f"it took longer than {timeout_s:g} s") from None
                continue
            except OSError:
                received = b""
            if not received:
                raise await self._exit_error()
            line += received
            if len(line) > MAX_REPLY_BYTES:
                raise ChildProcessError(f"it replied with more than {MAX_REPLY_BYTES} bytes")
        try:
            reply = msgspec.json.decode(line, type=Reply)
        except INVALID_DATA:
            raise ChildProcessError("it wrote something to the pool's socket that is not a reply") from None
        if reply.number != (number := call.number if call else 0):
            raise ChildProcessError(f"it replied to call {reply.number}, but was asked {number}")
        return reply

    async def line(self) -> str:
        """Where the call is, as in ", in line 9"; "" if the process does not answer, as while no Python code runs."""
        self.send_signal(LINE_SIGNAL)
        try:
            return (await self.ask(None, LINE_TIMEOUT_S)).error
        except CALL_ENDED:
            return ""

    def kill(self) -> None:
        super().kill()
        self._socket.close()

    async def _ready(self, until_s: float, *, writing: bool) -> bool:
        """Wait until the socket is ready. If it is, it does not matter that the event loop came late."""
        loop = asyncio.get_running_loop()
        add, remove = (loop.add_writer, loop.remove_writer) if writing else (loop.add_reader, loop.remove_reader)
        ready = loop.create_future()
        add(self._socket, lambda: None if ready.done() else ready.set_result(None))
        try:
            await asyncio.wait({ready}, timeout=max(0.0, until_s - time.monotonic()))
        finally:
            remove(self._socket)
        return ready.done()

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
