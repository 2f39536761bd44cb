"""The engine behind the endpoints: its thread, which steps while there is work, and the requests that coroutines follow.

    submit, cancel, update ──▶ commands ──▶ [ run commands ─▶ one engine step ] ──▶ one call into the event loop per step
        (event loop)          (in order)        (a loop in the engine's thread)

Commands run between two steps, so a weight update is applied at a token boundary and requests in progress continue.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pipelinerl.errors import PipelineRLError, RequestError, WeightUpdateError
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.serving.server.http import RefusedError, check_request
from pipelinerl.serving.wire import token_events
from pipelinerl.types import Completion, GenerationRequest, TokenEvent, UpdateReceipt

if TYPE_CHECKING:
    from pipelinerl.engine import LocalEngine

_log = logging.getLogger(__name__)

T = TypeVar("T")


class ServedRequest:
    """A submitted request. Any number of coroutines may follow it. `outcome` is None while it is in progress.

    `changed` is set, and replaced, when there are more tokens or an outcome.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.outcome: Completion | PipelineRLError | None = None
        self.tokens: list[TokenEvent] = []
        self.changed = asyncio.Event()

    async def begun(self) -> None:
        """Wait for the first token or the end. Raises the request's error, if it failed."""
        while not self.tokens and self.outcome is None:
            await self.changed.wait()
        if isinstance(self.outcome, PipelineRLError):
            raise self.outcome

    async def completion(self) -> Completion:
        """Wait for the completion. Raises the request's error, if it failed."""
        while self.outcome is None:
            await self.changed.wait()
        if isinstance(self.outcome, Completion):
            return self.outcome
        raise self.outcome

    async def batches(self) -> AsyncGenerator[list[TokenEvent]]:
        """Yield all tokens in order, in one batch per engine step. If the request does not stream: one batch at the end."""
        sent = 0
        while True:
            tokens = self.tokens if self.outcome is None else token_events(await self.completion())
            if len(tokens) > sent:
                batch, sent = tokens[sent:], len(tokens)
                yield batch
            elif self.outcome is not None:
                return
            else:
                await self.changed.wait()


class Holding(NamedTuple):
    """The weights in the engine."""

    version: int
    checksum: str


class ServedEngine:
    """Owns `engine`, and starts its thread. Used only in the event loop that it was created in.

    At most `engine.slots` + `max_queue` requests are open; more are refused. `held` computes the checksum of the weights in
    the engine now. If the engine raises an exception, it has failed: all open and all later requests fail for that reason.

    `holding`: the weights that the next token is sampled with. `progress`: the engine's counts after its last step.
    `refusing`: why requests are refused, or None if they are accepted.
    """

    def __init__(self, engine: LocalEngine, max_queue: int, held: Callable[[], str]) -> None:
        self.name = engine.name
        self._engine, self._max_queue, self._held = engine, max_queue, held
        self.holding = Holding(engine.version, held())
        self.progress = engine.progress()
        self.refusing: str | None = None
        self._loop = asyncio.get_running_loop()
        self._open: dict[str, ServedRequest] = {}
        self._waiting: set[Future[Any]] = set()  # for what commands return
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # None: the thread ends
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # ---- requests

    @property
    def most_requests(self) -> int:
        """How many requests may be open."""
        return self._engine.slots + self._max_queue

    @property
    def open_requests(self) -> int:
        """Number of requests that were submitted and have not ended."""
        return len(self._open)

    def submit(self, request: GenerationRequest) -> ServedRequest:
        """Submit a request with a new id.

        Raises RefusedError (`unavailable`, `overloaded`), and RequestError for an id in use, or numbers out of range.
        """
        check_request(request)
        if self.refusing is not None:
            raise RefusedError("unavailable", self.refusing)
        if request.id in self._open:
            raise RequestError(f"request {request.id!r} is already in the engine; give each request a unique id")
        if len(self._open) >= self.most_requests:
            raise RefusedError(
                "overloaded",
                f"{self._engine.slots} requests are in progress and {self._max_queue} wait, the most that this server "
                "accepts (--engine.slots, --max-queue): try again later",
            )
        served = self._open[request.id] = ServedRequest(request)
        self._commands.put(lambda: self._submit(request))
        return served

    def cancel(self, request_id: str) -> None:
        """End a request at the next token boundary, with reason "cancelled". Unknown ids are ignored."""
        if request_id in self._open:
            self._commands.put(lambda: self._engine.cancel(request_id))

    def cancel_all(self) -> None:
        for request_id in self._open:
            self.cancel(request_id)

    @contextmanager
    def following(self, request: GenerationRequest) -> Iterator[ServedRequest]:
        """Submit a request. At the end of the context it is cancelled, unless it has ended."""
        served = self.submit(request)
        try:
            yield served
        finally:
            if served.outcome is None:
                self.cancel(request.id)

    # ---- weights and the end

    async def update(self, update: WeightUpdate, *, begins: bool = False) -> UpdateReceipt:
        """Apply new weights at the next token boundary.

        `begins`: a session, so cancel all requests first; the version may be lower.

        Raises WeightUpdateError if they do not fit (the old ones stay), RefusedError if the engine is not available.
        """
        if self.refusing is not None:
            raise RefusedError("unavailable", self.refusing)
        if begins:
            self.cancel_all()
        answer: Future[UpdateReceipt] = Future()
        answer.set_running_or_notify_cancel()  # the caller may give up, but the update goes on
        self._waiting.add(answer)
        self._commands.put(lambda: self._update(update, answer, begins))
        try:
            return await asyncio.wrap_future(answer)
        finally:
            self._waiting.discard(answer)

    async def between_steps(self, call: Callable[[], T]) -> T:
        """What `call` returns, from the engine's thread. Raises RefusedError if the engine is not available."""
        if self.refusing is not None:
            raise RefusedError("unavailable", self.refusing)
        answer: Future[T] = Future()
        answer.set_running_or_notify_cancel()
        self._waiting.add(answer)

        def run() -> None:
            try:
                answer.set_result(call())
            except PipelineRLError as error:
                answer.set_exception(error)
            except Exception as error:  # noqa: BLE001 - such as a lack of memory; the engine is as it was
                _log.exception("a command failed")
                answer.set_exception(RefusedError("unavailable", f"it failed ({type(error).__name__}: {error})"))

        self._commands.put(run)
        try:
            return await asyncio.wrap_future(answer)
        finally:
            self._waiting.discard(answer)

    def refuse(self, reason: str) -> None:
        """Refuse all requests from now on, with `reason`. Requests in progress continue."""
        self.refusing = self.refusing or reason

    def close(self, timeout_s: float = 10.0) -> bool:
        """Stop after the current step. Returns False if that takes longer than `timeout_s`."""
        self.refuse("the server has stopped")
        self._commands.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ---- what the engine's thread calls in the event loop

    def _deliver(self, tokens: Sequence[TokenEvent], ended: Sequence[tuple[str, Completion | PipelineRLError]]) -> None:
        changed: set[ServedRequest] = set()
        for event in tokens:
            served = self._open[event.request_id]
            served.tokens.append(event)
            changed.add(served)
        for request_id, outcome in ended:
            served = self._open.pop(request_id)
            served.outcome, served.tokens = outcome, []
            changed.add(served)
        for served in changed:
            served.changed.set()
            served.changed = asyncio.Event()

    def _thread_ended(self, reason: str, failed: bool) -> None:
        """Fail all open requests, updates and other commands."""
        self.refusing = reason if failed else self.refusing
        error = RefusedError("unavailable", reason)
        self._deliver((), [(request_id, error) for request_id in sorted(self._open)])
        for answer in self._waiting:
            if not answer.done():
                answer.set_exception(error)

    # ---- the engine's thread

    def _run(self) -> None:
        try:
            while self._run_commands():
                output = self._engine.step()
                self.progress = self._engine.progress()
                if output.tokens or output.finished:
                    self._post(self._deliver, output.tokens, [(one.request_id, one) for one in output.finished])
            self._post(self._thread_ended, "the server has stopped", False)
        except Exception as error:  # noqa: BLE001 - the thread's boundary: all waiting callers get the error
            _log.exception("the engine failed")
            reason = f"the engine failed ({type(error).__name__}: {error}): restart the server"
            self._post(self._thread_ended, reason, True)

    def _post(self, call: Callable[..., None], *arguments: Any) -> None:
        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(call, *arguments)

    def _run_commands(self) -> bool:
        """Run the commands that wait; wait for one if there is nothing to compute. Returns False if the thread is to end."""
        busy = self._engine.in_progress + self._engine.queued > 0
        while True:
            try:
                command = self._commands.get(block=not busy)
            except Empty:
                return True
            if command is None:
                return False
            command()
            busy = True

    def _submit(self, request: GenerationRequest) -> None:
        try:
            self._engine.submit(request)
        except RequestError as error:
            self._post(self._deliver, (), [(request.id, error)])

    def _update(self, update: WeightUpdate, answer: Future[UpdateReceipt], begins: bool) -> None:
        if begins:
            ended = self._engine.step().finished  # the cancelled requests
            self._post(self._deliver, (), [(one.request_id, one) for one in ended])
            self._engine.restart()  # any version may follow
        try:
            receipt = self._engine.update_weights(update)
        except WeightUpdateError as error:
            # The engine reports that it has the old weights. Verify that.
            if self._held() != self.holding.checksum:
                raise
            if begins:
                self._engine.restart(self.holding.version)
            answer.set_exception(error)
            return
        self.holding = Holding(receipt.version, receipt.checksum)
        self.progress = self._engine.progress()
        answer.set_result(receipt)
