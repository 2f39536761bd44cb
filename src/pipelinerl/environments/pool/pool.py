"""A pool of processes that run user functions under limits, awaited from the event loop of generation."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Mapping
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

from pipelinerl.environments.pool.messages import Call, Limits, Reply
from pipelinerl.environments.pool.process import WorkerProcess
from pipelinerl.errors import EnvironmentSetupError, RolloutError

CLOSE_TIMEOUT_S = 2.0


class FunctionPool:
    """Calls functions (`path/to/file.py:function` or `package.module:function`) by name, in up to `workers` processes.

    A process is started when a call finds none idle, and imports all the files. Arguments and results are JSON. A call that
    takes too long, needs too much memory or crashes its process loses that process and nothing else. The processes end with
    the pool: when it is closed or garbage-collected, or when its own process exits or crashes.

    Functions can't rely on state from earlier calls: each process has its own.
    """

    def __init__(self, functions: Mapping[str, str], *, workers: int = 2, limits: Limits | None = None) -> None:
        self._functions = dict(functions)
        self._workers = workers
        self._limits = limits or Limits()
        self._numbers = count(1)
        self._idle: list[WorkerProcess] = []
        self._all: set[WorkerProcess] = set()
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
        self._close = weakref.finalize(self, _kill_all, self._all)

    @property
    def pids(self) -> list[int]:
        """The ids of the processes that are running now."""
        return sorted(worker.pid for worker in self._all if worker.running)

    async def call(self, name: str, *arguments: Any) -> Any:
        """What the function returns for these arguments. The wait for a free process has no time limit.

        Raises RuntimeError with one line if the function raised, RolloutError if it returned something that isn't JSON (such
        as a number that isn't finite), TimeoutError, MemoryError, ChildProcessError if its process died, and
        EnvironmentSetupError if no process can be started.
        """
        loop = asyncio.get_running_loop()
        async with self._slots.setdefault(loop, asyncio.Semaphore(self._workers)):
            worker = self._take_idle() or await self._start_worker()
            try:
                call = Call(number=next(self._numbers), name=name, arguments=arguments)
                reply = await worker.ask(call, self._limits.timeout_s)
            except BaseException as error:  # noqa: BLE001 - also when cancelled: the result is no longer needed
                worker.kill()
                raise _with_name(error, name, self._limits) from None
            self._idle.append(worker)
        return _result(reply)

    def close(self) -> None:
        """Kill all processes. Idempotent."""
        self._close()

    def _take_idle(self) -> WorkerProcess | None:
        """An idle process that is still running, if there is one."""
        while self._idle:
            worker = self._idle.pop()
            if worker.running:
                return worker
            worker.kill()
        return None

    async def _start_worker(self) -> WorkerProcess:
        """A new process that is ready for calls."""
        if not self._close.alive:
            raise RuntimeError("the pool is closed")
        self._all -= {worker for worker in self._all if not worker.running}
        try:
            worker = WorkerProcess(self._functions, self._limits)
        except OSError as error:
            raise EnvironmentSetupError(f"can't start a process for {_specs(self._functions)}: {error}") from error
        self._all.add(worker)
        try:
            reply = await worker.reply(0, time.monotonic() + self._limits.start_timeout_s)
        except BaseException as error:
            worker.kill()
            if isinstance(error, TimeoutError):
                error = TimeoutError(f"it took longer than {self._limits.start_timeout_s:g} s")
            if isinstance(error, OSError | MemoryError):
                raise EnvironmentSetupError(f"can't import {_specs(self._functions)}: {error}") from None
            raise
        if reply.outcome != "returned":
            worker.kill()
            raise EnvironmentSetupError(reply.error)
        return worker


def _result(reply: Reply) -> Any:
    if reply.outcome == "bad_value":
        raise RolloutError(reply.error)
    if reply.outcome == "raised":
        raise RuntimeError(reply.error)
    return reply.value


def _with_name(error: BaseException, name: str, limits: Limits) -> BaseException:
    """The same error with the function's name in the message."""
    if isinstance(error, TimeoutError):
        return TimeoutError(f"{name}: {str(error) or f'it took longer than {limits.timeout_s:g} s'}; its process was ended")
    return type(error)(f"{name}: {error}") if isinstance(error, MemoryError | ChildProcessError) else error


def _specs(functions: Mapping[str, str]) -> str:
    return ", ".join(functions.values())


def _kill_all(workers: set[WorkerProcess]) -> None:
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.wait(CLOSE_TIMEOUT_S)
    workers.clear()
