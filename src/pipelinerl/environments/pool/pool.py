"""A few processes in which functions of a user run under limits, awaited from the event loop that generates."""

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

CLOSING_S = 2.0


class FunctionPool:
    """Calls functions (`path/to/file.py:function` or `package.module:function`) by name, in up to `workers` processes.

    A process is started when a call finds none free, and imports all the files. Arguments and results are JSON. A call that
    takes too long, needs too much memory or brings its process down costs that process, and nothing else. The processes end
    with the pool: when it is closed or forgotten, or its own process ends, in whatever way.

    Functions keep no state from call to call that others could count on: each process has its own.
    """

    def __init__(self, functions: Mapping[str, str], *, workers: int = 2, limits: Limits | None = None) -> None:
        self._functions = dict(functions)
        self._workers = workers
        self._limits = limits or Limits()
        self._numbers = count(1)
        self._idle: list[WorkerProcess] = []
        self._all: set[WorkerProcess] = set()
        self._places: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
        self._close = weakref.finalize(self, _end_all, self._all)

    @property
    def pids(self) -> list[int]:
        """Of the processes that are there now."""
        return sorted(worker.pid for worker in self._all if not worker.gone())

    async def call(self, name: str, *arguments: Any) -> Any:
        """What the function returns for these arguments. Other calls may be waited for before; that has no bound here.

        Raises RuntimeError with one line for what it raised, RolloutError if it returned something that isn't JSON (or not a
        finite number), TimeoutError, MemoryError, ChildProcessError if its process died, and EnvironmentSetupError if no
        process can be started.
        """
        loop = asyncio.get_running_loop()
        async with self._places.setdefault(loop, asyncio.Semaphore(self._workers)):
            worker = self._free() or await self._started()
            try:
                call = Call(number=next(self._numbers), name=name, arguments=arguments)
                reply = await worker.ask(call, self._limits.timeout_s)
            except BaseException as error:  # noqa: BLE001 - cancelled, too: nobody waits for what it is doing
                worker.kill()
                raise _named(error, name, self._limits) from None
            self._idle.append(worker)
        return _result(reply)

    def close(self) -> None:
        """End all processes. Twice is fine."""
        self._close()

    def _free(self) -> WorkerProcess | None:
        """One that waits for a call, and has not ended over it."""
        while self._idle:
            worker = self._idle.pop()
            if not worker.gone():
                return worker
            worker.kill()
        return None

    async def _started(self) -> WorkerProcess:
        """A new process that is ready for calls."""
        if not self._close.alive:
            raise RuntimeError("the pool is closed")
        self._all -= {worker for worker in self._all if worker.gone()}
        try:
            worker = WorkerProcess(self._functions, self._limits)
        except OSError as error:
            raise EnvironmentSetupError(f"can't start a process for {_list(self._functions)}: {error}") from error
        self._all.add(worker)
        try:
            reply = await worker.reply(0, time.monotonic() + self._limits.start_timeout_s)
        except BaseException as error:
            worker.kill()
            if isinstance(error, TimeoutError):
                error = TimeoutError(f"nothing came of it in {self._limits.start_timeout_s:g} s")
            if isinstance(error, OSError | MemoryError):
                raise EnvironmentSetupError(f"can't import {_list(self._functions)}: {error}") from None
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


def _named(error: BaseException, name: str, limits: Limits) -> BaseException:
    """The same error with the function's name."""
    if isinstance(error, TimeoutError):
        return TimeoutError(f"{name}: {str(error) or f'it took longer than {limits.timeout_s:g} s'}; its process was ended")
    return type(error)(f"{name}: {error}") if isinstance(error, MemoryError | ChildProcessError) else error


def _list(functions: Mapping[str, str]) -> str:
    return ", ".join(functions.values())


def _end_all(workers: set[WorkerProcess]) -> None:
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.wait(CLOSING_S)
    workers.clear()
