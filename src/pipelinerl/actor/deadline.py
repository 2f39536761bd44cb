"""A deadline for code that isn't ours: environments and rewards must not be able to stop the run.

`asyncio` can end a coroutine that awaits for too long, but not one that computes or sleeps without awaiting: that one
holds the thread, and the engine with it. Here the coroutine is driven by hand, one `send` at a time, and while it holds
the thread a timer (SIGALRM) is armed that raises `CodeDeadlineError` inside it.

Signals reach the main thread of a POSIX process only. Elsewhere the code runs without this deadline, and
`deadlines_work()` says so. A single call into C code that never returns to the interpreter can't be interrupted; the
run's watchdog is there for that.
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

_NOT_THE_USERS = (
    str(Path(__file__).parents[1]),
    *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    "<frozen",
)
"""Where code lies that is not the user's: this package, Python's library, installed packages."""

REPEAT_S = 0.25
"""Code that swallows the error, and goes on, gets it again after this long."""


GRACE_S = 1.0
"""How long code may take to end once it is cancelled."""


SLOW_S = 2.0
"""Code that has held the thread for this long is reported while it runs."""
GIVE_UP_AFTER = 4
"""So many interruptions before the first rollout that works, and none of the code is run any more."""


class CodeDeadlineError(BaseException):
    """Raised inside code that holds the thread for too long. Not an `Exception`, so that `except Exception` lets it pass."""


class CodeGivenUpError(CodeDeadlineError):
    """Raised in place of code that has never done anything but hold the thread."""


def deadlines_work() -> bool:
    """Whether code that doesn't yield can be interrupted: in the main thread, where the system has interval timers."""
    return hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()


class CodeAlarm:
    """The timer that interrupts code that holds the thread for longer than `code_timeout_s`.

    Handler and timer are put back after each call; with `stays` only by `release`, which saves most of a call's cost. In
    between the timer runs on unheard, until the next call sets it anew.

    `on_slow` is told, a few times a second, of code that runs for longer than `SLOW_S`, with its place. With `gives_up`,
    code that was interrupted `GIVE_UP_AFTER` times before anything `worked` is not run any more: each call raises at once.
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
        self._ringing = False
        self._installed = False
        self._runs_on = False
        self._previous: Any = signal.SIG_DFL

    def call(self, step: Callable[[], T]) -> T:
        """Run `step` with the timer armed. Raises CodeDeadlineError in it, and RuntimeError if it calls `sys.exit`."""
        if self._gives_up and not self.worked and self.interruptions >= GIVE_UP_AFTER:
            raise CodeGivenUpError(f"{self._interrupted} (as often as it was tried: it is not run any more)")
        try:
            return self._timed(step) if self._works else step()
        except SystemExit as error:  # would pass through the event loop and end the process
            raise RuntimeError(f"the code called sys.exit({error.code!r})") from error

    def release(self) -> None:
        """Put the signal's handler back as it was."""
        if self._runs_on:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._runs_on = False
        if self._installed:
            signal.signal(signal.SIGALRM, self._previous)
            self._installed = False

    def _timed(self, step: Callable[[], T]) -> T:
        if not self._installed:
            self._previous = signal.signal(signal.SIGALRM, self._ring) or signal.SIG_DFL
            self._installed = True
        self._began_s = time.monotonic()
        first_s = self._seconds if self._on_slow is None else min(self._seconds, SLOW_S)
        outer_s, outer_repeat_s = signal.setitimer(signal.ITIMER_REAL, first_s, REPEAT_S)
        if self._runs_on:
            outer_s, self._runs_on = 0.0, False
        started = time.monotonic() if outer_s else 0.0
        try:
            try:
                self._armed = True
                return step()
            finally:
                self._armed = False
        finally:  # of its own, because the timer may strike in the line above: after `step`, and before it is disarmed
            self._armed = False
            if self._stays and not outer_s:
                self._runs_on = True
            else:
                self._put_back(outer_s and max(outer_s - (time.monotonic() - started), 1e-6), outer_repeat_s)

    def _put_back(self, outer_s: float, outer_repeat_s: float) -> None:
        """Stop the timer, or have somebody else's go on where it was."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        if not self._stays:
            self.release()
        if outer_s:
            signal.setitimer(signal.ITIMER_REAL, outer_s, outer_repeat_s)

    def _ring(self, _signal: int, frame: FrameType | None) -> None:
        if not self._armed or self._ringing:  # it repeats: a signal that comes while this one is handled is not missed
            return
        self._ringing = True
        try:
            self._handle(frame)
        finally:
            self._ringing = False

    def _handle(self, frame: FrameType | None) -> None:
        ran_s = time.monotonic() - self._began_s
        if self._on_slow is not None and ran_s < 0.99 * self._seconds:
            times = f"; interrupted {self.interruptions} times before" if self.interruptions else ""
            self._on_slow(f"code of the environment has run for {ran_s:.0f} s without yielding, {place_of(frame)}{times}")
            return
        if ran_s < self._seconds + REPEAT_S:  # later: the same code again, which has swallowed the error
            self.interruptions += 1
        self._interrupted = f"the code ran for {self._seconds:g} s without yielding, {place_of(frame)}"
        raise CodeDeadlineError(self._interrupted)


def place_of(frame: FrameType | None) -> str:
    """Where a user's code is, `in Task.reward (task.py, line 9)`: the outermost of its frames, or the innermost of all."""
    place = frame
    while frame is not None and frame.f_code.co_filename != __file__:
        if not frame.f_code.co_filename.startswith(_NOT_THE_USERS):
            place = frame
        frame = frame.f_back
    if place is None:
        return "in no Python code"
    code = place.f_code
    return f"in {code.co_qualname} ({Path(code.co_filename).name}, line {place.f_lineno})"


class CodeDeadline:
    """Runs one coroutine, and whatever tasks it starts, under the deadline of `alarm`."""

    def __init__(self, alarm: CodeAlarm) -> None:
        self._alarm = alarm
        self._task: asyncio.Task[Any] | None = None
        self._started: set[asyncio.Task[Any]] = set()
        self._outer_factory: Any = None
        self._watched = False
        self.closing = False

    async def run(self, coroutine: Coroutine[Any, Any, T], task: asyncio.Task[Any] | None = None) -> T:
        """Await `coroutine` in `task`, the current one.

        No stretch of it between two awaits may hold the thread for longer than the alarm allows.
        Tasks that it starts are bound likewise, and are cancelled when it ends. Costs a few microseconds a resumption.
        Raises CodeDeadlineError, and RuntimeError for code that calls `sys.exit`; else what the coroutine raises.
        """
        self._task = task or asyncio.current_task()
        try:
            return await self._guard(coroutine)
        finally:
            self._task = None
            self.end()

    def end(self) -> None:
        """Cancel what still runs. What has not ended `GRACE_S` later is closed, and not resumed again.

        Else code that refuses to be cancelled would live as long as the event loop, and keep it from closing.
        """
        if self._cancel():
            asyncio.get_running_loop().call_later(GRACE_S, self._close)

    def close_if_refused(self) -> None:
        """Somebody cancelled the code. Unless it has given way, or taken it back, `GRACE_S` later, it is closed."""
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
        return await _Resumptions(coroutine, self)

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
        """What makes the tasks that the code starts: as they would be made, but under the deadline."""
        guarded, factory = self._guard(coroutine), self._outer_factory
        made = factory(loop, guarded, **options) if factory else asyncio.Task(guarded, loop=loop, **options)
        task = cast("asyncio.Task[Any]", made)
        self._started.add(task)
        task.add_done_callback(self._started.discard)
        return task

    def call(self, step: Callable[[], T]) -> T:
        return self._alarm.call(step)


class _Resumptions(Generic[T]):
    """Awaits a coroutine the way `await` does, with every resumption under the deadline."""

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
                # It usually came from within the coroutine, which has ended with it. But the timer may have struck on
                # the way back from it, between its last line and ours: then it is suspended and is ended here.
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
                    with suppress(RuntimeError, CodeDeadlineError):  # it refuses this too: then it is just left suspended
                        deadline.call(coroutine.close)
                    raise


def _send(coroutine: Coroutine[Any, Any, Any]) -> Callable[[], Any]:
    return lambda: coroutine.send(None)


def _throw(coroutine: Coroutine[Any, Any, Any], error: BaseException) -> Callable[[], Any]:
    return lambda: coroutine.throw(error)
