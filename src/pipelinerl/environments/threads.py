"""Calls of code that isn't ours in threads, where it may never return."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

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
