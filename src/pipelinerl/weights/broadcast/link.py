"""The control connection of a receiver, or of the coordinator, to the weight sender."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from pipelinerl.errors import WeightUpdateError
from pipelinerl.weights.broadcast.control import (
    BEATS_PER_BOUND,
    Beat,
    Close,
    Connection,
    Form,
    FromReceiver,
    FromSender,
    Hello,
    Leave,
    ProtocolError,
    connect,
)

_LARGEST_BYTES = 64 << 20  # a layout of half a million tensors
_FIRST_BEAT_S = 0.2
_ENDING_S = 5.0


class SenderLink:
    """A thread that connects, sends Hello and then heartbeats, until the sender closes.

    `on_message` is called in that thread with every message of the sender except Close, and with None after the last one.
    After a failure, including a wrong address or index, `raise_problem` raises.
    """

    def __init__(
        self, host: str, port: int, hello: Hello, *, join_timeout_s: float, on_message: Callable[[FromSender | None], None]
    ) -> None:
        """`join_timeout_s`: how long to wait for the sender, and then for the other receivers."""
        self._host, self._port = host, port
        self._hello = hello
        self._join_timeout_s = join_timeout_s
        self._on_message = on_message
        self._problem: str | None = None
        self.connection: Connection[FromSender] | None = None
        self.closed = threading.Event()
        self.ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights-control", daemon=True)

    @property
    def where(self) -> str:
        return f"the weight sender at {self._host}:{self._port}"

    @property
    def problem(self) -> str | None:
        return self._problem

    def start(self) -> None:
        self._thread.start()

    def send(self, message: FromReceiver) -> None:
        """Send a message. Without effect before the connection exists or after the sender has closed."""
        if self.connection is not None:
            self.connection.send(message)

    def fail(self, error: str) -> None:
        """Record a problem. Only the first one is kept."""
        if not self.closed.is_set():
            self._problem = self._problem or error

    def raise_problem(self) -> None:
        """Raises WeightUpdateError if a problem was recorded."""
        if self._problem is not None:
            raise WeightUpdateError(self._problem)

    def close(self) -> None:
        """Leave the group and close the connection."""
        self.send(Leave())
        self.closed.set()
        if self.connection is not None:
            self.connection.close()
        self._thread.join(_ENDING_S)

    def _run(self) -> None:
        try:
            connected = connect(self._host, self._port, self._join_timeout_s)
            connection = Connection[FromSender](connected, FromSender, largest=_LARGEST_BYTES)
            self.connection = connection
            self.send(self._hello)
            self._receive_messages(connection)
        except (EOFError, ConnectionResetError):
            self.fail(f"{self.where} is gone: its process exited unexpectedly")
        except ProtocolError as error:
            self.fail(f"{self.where} sent an invalid message: {error}")
        except OSError as error:
            what = "is lost" if self.connection is not None else f"can't be reached within {self._join_timeout_s:g} s"
            self.fail(f"{self.where} {what}: {error}")
        self.ended.set()
        self._on_message(None)

    def _receive_messages(self, connection: Connection[FromSender]) -> None:
        beat_s = _FIRST_BEAT_S
        next_s = started_s = time.monotonic()
        formed = False
        while not self.closed.is_set():
            message = connection.receive(max(0.0, next_s - time.monotonic()))
            match message:
                case Close(error):
                    if error is not None:
                        self.fail(error)
                    return
                case Form():
                    formed, beat_s = True, message.stall_s / BEATS_PER_BOUND
            if message is not None:
                self._on_message(message)
            now_s = time.monotonic()
            if not formed and now_s - started_s > self._join_timeout_s:
                raise TimeoutError(f"no group was formed within {self._join_timeout_s:g} s; other receivers are missing")
            if now_s >= next_s:
                connection.send(Beat())
                next_s = now_s + beat_s
