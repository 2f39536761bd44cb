"""Calls user code once when an environment is built, so that its errors appear before the first rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from threading import Thread
from typing import Any, TypeVar

from pipelinerl.errors import EnvironmentSetupError

T = TypeVar("T")


def in_daemon_thread(call: Callable[[], T]) -> Future[T]:
    """Run `call` in a new daemon thread.

    In a thread pool, calls that never return would block other calls and keep the process from exiting.
    """
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # a waiter can be cancelled, but not the call

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised by `Future.result`
            done.set_exception(error)

    Thread(target=run, daemon=True).start()
    return done


def try_out(trial: Coroutine[Any, Any, object], bound_s: float, what: str) -> None:
    """Run `trial` to its end, even if this thread runs an event loop. Raises EnvironmentSetupError if it fails."""
    try:
        in_daemon_thread(lambda: asyncio.run(trial)).result(bound_s)
    except EnvironmentSetupError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything
        reason = str(error) or f"it took longer than {bound_s:g} s"
        raise EnvironmentSetupError(f"tried on {what}, {reason}") from None
