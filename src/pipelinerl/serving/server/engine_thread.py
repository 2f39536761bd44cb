"""The engine in a thread of its own, which steps while there is work and sleeps otherwise.

    submit, cancel, update ──▶ commands ──▶ [ take commands ─▶ one engine step ─▶ deliver ] ──▶ one delivery a step
       (any thread)           (in order)          (the engine's thread, again and again)

Commands are taken between two steps, so an update comes at a token boundary and nothing in progress notices but by its
versions.
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
    """What one step produced, and the requests that ended without a completion."""

    tokens: Sequence[TokenEvent]
    finished: Sequence[Completion]
    failed: Sequence[tuple[str, PipelineRLError]]


class Holding(NamedTuple):
    """The weights in the engine."""

    version: int
    checksum: str


class EngineThread:
    """Owns `engine` from here on; every method may be called from any thread.

    `slots` and `max_queue` bound what is taken: a request that would wait behind `max_queue` others is refused. `held` is
    the checksum of the weights in the engine now. Begins with `start`.

    An engine that raises has failed: every request open then fails with the reason, and so does every one after it.
    """

    def __init__(self, engine: Engine, *, name: str, slots: int, max_queue: int, held: Callable[[], str]) -> None:
        self.name = name
        self._engine = engine
        self._held = held
        self._slots = slots
        self._limit = slots + max_queue
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
        # The engine's thread alone looks at this.
        self._failed: list[tuple[str, PipelineRLError]] = []

    def start(self, deliver: Callable[[Delivery], None]) -> None:
        """`deliver` is called in the engine's thread, at most once a step; it must not block."""
        self._deliver = deliver
        self._thread.start()

    # ---------------------------------------------------------------------------------------------- what is asked

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request: its completion, or why there is none, comes in a delivery.

        Raises RefusedError (`unavailable`, `overloaded`) and RequestError for an id that is in use.
        """
        with self._wake:
            if self._refusing is not None:
                raise unavailable(self._refusing)
            if request.id in self._open:
                raise RequestError(f"request {request.id!r} is already in the engine; give each request an id of its own")
            if len(self._open) >= self._limit:
                waiting = self._limit - self._slots
                raise RefusedError(
                    "overloaded",
                    f"{self._slots} requests are in progress and {waiting} wait, as many as this server takes "
                    "(--slots, --max-queue): ask again later",
                    retry_after_s=1,
                )
            self._open.add(request.id)
            self._command(lambda: self._take(request))

    def cancel(self, request_id: str) -> None:
        """End a request at the next token boundary; it is delivered with reason "cancelled". Unknown ids are ignored."""
        with self._wake:
            if request_id in self._open:
                self._command(lambda: self._engine.cancel(request_id))

    def cancel_all(self) -> None:
        for request_id in list(self._open):
            self.cancel(request_id)

    def update(self, update: WeightUpdate) -> Future[UpdateReceipt]:
        """Take new weights at the next token boundary.

        The future raises WeightUpdateError if they do not fit (the old ones stay), RefusedError if the engine is not there.
        """
        future: Future[UpdateReceipt] = Future()
        with self._wake:
            if self._refusing is not None:
                future.set_exception(unavailable(self._refusing))
                return future
            self._updates.add(future)
            self._command(lambda: self._update(update, future))
        return future

    def refuse(self, reason: str) -> None:
        """Take nothing from now on, for `reason`; what is in progress goes on."""
        with self._wake:
            self._refusing = self._refusing or reason

    def close(self, timeout_s: float = 10.0) -> bool:
        """Stop after the step that is being computed. False if it takes longer than `timeout_s`."""
        self.refuse("the server has stopped")
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ---------------------------------------------------------------------------------------------- what is said

    @property
    def refusing(self) -> str | None:
        """Why no request is taken, or None."""
        return self._refusing

    @property
    def holding(self) -> Holding:
        """The weights that the next token is sampled by."""
        return self._holding

    @property
    def open_requests(self) -> int:
        """Requests that were submitted and not delivered."""
        return len(self._open)

    def progress(self) -> EngineProgress:
        """The engine's counts after its last step."""
        return self._progress

    # ---------------------------------------------------------------------------------------------- the engine's thread

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._wake.notify_all()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
            self._end("the server has stopped")
        except Exception as error:  # noqa: BLE001 - the thread's boundary: everyone who waits is told
            _log.exception("the engine failed")
            self._end(f"the engine failed ({type(error).__name__}: {error}): start the server again")

    def _turn(self) -> bool:
        """Wait for work and do one step of it. False when it is time to end."""
        engine = self._engine
        busy = engine.in_progress + engine.queued > 0
        with self._wake:
            self._wake.wait_for(lambda: busy or bool(self._commands) or self._closing)
            if self._closing:
                return False
            commands, self._commands = self._commands, []
        for command in commands:
            command()
        output = engine.step()
        self._progress = engine.progress()
        failed, self._failed = self._failed, []
        self._hand_out(Delivery(output.tokens, output.finished, failed))
        return True

    def _hand_out(self, delivery: Delivery) -> None:
        if not any(delivery):
            return
        with self._wake:
            self._open.difference_update(completion.request_id for completion in delivery.finished)
            self._open.difference_update(request_id for request_id, _ in delivery.failed)
        self._deliver(delivery)

    def _take(self, request: GenerationRequest) -> None:
        try:
            self._engine.submit(request)
        except RequestError as error:
            self._failed.append((request.id, error))

    def _update(self, update: WeightUpdate, future: Future[UpdateReceipt]) -> None:
        try:
            receipt = self._engine.update_weights(update)
        except WeightUpdateError as error:
            # The engine says that it did not take them. Whether the old ones are still there is seen, not believed.
            if self._held() != self._holding.checksum:
                raise
            self._answer(future, error)
            return
        self._holding = Holding(receipt.version, receipt.checksum)
        self._progress = self._engine.progress()
        self._answer(future, receipt)

    def _answer(self, future: Future[UpdateReceipt], answer: UpdateReceipt | PipelineRLError) -> None:
        with self._wake:
            self._updates.discard(future)
        if not future.set_running_or_notify_cancel():
            return  # whoever asked has gone
        if isinstance(answer, PipelineRLError):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def _end(self, reason: str) -> None:
        """Nothing comes any more: tell everyone who waits."""
        with self._wake:
            self._refusing = reason if self._refusing is None or not self._closing else self._refusing
            left, updates = sorted(self._open), list(self._updates)
        for future in updates:
            self._answer(future, unavailable(reason))
        self._hand_out(Delivery((), (), [(request_id, unavailable(reason)) for request_id in left]))
