"""A deadline for user code: environments and rewards must not be able to block the run.

`asyncio` can cancel a coroutine that awaits for too long, but not one that computes or sleeps without awaiting, which blocks
the thread and with it the engine. So while rollouts are open, a timer sends SIGALRM a few times a second. If the handler
finds that it interrupts user code (`IN_ROLLOUT` is set in its context) that has not yielded to the event loop for too long,
it raises CodeDeadlineError in that code.

Signals reach only the main thread of a POSIX process. Elsewhere there is no deadline, and `deadlines_work()` returns False.
A call into C code that does not return to the interpreter can't be interrupted; the run's watchdog handles that case.
"""

from __future__ import annotations

import asyncio
import os
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

from pipelinerl.errors import CodeDeadlineError

T = TypeVar("T")

IN_ROLLOUT: ContextVar[CodeDeadline | None] = ContextVar("IN_ROLLOUT", default=None)
"""The deadline of the user code that runs in this context. Tasks that the code starts inherit it."""

TICK_S = 0.25
"""Longest interval of the timer. Code that swallows the error and continues gets it again at the next tick."""
GRACE_S = 1.0
"""Time that cancelled code has to end."""
SLOW_S = 2.0
"""Code that has blocked the thread for this long is reported while it runs."""
GIVE_UP_AFTER = 4
"""After this many interruptions without a successful rollout, the code is no longer run."""


class CodeGivenUpError(CodeDeadlineError):
    """Raised instead of running code that has exceeded the deadline every time."""


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
    """Interrupts user code that blocks the thread for longer than `code_timeout_s`.

    The previous signal handler, timer and task factory are restored when no user code is open any more. If the previous
    timer is due before, its handler is called. A process can use one alarm at a time.

    `on_slow` is called at each tick while code runs for longer than `SLOW_S`, with a message that says where it is. With
    `gives_up`, code that was `stuck` `GIVE_UP_AFTER` times before `worked` was set gets a CodeGivenUpError instead of being
    run. It is stuck if it is interrupted and no code has got further, by the number of times that it was resumed: a few
    problems that take too long say nothing about the others.
    """

    def __init__(
        self, code_timeout_s: float, *, gives_up: bool = False, on_slow: Callable[[str], object] | None = None
    ) -> None:
        self.on_slow = on_slow
        self.interruptions = 0
        self.worked = False
        self.stuck = 0
        self._turn, self._furthest = 0, -1  # of the code that is running; of all code that was not interrupted
        self._seconds = code_timeout_s
        self._patience = GIVE_UP_AFTER if gives_up else inf
        self._began_s = inf  # when the user code that is running was resumed; inf while none is
        self._interrupted_s = inf  # `_began_s` of the code that was interrupted last
        self._interrupted = ""
        self._open = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outer_factory: Any = None
        self._outer_handler: Any = None
        self._outer_due_s, self._outer_repeat_s = inf, 0.0

    def call(self, function: Callable[[], T]) -> T:
        """Call `function` under the alarm. Raises CodeDeadlineError inside it, and RuntimeError if it calls `sys.exit`.

        A child process that the code forked ends where the code does.
        """
        with self.applied(CodeDeadline(self)):
            return self.resume(function)

    def resume(self, step: Callable[..., T], *arguments: Any, turn: int = 0, ending: bool = False) -> T:
        """Run user code until it returns or yields to the event loop. What ends it also runs if it has been given up."""
        if self.stuck >= self._patience and not self.worked and not ending:
            raise CodeGivenUpError(f"{self._interrupted} (every time so far: it is no longer run)")
        self._began_s = began_s = monotonic()
        self._turn, process = turn, os.getpid()
        try:
            return step(*arguments)
        except SystemExit as error:  # would propagate through the event loop and end the process
            raise RuntimeError(f"the code called sys.exit({error.code!r})") from error
        except KeyboardInterrupt as error:
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # perhaps the user's Ctrl-C
                raise
            raise RuntimeError("the code raised KeyboardInterrupt") from error
        finally:
            self._began_s = inf
            if os.getpid() != process:
                os._exit(1)
            if self._interrupted_s != began_s:
                self._furthest = max(self._furthest, turn)

    @contextmanager
    def applied(self, deadline: CodeDeadline, loop: asyncio.AbstractEventLoop | None = None) -> Iterator[None]:
        """Code inside is user code, with `deadline`. Tasks that it creates in `loop` belong to the deadline."""
        token = IN_ROLLOUT.set(deadline)
        self._open += 1
        try:
            self._install(loop)
            yield
        finally:
            self._open -= 1
            if self._open == 0:
                self._restore()
            IN_ROLLOUT.reset(token)

    def _install(self, loop: asyncio.AbstractEventLoop | None) -> None:
        if loop is not None and loop is not self._loop:
            self._loop, self._outer_factory = loop, loop.get_task_factory()
            loop.set_task_factory(self._create_task)
        if not deadlines_work():
            return
        if self._outer_handler is None:
            outer_s, self._outer_repeat_s = signal.setitimer(signal.ITIMER_REAL, 0)
            self._outer_due_s = monotonic() + outer_s if outer_s else inf
            self._outer_handler = signal.signal(signal.SIGALRM, self._on_alarm) or signal.SIG_DFL
        tick_s = max(min(TICK_S, self._seconds / 4), 0.001)
        signal.setitimer(signal.ITIMER_REAL, tick_s, tick_s)  # also if it is on: user code may have stopped it

    def _restore(self) -> None:
        if self._loop is not None:
            self._loop.set_task_factory(self._outer_factory)
            self._loop = None
        if self._outer_handler is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._outer_handler)
            self._outer_handler = None
            if self._outer_due_s < inf:
                left_s = max(self._outer_due_s - monotonic(), 1e-6)
                signal.setitimer(signal.ITIMER_REAL, left_s, self._outer_repeat_s)

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        now_s = monotonic()
        if now_s >= self._outer_due_s:
            self._outer_due_s = now_s + self._outer_repeat_s if self._outer_repeat_s else inf
            if callable(self._outer_handler):
                self._outer_handler(number, frame)
        ran_s = now_s - self._began_s
        if IN_ROLLOUT.get() is None or ran_s < min(self._seconds, SLOW_S):
            return
        from pipelinerl.actor.failures import place_of  # noqa: PLC0415 - most code is quick

        where = place_of(frame, __file__)
        if ran_s >= self._seconds:
            if self._interrupted_s != self._began_s:  # otherwise it is the same code, which swallowed the error
                self._interrupted_s = self._began_s
                self.interruptions += 1
                self.stuck += self._turn > self._furthest
            self._interrupted = f"the code ran for {self._seconds:g} s without yielding, {where}"
            raise CodeDeadlineError(self._interrupted)
        if self.on_slow is not None:
            times = f"; interrupted {self.interruptions} times before" if self.interruptions else ""
            with own_code():  # no signal is handled meanwhile
                self.on_slow(f"environment code has run for {ran_s:.0f} s without yielding, {where}{times}")

    def _create_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> Any:
        """Task factory: creates tasks like the outer factory, but those of user code under its deadline."""
        deadline = IN_ROLLOUT.get() if self._began_s < inf else None
        if deadline is not None:
            coroutine = deadline.guard(coroutine)
        outer = self._outer_factory
        task = outer(loop, coroutine, **options) if outer else asyncio.Task(coroutine, loop=loop, **options)
        if deadline is not None:
            deadline.tasks.add(task)
            task.add_done_callback(deadline.tasks.discard)
        return task


class CodeDeadline:
    """Runs one coroutine, and the tasks that it starts, under the deadline of `alarm`."""

    def __init__(self, alarm: CodeAlarm) -> None:
        self.tasks: set[asyncio.Task[Any]] = set()
        self._alarm = alarm
        self._ended = self._closing = False

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await `coroutine` in the current task.

        Between two awaits, the coroutine must not block the thread for longer than the alarm allows. The same holds for
        tasks that it starts, which are cancelled when it ends. Raises CodeDeadlineError, RuntimeError for code that calls
        `sys.exit`, and whatever the coroutine raises.
        """
        task: Any = asyncio.current_task()
        self.tasks.add(task)
        try:
            return await self.guard(coroutine)
        finally:
            self.tasks.discard(task)
            self.end()

    def end(self) -> None:
        """Cancel the coroutine and its tasks. Those that have not ended `GRACE_S` later are closed and not resumed again."""
        self._ended = True
        for task in tuple(self.tasks):
            task.cancel()

    async def guard(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await `coroutine`, one of those under this deadline."""
        with self._alarm.applied(self, asyncio.get_running_loop()):
            return await self._drive(coroutine)

    @types.coroutine
    def _drive(self, coroutine: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
        """As `await coroutine`, but resumes it through the alarm, and ends even if it refuses to be cancelled."""
        resume = self._alarm.resume
        step: Callable[..., Any] = coroutine.send
        argument: BaseException | None = None
        turn = 0  # a call of a function has none
        while True:
            turn += 1
            try:
                waits_on = resume(step, argument, turn=turn)
            except StopIteration as end:
                result: T = end.value
                return result
            except CodeDeadlineError:
                # Usually the error was raised inside the coroutine and has ended it. But if the signal came just after
                # the coroutine yielded, it is still suspended and is closed here.
                resume(coroutine.close, ending=True)
                raise
            try:
                yield waits_on
                step, argument = coroutine.send, None
            except BaseException as error:
                if isinstance(error, asyncio.CancelledError):
                    if self._closing:
                        with suppress(RuntimeError, CodeDeadlineError):  # if it refuses this, too, it is left suspended
                            resume(coroutine.close, ending=True)
                        raise
                    asyncio.get_running_loop().call_later(GRACE_S, self._close_if_refused)
                step, argument = coroutine.throw, error

    def _close_if_refused(self) -> None:
        """Close code that has not ended after its cancellation, unless the deadline goes on and the code was uncancelled.

        Otherwise code that ignores cancellation would live as long as the event loop and keep it from closing.
        """
        if self._ended or any(task.cancelling() for task in self.tasks):
            self._closing = True
            self.end()
