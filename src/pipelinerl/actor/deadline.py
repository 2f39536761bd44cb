"""A deadline for user code: environments and rewards must not be able to block the run.

`asyncio` can cancel a coroutine that awaits for too long, but not one that computes or sleeps without awaiting, which blocks
the thread and with it the engine. So while rollouts are open, a timer sends SIGALRM a few times a second. If its handler
finds that the same user code has held the thread for too long, it raises CodeDeadlineError in that code.

Signals reach only the main thread of a POSIX process. Elsewhere there is no deadline, and `deadlines_work()` returns False.
A call into C code that does not return to the interpreter can't be interrupted; the run's watchdog handles that case.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import types
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from math import inf
from time import monotonic
from types import FrameType
from typing import Any, TypeVar

from pipelinerl.actor.failures import place_of
from pipelinerl.errors import CodeDeadlineError

T = TypeVar("T")

IN_ROLLOUT: ContextVar[object | None] = ContextVar("IN_ROLLOUT", default=None)
"""Identifies the rollout whose user code runs in this context, also in tasks that the code starts; None: no user code."""

TICK_S = 0.25
"""Longest interval of the timer. Code that swallows the error and continues gets it again at the next tick."""
GRACE_S = 1.0
"""Time that cancelled code has to end."""
PATIENCE = 4
"""After interruptions in this many rollouts without a successful one, code has `TICK_S` to yield."""


def deadlines_work() -> bool:
    """Whether code that does not yield can be interrupted: only in the main thread of a system with interval timers."""
    return hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()


@contextmanager
def own_code() -> Iterator[None]:
    """For code of this package that user code calls: it is not interrupted, so that no request is submitted by half."""
    token = IN_ROLLOUT.set(None)
    try:
        yield
    finally:
        IN_ROLLOUT.reset(token)


class CodeAlarm:
    """Runs user code, and interrupts code that holds the thread for longer than `code_timeout_s` without yielding.

    The previous signal handler and timer are restored when no user code is open any more. A process can use one alarm at a
    time. Its owner sets `worked` when a rollout has succeeded: until then, code that is always stuck costs `PATIENCE` times
    the deadline, and little more.
    """

    def __init__(self, code_timeout_s: float) -> None:
        self.worked = False
        self._seconds = code_timeout_s
        self._interrupted: object = None  # the last rollout whose code was interrupted
        self._interruptions = 0  # of different rollouts: code that swallows the error gets it at every tick
        self._open = 0
        self._outer: tuple[Any, tuple[float, float]] | None = None
        self._holder: object = None  # rollout and task that have held the thread since `_since_s`
        self._since_s = inf

    def call(self, function: Callable[[], T]) -> T:
        """Call a function of the user. Raises CodeDeadlineError inside it."""
        with self._applied():
            return function()

    @contextmanager
    def _applied(self) -> Iterator[None]:
        """Code inside is user code of one rollout."""
        token = IN_ROLLOUT.set(object())
        self._open += 1
        try:
            self._install()
            yield
        finally:
            self._open -= 1
            if self._open == 0 and self._outer is not None:
                handler, timer = self._outer
                signal.setitimer(signal.ITIMER_REAL, *timer)
                signal.signal(signal.SIGALRM, handler)
                self._outer = None
            IN_ROLLOUT.reset(token)

    @types.coroutine
    def run(self, coroutine: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
        """Await a coroutine of the user in the current task, which may start other tasks.

        Code that refuses to be cancelled is closed after `GRACE_S`: no event loop could be closed otherwise. Raises
        CodeDeadlineError, and what the coroutine raises.
        """
        task: Any = asyncio.current_task()
        refused = False

        def insist() -> None:
            nonlocal refused
            if task.cancelling():  # not so if the code has cancelled itself to limit the time of a part
                refused = True
                task.cancel()

        step: Callable[..., Any] = coroutine.send
        argument: BaseException | None = None
        with self._applied():
            while True:
                try:
                    waits_on = step(argument)
                except StopIteration as end:
                    result: T = end.value
                    return result
                except CodeDeadlineError:
                    coroutine.close()
                    raise
                try:
                    yield waits_on
                    step, argument = coroutine.send, None
                except BaseException as error:
                    if refused:
                        with suppress(RuntimeError, CodeDeadlineError):  # if it refuses this, too, it is left suspended
                            coroutine.close()
                        raise
                    if isinstance(error, asyncio.CancelledError):
                        asyncio.get_running_loop().call_later(GRACE_S, insist)
                    step, argument = coroutine.throw, error

    def _install(self) -> None:
        """Start the timer, also if it is on: user code may have stopped it."""
        if not deadlines_work():
            return
        tick_s = max(min(TICK_S, self._seconds / 4), 0.001)
        timer = signal.setitimer(signal.ITIMER_REAL, 0)
        if self._outer is None:
            self._outer = signal.signal(signal.SIGALRM, self._on_alarm) or signal.SIG_DFL, timer
        signal.setitimer(signal.ITIMER_REAL, tick_s, tick_s)

    def _on_alarm(self, _: int, frame: FrameType | None) -> None:
        """Note which code holds the thread, or interrupt it.

        A task runs at most once in a pass of the event loop. So if the task is the same and the loop has not begun another
        pass, the code has not yielded.
        """
        rollout, now_s = IN_ROLLOUT.get(), monotonic()
        if rollout is None:
            self._holder = None
            return
        try:
            loop, task = asyncio.get_running_loop(), asyncio.current_task()
        except RuntimeError:
            loop, task = None, None
        seconds = self._seconds if self.worked or self._interruptions < PATIENCE else min(self._seconds, TICK_S)
        if self._holder != (rollout, task):
            self._holder, self._since_s = (rollout, task), now_s
            if loop is not None:
                loop.call_soon(self._yielded)
        elif now_s - self._since_s >= seconds:
            self._interruptions += rollout is not self._interrupted
            self._interrupted = rollout
            raise CodeDeadlineError(f"the code ran for {seconds:g} s without yielding, {place_of(frame, __file__)}")

    def _yielded(self) -> None:
        self._holder = None
