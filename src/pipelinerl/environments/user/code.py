"""Reads what user code returns and raises, and calls it in a thread."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from pipelinerl.errors import RolloutError
from pipelinerl.types import finite

if TYPE_CHECKING:
    import asyncio
    from concurrent.futures import Future
    from contextlib import AsyncExitStack

T = TypeVar("T")
TOTAL, TURNS = "reward", "turns"
"""Entries of a returned dict: the reward, and the parts of it that the turns earned. The others are metrics."""
UNREACHABLE = (408, 429, 502, 503, 504)
"""Status codes of HTTP servers that may answer later."""
_UNREACHABLE = re.compile("Connect|(API|Read|Write|Pool|Server)Timeout")

# ---- what user code raises and returns


def is_unreachable(error: BaseException | None) -> bool:
    """Whether a call failed because a server can't be reached now, is overloaded, or answered too late for its client.

    Clients wrap such errors in their own, with the cause, the status of the answer, or a telling name.
    """
    while error is not None:
        if isinstance(error, ConnectionError | TimeoutError | socket.gaierror):
            return True
        response = getattr(error, "response", error)
        status = next((got for name in ("status_code", "status", "code") if (got := getattr(response, name, None))), None)
        if status in UNREACHABLE or _UNREACHABLE.search(type(error).__name__):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def plain(value: object) -> object:
    """Scalars of NumPy, torch and similar libraries as floats, also within a dict or list; other values unchanged."""
    if type(value) is dict:
        return {key: plain(entry) for key, entry in value.items()}
    if type(value) is list:
        return [plain(entry) for entry in value]
    if isinstance(value, bool | int | str) or not hasattr(type(value), "__float__"):
        return value
    return float(value)  # type: ignore[arg-type]  # it has `__float__`


def score_of(value: object, name: str) -> tuple[float, dict[str, float]]:
    """The reward and the metrics that the function `name` returned: a number, a dict of a reward and metrics, or both."""
    if isinstance(value, tuple | list) and len(value) == 2 and isinstance(value[1], dict) and TOTAL not in value[1]:
        value = {TOTAL: value[0], **value[1]}
    if not isinstance(value, dict):
        return finite(
            value, f"the result of {name}", f"a number, a dict of {TOTAL!r} and other numbers, or (reward, dict)"
        ), {}
    if TOTAL not in value:
        raise RolloutError(f"{name} returned a dict without {TOTAL!r}; it has {', '.join(map(str, value)) or 'nothing'}")
    metrics = {str(key): finite(entry, f"{name}[{key!r}]") for key, entry in value.items()}
    return metrics.pop(TOTAL), metrics


def turn_rewards_of(value: object, count: int) -> tuple[object, tuple[float, ...] | None]:
    """What a reward returned, without the rewards of the `count` turns if there are any, and these."""
    if not isinstance(value, dict) or TURNS not in value:
        return value, None
    found = value[TURNS]
    if not isinstance(found, list | tuple) or len(found) != count:
        raise RolloutError(f"reward[{TURNS!r}] is {str(found)[:60]}, not a list of {count} numbers, one for each turn")
    rest = {name: entry for name, entry in value.items() if name != TURNS}
    return rest, tuple(finite(entry, f"reward[{TURNS!r}][{number}]") for number, entry in enumerate(found))


# ---- calling user code in a thread. The imports are local because workers, which import this module, need to start fast.


def in_daemon_thread(call: Callable[[], T]) -> Future[T]:
    """Run `call` in a new daemon thread.

    In a thread pool, calls that never return would block other calls and keep the process from exiting.
    """
    from concurrent.futures import Future  # noqa: PLC0415
    from threading import Thread  # noqa: PLC0415

    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # a waiter can be cancelled, but not the call

    def run() -> None:
        try:
            done.set_result(call())
        except StopIteration as error:  # a coroutine can't raise it
            done.set_exception(RuntimeError(f"it raised {error!r}"))
        except BaseException as error:  # noqa: BLE001 - raised by `Future.result`
            done.set_exception(error)

    Thread(target=run, daemon=True).start()
    return done


def loop_in_thread(name: str) -> asyncio.AbstractEventLoop:
    """An event loop that runs in a new daemon thread until it is stopped."""
    import asyncio  # noqa: PLC0415
    from threading import Thread  # noqa: PLC0415

    loop = asyncio.new_event_loop()
    Thread(target=_keep_running, args=(loop,), name=name, daemon=True).start()
    return loop


def _keep_running(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped. `sys.exit` in a task of an agent leaves the loop: it goes on for the others."""
    while True:
        with suppress(KeyboardInterrupt, SystemExit):
            loop.run_forever()
            break
    loop.close()


def end_loop(loop: asyncio.AbstractEventLoop, within_s: float, resources: AsyncExitStack) -> None:
    """Cancel the tasks of a loop from `loop_in_thread`, wait for them, close `resources` there, and stop the loop.

    Waits for at most `within_s`; in the loop's own thread, where the garbage collector may call this, not at all.
    """
    import asyncio  # noqa: PLC0415

    async def end() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        with suppress(Exception):
            await resources.aclose()
        loop.call_soon(loop.stop)

    ending, here = asyncio.run_coroutine_threadsafe(end(), loop), None
    with suppress(RuntimeError):
        here = asyncio.get_running_loop()
    if here is not loop:
        with suppress(Exception):
            ending.result(within_s)


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, also where this thread runs an event loop, as in a notebook: then in another thread, from which Ctrl-C
    cancels `work`.
    """
    import asyncio  # noqa: PLC0415

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    begun: list[Callable[[], object]] = []

    async def cancellable() -> T:
        if (task := asyncio.current_task()) is not None:
            begun.append(partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel))
        return await work

    done = in_daemon_thread(lambda: asyncio.run(cancellable()))
    try:
        return done.result()
    except KeyboardInterrupt:
        for cancel in begun:
            cancel()
        raise


# ---- the messages between a pool of processes (`pool.py`) and one of them (`worker.py`), and the limits of a call

OUT_OF_MEMORY = 77
"""Exit status of a worker in which a call exceeded its memory limit."""
LINE_SIGNAL = signal.SIGUSR1
"""Ends a worker, which first writes its stack to the pool."""


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of calls, and of the up to `workers` processes that they are made in.

    `memory_mb` is what a call may use beyond what its process uses after the imports. `retries`: how often a call is made
    again if a server that it asks can't be reached. `writes`: the only folders below which a call can write, or None.
    `start_timeout_s` limits the import of the functions' files, or the construction of an instance of a user's class.
    """

    workers: Annotated[int, Meta(ge=1)] = 2
    timeout_s: Annotated[float, Meta(gt=0)] = 10.0
    retries: Annotated[int, Meta(ge=0)] = 0
    memory_mb: Annotated[int, Meta(ge=1)] = 1024
    writes: tuple[str, ...] | None = None
    start_timeout_s: Annotated[float, Meta(gt=0)] = 60.0


class TaskSource(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker needs for an instance of a user's class: what `make_environment` gets, and where its parts are.

    `tokenizer` is a folder or id, "" if that is not known. `search` is the module search path of the pool's process.
    """

    kind: str
    args: dict[str, Any]
    seed: int
    tokenizer: str
    chat_template: Any
    remote_code: bool
    search: list[str]


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's only argument: functions (`file.py:function`) by name, and limits.

    With `task` there is one function, the task's `reward`, and its name stands for the class.
    """

    functions: dict[str, str]
    limits: Limits
    task: TaskSource | None = None


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of the function `name`. The reply repeats `number`."""

    number: int
    name: str
    arguments: tuple[Any, ...]
    named: dict[str, Any] = {}


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a call: `value` if it returned, else `error` (one line). Number 0 is the outcome of the imports."""

    number: int
    outcome: Literal["returned", "raised", "unreachable", "bad_value"] = "returned"
    value: Any = None
    error: str = ""
