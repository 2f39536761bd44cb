"""Calling code that is not ours once, when an environment is built, so that its mistakes are known before a rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from threading import Thread
from typing import Any, TypeVar

from pipelinerl.errors import EnvironmentSetupError

# ------------------------------------------------------------------------------------------------------------------------
# Calls of code that isn't ours in threads, where it may never return.


T = TypeVar("T")


def in_daemon_thread(call: Callable[[], T]) -> Future[T]:
    """What the call comes to, in a thread of its own.

    In a pool's, calls that never return would keep others waiting, and the process from ending.
    """
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # whoever waits may be cancelled, the call can't be

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            done.set_exception(error)

    Thread(target=run, daemon=True).start()
    return done


def try_out(trial: Coroutine[Any, Any, object], bound_s: float, what: str) -> None:
    """Run it now, whether or not a loop runs in this thread. Raises EnvironmentSetupError with what goes wrong."""
    try:
        in_daemon_thread(lambda: asyncio.run(trial)).result(bound_s)
    except EnvironmentSetupError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - code that isn't ours: whatever it raises is said
        reason = str(error) or f"it took longer than {bound_s:g} s"
        raise EnvironmentSetupError(f"tried on {what}, {reason}") from None
