"""A deadline for user code: environments and rewards must not be able to block the run.

`asyncio` can cancel a coroutine that awaits for too long, but not one that computes or sleeps without awaiting, which
blocks the thread and with it the engine. Here the coroutine is driven by explicit `send` calls. During each of them a
timer (SIGALRM) is armed, which raises `CodeDeadlineError` inside the code.

Signals reach only the main thread of a POSIX process. Elsewhere the code runs without this deadline, and
`deadlines_work()` returns False. A call into C code that does not return to the interpreter can't be interrupted; the
run's watchdog handles that case.
"""

from __future__ import annotations

import asyncio
import signal
import sysconfig
import threading
import time
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")

_NOT_USER_CODE = (
    str(Path(__file__).parents[1]),
    *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    "<frozen",
)
"""Paths of code that is not the user's: this package, the standard library, installed packages."""

REPEAT_S = 0.25
"""Code that swallows the error and continues gets it again after this time."""


GRACE_S = 1.0
"""Time that cancelled code has to end."""


SLOW_S = 2.0
"""Code that has blocked the thread for this long is reported while it runs."""
GIVE_UP_AFTER = 4
"""After this many interruptions without a successful rollout, the code is no longer run."""


class CodeDeadlineError(BaseException):
    """Raised in code that blocks the thread for too long. Not an `Exception`, so `except Exception` does not catch it."""


class CodeGivenUpError(CodeDeadlineError):
    """Raised instead of running code that has exceeded the deadline every time."""


def deadlines_work() -> bool:
    """Whether code that does not yield can be interrupted: only in the main thread of a system with interval timers."""
    return hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()


class CodeAlarm:
    """The timer that interrupts code that blocks the thread for longer than `code_timeout_s`.

    The previous signal handler and timer are restored after each call. With `stays`, only `release` restores them, which
    saves most of the cost of a call; between calls the timer keeps running and its signals are ignored.

    `on_slow` is called a few times a second while code runs for longer than `SLOW_S`, with a message that says where it is.
    With `gives_up`, code that was interrupted `GIVE_UP_AFTER` times before `worked` was set is no longer run: each call
    raises CodeGivenUpError at once.
    """

    def __init__(
        self,
        code_timeout_s: float,
        *,
        stays: bool = False,
        gives_up: bool = False,
        on_slow: Callable[[str], object] | None = None,
    ) -> None:
        self._seconds = code_timeout_s
        self._on_slow = on_slow
        self._gives_up = gives_up
        self._began_s = 0.0
        self._interrupted = ""
        self.interruptions = 0
        self.worked = False
        self._works = deadlines_work()
        self._stays = stays
        self._armed = False
        self._handling = False
        self._installed = False
        self._timer_left_on = False
        self._previous: Any = signal.SIG_DFL

    def call(self, step: Callable[[], T]) -> T:
        """Run `step` with the timer armed. Raises CodeDeadlineError inside it, and RuntimeError if it calls `sys.exit`."""
        if self._gives_up and not self.worked and self.interruptions >= GIVE_UP_AFTER:
            raise CodeGivenUpError(f"{self._interrupted} (every time so far: it is no longer run)")
        try:
            return self._timed(step) if self._works else step()
        except SystemExit as error:  # would propagate through the event loop and end the process
            raise RuntimeError(f"the code called sys.exit({error.code!r})") from error

    def release(self) -> None:
        """Stop the timer and restore the previous signal handler."""
        if self._timer_left_on:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._timer_left_on = False
        if self._installed:
            signal.signal(signal.SIGALRM, self._previous)
            self._installed = False

    def _timed(self, step: Callable[[], T]) -> T:
        if not self._installed:
            self._previous = signal.signal(signal.SIGALRM, self._on_alarm) or signal.SIG_DFL
            self._installed = True
        self._began_s = time.monotonic()
        first_s = self._seconds if self._on_slow is None else min(self._seconds, SLOW_S)
        outer_s, outer_repeat_s = signal.setitimer(signal.ITIMER_REAL, first_s, REPEAT_S)
        if self._timer_left_on:
            outer_s, self._timer_left_on = 0.0, False
        started = time.monotonic() if outer_s else 0.0
        try:
            try:
                self._armed = True
                return step()
            finally:
                self._armed = False
        finally:  # a second one, because the timer may fire in the inner `finally`, before it is disarmed
            self._armed = False
            if self._stays and not outer_s:
                self._timer_left_on = True
            else:
                self._restore(outer_s and max(outer_s - (time.monotonic() - started), 1e-6), outer_repeat_s)

    def _restore(self, outer_s: float, outer_repeat_s: float) -> None:
        """Stop our timer, and resume the outer timer, if there was one, with its remaining time."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        if not self._stays:
            self.release()
        if outer_s:
            signal.setitimer(signal.ITIMER_REAL, outer_s, outer_repeat_s)

    def _on_alarm(self, _signal: int, frame: FrameType | None) -> None:
        if not self._armed or self._handling:  # ignored signals are not lost: the timer repeats
            return
        self._handling = True
        try:
            self._handle(frame)
        finally:
            self._handling = False

    def _handle(self, frame: FrameType | None) -> None:
        ran_s = time.monotonic() - self._began_s
        if self._on_slow is not None and ran_s < 0.99 * self._seconds:
            times = f"; interrupted {self.interruptions} times before" if self.interruptions else ""
            self._on_slow(f"environment code has run for {ran_s:.0f} s without yielding, {place_of(frame)}{times}")
            return
        if ran_s < self._seconds + REPEAT_S:  # a later signal is for the same code, which swallowed the error
            self.interruptions += 1
        self._interrupted = f"the code ran for {self._seconds:g} s without yielding, {place_of(frame)}"
        raise CodeDeadlineError(self._interrupted)


def place_of(frame: FrameType | None) -> str:
    """Where user code is, as `in Task.reward (task.py, line 9)`: its outermost frame, or without one the innermost frame."""
    place = frame
    while frame is not None and frame.f_code.co_filename != __file__:
        if not frame.f_code.co_filename.startswith(_NOT_USER_CODE):
            place = frame
        frame = frame.f_back
    if place is None:
        return "in no Python code"
    code = place.f_code
    return f"in {code.co_qualname} ({Path(code.co_filename).name}, line {place.f_lineno})"


class CodeDeadline:
    """Runs one coroutine, and the tasks that it starts, under the deadline of `alarm`."""

    def __init__(self, alarm: CodeAlarm) -> None:
        self._alarm = alarm
        self._task: asyncio.Task[Any] | None = None
        self._started: set[asyncio.Task[Any]] = set()
        self._outer_factory: Any = None
        self._watched = False
        self.closing = False

    async def run(self, coroutine: Coroutine[Any, Any, T], task: asyncio.Task[Any] | None = None) -> T:
        """Await `coroutine` in `task`, which must be the current task.

        Between two awaits, the coroutine must not block the thread for longer than the alarm allows. The same holds for
        tasks that it starts, which are cancelled when it ends. Costs a few microseconds per resumption. Raises
        CodeDeadlineError, RuntimeError for code that calls `sys.exit`, and whatever the coroutine raises.
        """
        self._task = task or asyncio.current_task()
        try:
            return await self._guard(coroutine)
        finally:
            self._task = None
            self.end()

    def end(self) -> None:
        """Cancel the coroutine and its tasks. Those that have not ended `GRACE_S` later are closed and not resumed again.

        Otherwise code that ignores cancellation would live as long as the event loop and keep it from closing.
        """
        if self._cancel():
            asyncio.get_running_loop().call_later(GRACE_S, self._close)

    def close_if_refused(self) -> None:
        """After a cancellation: close the code if it has neither ended nor been uncancelled `GRACE_S` later."""
        if not self._watched:
            self._watched = True
            asyncio.get_running_loop().call_later(GRACE_S, self._close_if_cancelling)

    def _close_if_cancelling(self) -> None:
        self._watched = False
        if any(task.cancelling() for task in (self._task, *self._started) if task is not None):
            self._close()

    def _close(self) -> None:
        self.closing = True
        self._cancel()

    def _cancel(self) -> bool:
        running = [task for task in (self._task, *self._started) if task is not None]
        for task in running:
            task.cancel()
        return bool(running)

    async def _guard(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return await _GuardedAwait(coroutine, self)

    def resume(self, step: Callable[[], T]) -> T:
        """One resumption of a coroutine, in the running loop."""
        loop = asyncio.get_running_loop()
        self._outer_factory = loop.get_task_factory()
        loop.set_task_factory(self._spawn)
        try:
            return self.call(step)
        finally:
            loop.set_task_factory(self._outer_factory)

    def _spawn(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> Any:
        """Task factory for the code: creates tasks like the outer factory, but under the deadline."""
        guarded, factory = self._guard(coroutine), self._outer_factory
        made = factory(loop, guarded, **options) if factory else asyncio.Task(guarded, loop=loop, **options)
        task = cast("asyncio.Task[Any]", made)
        self._started.add(task)
        task.add_done_callback(self._started.discard)
        return task

    def call(self, step: Callable[[], T]) -> T:
        return self._alarm.call(step)


class _GuardedAwait(Generic[T]):
    """Awaits a coroutine as `await` does, with every resumption under the deadline."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], deadline: CodeDeadline) -> None:
        self._coroutine = coroutine
        self._deadline = deadline

    def __await__(self) -> Generator[Any, Any, T]:
        coroutine, deadline = self._coroutine, self._deadline
        error: BaseException | None = None
        while True:
            try:
                waits_on = deadline.resume(_throw(coroutine, error) if error else _send(coroutine))
            except StopIteration as end:
                result: T = end.value
                return result
            except CodeDeadlineError:
                # Usually the error was raised inside the coroutine and has ended it. But if the timer fired just after
                # the coroutine yielded, it is still suspended and is closed here.
                deadline.call(coroutine.close)
                raise
            try:
                yield waits_on
                error = None
            except BaseException as thrown:
                error = thrown
                if isinstance(thrown, asyncio.CancelledError):
                    deadline.close_if_refused()
                if deadline.closing and isinstance(thrown, asyncio.CancelledError):
                    with suppress(RuntimeError, CodeDeadlineError):  # if it refuses this, too, it is left suspended
                        deadline.call(coroutine.close)
                    raise


def _send(coroutine: Coroutine[Any, Any, Any]) -> Callable[[], Any]:
    return lambda: coroutine.send(None)


def _throw(coroutine: Coroutine[Any, Any, Any], error: BaseException) -> Callable[[], Any]:
    return lambda: coroutine.throw(error)
