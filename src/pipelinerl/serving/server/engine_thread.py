"""Runs the engine in its own thread, which steps while there is work and sleeps otherwise.

    submit, cancel, update ──▶ commands ──▶ [ run commands ─▶ one engine step ─▶ deliver ] ──▶ one delivery per step
       (any thread)           (in order)             (a loop in the engine's thread)

Commands run between two steps, so a weight update is applied at a token boundary and requests in progress continue.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from pipelinerl.errors import PipelineRLError, RequestError, WeightUpdateError
from pipelinerl.interfaces import Engine, WeightUpdate
from pipelinerl.serving.server.http import RefusedError, unavailable
from pipelinerl.types import Completion, EngineProgress, GenerationRequest, TokenEvent, UpdateReceipt

_log = logging.getLogger(__name__)


class Delivery(NamedTuple):
    """The output of one step, and the requests that failed."""

    tokens: Sequence[TokenEvent]
    finished: Sequence[Completion]
    failed: Sequence[tuple[str, PipelineRLError]]


class Holding(NamedTuple):
    """The weights in the engine."""

    version: int
    checksum: str


class EngineThread:
    """Owns `engine`; every method may be called from any thread. Call `start` first.

    At most `most_open` requests, `slots` + `max_queue`, are open; more are refused. `held` computes the checksum of the
    weights that the engine holds now.

    If the engine raises an exception, it has failed: all open and all later requests fail with that reason.
    """

    def __init__(self, engine: Engine, *, name: str, slots: int, max_queue: int, held: Callable[[], str]) -> None:
        self.name, self._engine, self._held, self._slots = name, engine, held, slots
        self.most_open = slots + max_queue
        self._holding = Holding(engine.version, held())
        self._progress = engine.progress()
        self._deliver: Callable[[Delivery], None] = lambda _: None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        # The following are guarded by `_wake`.
        self._wake = threading.Condition()
        self._commands: list[Callable[[], None]] = []
        self._open: set[str] = set()
        self._updates: set[Future[UpdateReceipt]] = set()
        self._refusing: str | None = None
        self._closing = False
        # Used only in the engine's thread.
        self._failed: list[tuple[str, PipelineRLError]] = []

    def start(self, deliver: Callable[[Delivery], None]) -> None:
        """Start the thread. `deliver` is called in it, at most once per step, and must not block."""
        self._deliver = deliver
        self._thread.start()

    # ---- commands

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. Its completion or error arrives in a delivery.

        Raises RefusedError (`unavailable`, `overloaded`), and RequestError for an id that is in use.
        """
        with self._wake:
            if self._refusing is not None:
                raise unavailable(self._refusing)
            if request.id in self._open:
                raise RequestError(f"request {request.id!r} is already in the engine; give each request a unique id")
            if len(self._open) >= self.most_open:
                waiting = self.most_open - self._slots
                raise RefusedError(
                    "overloaded",
                    f"{self._slots} requests are in progress and {waiting} wait, the most that this server accepts "
                    "(--engine.slots, --max-queue): try again later",
                    retry_after_s=1,
                )
            self._open.add(request.id)
            self._enqueue(lambda: self._submit(request))

    def cancel(self, request_id: str) -> None:
        """End a request at the next token boundary; it is delivered with reason "cancelled". Unknown ids are ignored."""
        with self._wake:
            if request_id in self._open:
                self._enqueue(lambda: self._engine.cancel(request_id))

    def cancel_all(self) -> None:
        for request_id in list(self._open):
            self.cancel(request_id)

    def update(self, update: WeightUpdate, *, anew: bool = False) -> Future[UpdateReceipt]:
        """Apply new weights at the next token boundary. `anew`: cancel all requests first; the version may be lower.

        The future raises WeightUpdateError if they do not fit (the old ones stay), RefusedError if the engine is not
        available.
        """
        future: Future[UpdateReceipt] = Future()
        with self._wake:
            if self._refusing is not None:
                future.set_exception(unavailable(self._refusing))
                return future
            self._updates.add(future)
            if anew:
                self.cancel_all()
            self._enqueue(lambda: self._update(update, future, anew))
        return future

    def refuse(self, reason: str) -> None:
        """Refuse all requests from now on, with `reason`. Requests in progress continue."""
        with self._wake:
            self._refusing = self._refusing or reason

    def close(self, timeout_s: float = 10.0) -> bool:
        """Stop after the current step. Returns False if that takes longer than `timeout_s`."""
        self.refuse("the server has stopped")
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ---- state

    @property
    def refusing(self) -> str | None:
        """Why requests are refused, or None if they are accepted."""
        return self._refusing

    @property
    def holding(self) -> Holding:
        """The weights that the next token is sampled with."""
        return self._holding

    @property
    def open_requests(self) -> int:
        """Number of requests that were submitted and have not ended."""
        return len(self._open)

    def progress(self) -> EngineProgress:
        """The engine's counts after its last step."""
        return self._progress

    # ---- the engine's thread

    def _enqueue(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._wake.notify_all()

    def _run(self) -> None:
        try:
            while self._run_step():
                pass
            self._fail_all("the server has stopped")
        except Exception as error:  # noqa: BLE001 - the thread's boundary: all waiting callers get the error
            _log.exception("the engine failed")
            self._fail_all(f"the engine failed ({type(error).__name__}: {error}): restart the server")

    def _run_step(self) -> bool:
        """Wait for work, run the queued commands and one engine step. Returns False when the thread is to end."""
        engine = self._engine
        busy = engine.in_progress + engine.queued > 0
        with self._wake:
            self._wake.wait_for(lambda: busy or bool(self._commands) or self._closing)
            if self._closing:
                return False
            commands, self._commands = self._commands, []
        for command in commands:
            command()
        self._step()
        return True

    def _step(self) -> None:
        output = self._engine.step()
        self._progress = self._engine.progress()
        failed, self._failed = self._failed, []
        self._deliver_results(Delivery(output.tokens, output.finished, failed))

    def _deliver_results(self, delivery: Delivery) -> None:
        if not any(delivery):
            return
        with self._wake:
            self._open.difference_update(completion.request_id for completion in delivery.finished)
            self._open.difference_update(request_id for request_id, _ in delivery.failed)
        self._deliver(delivery)

    def _submit(self, request: GenerationRequest) -> None:
        try:
            self._engine.submit(request)
        except RequestError as error:
            self._failed.append((request.id, error))

    def _update(self, update: WeightUpdate, future: Future[UpdateReceipt], anew: bool) -> None:
        if anew:
            self._step()  # ends the cancelled requests
            self._engine.restart()  # any version may follow
        try:
            receipt = self._engine.update_weights(update)
        except WeightUpdateError as error:
            # The engine reports that it kept the old weights. Verify that.
            if self._held() != self._holding.checksum:
                raise
            if anew:
                self._engine.restart(self._holding.version)
            self._resolve(future, error)
            return
        self._holding = Holding(receipt.version, receipt.checksum)
        self._progress = self._engine.progress()
        self._resolve(future, receipt)

    def _resolve(self, future: Future[UpdateReceipt], answer: UpdateReceipt | PipelineRLError) -> None:
        with self._wake:
            self._updates.discard(future)
        if not future.set_running_or_notify_cancel():
            return  # the caller has cancelled the future
        if isinstance(answer, PipelineRLError):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def _fail_all(self, reason: str) -> None:
        """Fail all open requests and updates."""
        with self._wake:
            self._refusing = reason if self._refusing is None or not self._closing else self._refusing
            left, updates = sorted(self._open), list(self._updates)
        for future in updates:
            self._resolve(future, unavailable(reason))
        self._deliver_results(Delivery((), (), [(request_id, unavailable(reason)) for request_id in left]))
