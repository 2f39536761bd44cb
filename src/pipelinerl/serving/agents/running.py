"""Runs the code of agents, each attempt in its own thread, so that none blocks the engine."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from pipelinerl.environments.user.code import describe


class AgentThreads:
    """Calls `function`, plain or `async def`, in up to `limit` threads at once; further calls wait.

    Threads can't be killed: a plain function that never returns keeps its thread, and counts towards `limit`, until the
    process ends (threads are daemons, so it can end). An `async def` function has its own event loop and can be cancelled.
    """

    def __init__(self, function: Callable[..., Any], spec: str, limit: int) -> None:
        """`spec` is the function's name, for messages."""
        self._function = function
        self._spec = spec
        self._limit = limit
        self._semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    async def call(self, *arguments: Any) -> Any:
        """The function's result. Raises RuntimeError, with a one-line message, if the function raised.

        Cancelling this cancels an async function. A plain one runs on, but its calls of the model are refused.
        """
        semaphore = self._semaphores.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._limit))
        await semaphore.acquire()
        run = _Run(self._function, arguments, semaphore)
        try:
            return await run.result
        except asyncio.CancelledError:
            run.cancel()
            raise
        except Exception as error:
            raise RuntimeError(f"{self._spec}: {describe(error, self._spec)}") from error


class _Run:
    """One call in progress. `semaphore` is released when the thread ends."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...], semaphore: asyncio.Semaphore) -> None:
        self._function = function
        self._arguments = arguments
        self._semaphore = semaphore
        self._loop = asyncio.get_running_loop()
        self._inner: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self._cancelled = False
        self.result: asyncio.Future[Any] = self._loop.create_future()
        threading.Thread(target=self._run, name="agent", daemon=True).start()

    def cancel(self) -> None:
        self._cancelled = True
        if self._inner is not None:
            loop, task = self._inner
            with suppress(RuntimeError):  # its loop has been closed meanwhile
                loop.call_soon_threadsafe(task.cancel)

    # ---- the agent's thread

    def _run(self) -> None:
        value: Any = None
        error: Exception | None = None
        try:
            is_async = inspect.iscoroutinefunction(self._function)
            value = asyncio.run(self._main()) if is_async else self._function(*self._arguments)
        except Exception as raised:  # noqa: BLE001 - user code: raised where the result is awaited
            error = raised
        except BaseException as raised:  # noqa: BLE001 - the same: `sys.exit` must end only this call
            error = RuntimeError(f"it raised {type(raised).__name__}")
        with suppress(RuntimeError):  # the loop is closed, so no task awaits the result
            self._loop.call_soon_threadsafe(self._end, value, error)

    async def _main(self) -> Any:
        task = asyncio.current_task()
        if task is not None:
            self._inner = (asyncio.get_running_loop(), task)
        if self._cancelled:  # cancelled before the task existed
            raise asyncio.CancelledError
        return await self._function(*self._arguments)

    def _end(self, value: Any, error: Exception | None) -> None:
        self._semaphore.release()
        if self.result.done():
            return
        if error is None:
            self.result.set_result(value)
        elif isinstance(error, StopIteration):  # a future can't hold a StopIteration
            self.result.set_exception(RuntimeError("it raised StopIteration"))
        else:
            self.result.set_exception(error)
