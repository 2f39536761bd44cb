"""Serves requests on the replicas. Each request has one task, which waits for a slot and ends with exactly one completion.

    waiting for a slot ─▶ sent ─▶ completion ─▶ checked ─▶ answer
          ▲                │ connection broke: send it to the same server again, under the same id
          ├── busy ◀───────┤ the server did not accept it: wait, then send it to any server
          ├── refused ◀────┤ this server can never serve it: try another one; if all refuse it, the request fails
          └── lost ◀───────┘ the server was restarted or is gone: send it under a new id to any server with room

Nothing from an abandoned attempt is passed on: its task has ended, and its id is not used again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from pipelinerl.errors import RequestError
from pipelinerl.interfaces import CANCELLED_KEPT
from pipelinerl.serving.client.adapter import (
    Bounds,
    EngineUnavailableError,
    LostError,
    ServerBusyError,
    ServerError,
    ServerUnreachableError,
    TokenListener,
    back_off_s,
    find_fault,
)
from pipelinerl.serving.client.fleet import Replica, ReplicaPool
from pipelinerl.serving.wire import token_events
from pipelinerl.types import Completion, GenerationRequest, TokenEvent, cancelled_completion

logger = logging.getLogger(__name__)

_LONGEST_WAIT_S = 30.0


class TokenRelay:
    """Forwards each token of a stream once and in order, even if a retry restarts the stream.

    `request_id` is the id of the forwarded tokens.
    """

    def __init__(self, request_id: str, forward: TokenListener) -> None:
        self._request_id = request_id
        self._forward = forward
        self._seen: list[TokenEvent] = []

    @property
    def count(self) -> int:
        """Number of tokens forwarded."""
        return len(self._seen)

    def take(self, event: TokenEvent) -> None:
        """Forward the token if it is the next one. Repeated tokens, and tokens after a gap, are left to `complete`."""
        if event.index == len(self._seen):
            self._forward_token(msgspec.structs.replace(event, request_id=self._request_id))

    def complete(self, completion: Completion) -> bool:
        """Forward the remaining tokens. Returns False and forwards nothing if the completion contradicts those forwarded."""
        events = token_events(msgspec.structs.replace(completion, request_id=self._request_id))
        if self._seen != events[: self.count]:
            return False
        for event in events[self.count :]:
            self._forward_token(event)
        return True

    def partial_completion(self) -> Completion:
        """A completion of the tokens forwarded so far, for a stream that can't continue."""
        return cancelled_completion(self._request_id, self._seen)

    def _forward_token(self, event: TokenEvent) -> None:
        self._seen.append(event)
        self._forward(event)


class _Ticket:
    """A request that is being served. `name` is its id at the servers, unique also among their other clients.

    `slot`: the server of which it has a slot. `asked`: the server that may be serving it now. `rejections`: the errors of
    the servers that can never serve it. `failures`: how often a server that is well did not serve it.
    """

    def __init__(self, name: str, request: GenerationRequest, forward: TokenListener) -> None:
        self.name = name
        self.request = request
        self.relay = TokenRelay(request.id, forward)
        loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[Completion] = loop.create_future()
        self.placed: asyncio.Future[Replica] = loop.create_future()
        self.slot: Replica | None = None
        self.asked: Replica | None = None
        self.attempt = self.failures = 0
        self.rejections: dict[Replica, RequestError] = {}

    @property
    def cancelled(self) -> bool:
        return self.answer.cancelled()

    @property
    def restricted(self) -> bool:
        """Whether only some servers may serve it."""
        return self.request.copy is not None or bool(self.rejections)

    @property
    def wire_request(self) -> GenerationRequest:
        return msgspec.structs.replace(self.request, id=f"{self.name}.{self.attempt}", copy=None)


class Dispatcher:
    """Serves requests in the running event loop until `close`.

    `tokens_received`: tokens of all completions. `error`: the first error that ended the engine; requests that are open
    then get no answer. `arrived` is set with each token, answer and error.
    """

    def __init__(self, pool: ReplicaPool, bounds: Bounds, vocabulary: int) -> None:
        self.tokens_received = 0
        self.error: BaseException | None = None
        self.arrived = asyncio.Event()
        self._pool, self._bounds, self._vocabulary = pool, bounds, vocabulary
        self._prefix = secrets.token_hex(4)
        self._started = 0
        self._waiting: deque[_Ticket] = deque()
        self._cancelled: deque[Completion] = deque(maxlen=CANCELLED_KEPT)
        self._tasks: set[asyncio.Task[None]] = set()
        pool.on_change = self._servers_changed

    @contextmanager
    def serving(
        self, request: GenerationRequest, forward: TokenListener = lambda _: None
    ) -> Iterator[asyncio.Future[Completion]]:
        """Serve the request while inside. `forward` gets the tokens of a stream, then the future gets the completion.

        The future raises RequestError if no server can serve the request. Leaving before the answer cancels the request: at
        its server in the background.
        """

        def take(event: TokenEvent) -> None:
            forward(event)
            self.arrived.set()

        self._started += 1
        ticket = _Ticket(f"{self._prefix}.{self._started}", request, take)
        task = self._start(self._run(ticket))
        try:
            yield ticket.answer
        finally:
            ticket.answer.cancel()
            if not task.done():
                self._start(self._cancel(ticket, task))

    def take_cancelled(self) -> list[Completion]:
        """The completions of cancelled requests that have arrived since the last call."""
        taken, self._cancelled = list(self._cancelled), deque(maxlen=CANCELLED_KEPT)
        return taken

    def fail(self, error: BaseException) -> None:
        """End the engine. The first error is kept."""
        self.error = self.error or error
        self.arrived.set()

    async def close(self) -> None:
        """Cancel all requests."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _servers_changed(self) -> None:
        if (error := self._pool.unavailable()) is not None:
            self.fail(error)
        self._place()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ---- one request

    async def _run(self, ticket: _Ticket) -> None:
        try:
            completion = msgspec.structs.replace(await self._serve(ticket), request_id=ticket.request.id)
            self.tokens_received += len(completion.token_ids)
            if ticket.cancelled:
                self._cancelled.append(completion)
            else:
                ticket.answer.set_result(completion)
        except RequestError as error:
            logger.warning("request %s can't be served: %s", ticket.request.id, error)
            if not ticket.cancelled:
                ticket.answer.set_exception(error)
        except Exception as error:  # noqa: BLE001 - any error that is not the request's own ends the engine
            if not ticket.cancelled:
                self.fail(error)
        finally:
            self.arrived.set()
            self._free_slot(ticket)

    async def _serve(self, ticket: _Ticket) -> Completion:
        """Return the completion, under the id used at the server. Raises RequestError if no server can serve the request."""
        while True:
            replica = await self._slot(ticket)
            ticket.asked = replica
            try:
                if (completion := await self._ask(ticket, replica)) is not None:
                    return completion
            except RequestError as error:  # Rare: the request has passed the client's checks.
                if ticket.relay.count:  # Tokens were forwarded; another server might produce different ones.
                    raise
                ticket.rejections[replica] = error
                ticket.attempt += 1
            except LostError as error:
                ticket.attempt += 1
                if ticket.relay.count:  # as above
                    return ticket.relay.partial_completion()
                logger.info("sending request %s again under a new id: %s", ticket.request.id, error)
            finally:
                ticket.asked = None
                self._free_slot(ticket)

    async def _ask(self, ticket: _Ticket, replica: Replica) -> Completion | None:
        """Send the request to one server until it answers. Returns None if it did not accept the request.

        Raises LostError, RequestError, or an error that ends the engine.
        """
        request, instance = ticket.wire_request, replica.instance
        may_have_started = False
        while True:
            try:
                completion = await replica.call(replica.server.generate(request, ticket.relay.take))
            except ServerUnreachableError as error:
                may_have_started, wait_s = True, 0.0
                self._count_failure(ticket, error)
            except ServerBusyError as error:
                wait_s = min(error.retry_after_s or 0.0, _LONGEST_WAIT_S)
                self._count_failure(ticket, error)
            else:
                return self._checked(ticket, replica, request, completion)
            if ticket.cancelled:
                return ticket.relay.partial_completion()
            await asyncio.sleep(max(wait_s, back_off_s(ticket.failures)))
            await self._pool.check_health(replica)
            if replica.gone or replica.instance != instance:
                raise LostError(f"engine server {replica.url} was lost: {replica.last_error}")
            if not may_have_started:
                return None

    def _checked(self, ticket: _Ticket, replica: Replica, request: GenerationRequest, completion: Completion) -> Completion:
        fault = find_fault(completion, request, self._vocabulary)
        if fault is None and request.stream and not ticket.relay.complete(completion):
            fault = "its tokens differ from those streamed before"
        if fault is not None:
            raise ServerError(replica.url, f"returned an invalid completion for request {request.id!r}: {fault}")
        if completion.finish_reason == "cancelled" and not ticket.cancelled:
            error = ServerBusyError(replica.url, "cancelled a request without being asked to")
            self._count_failure(ticket, error)
            raise LostError(str(error))
        return completion

    def _count_failure(self, ticket: _Ticket, error: ServerError) -> None:
        """Count a request that was not answered. Raises EngineUnavailableError at `Bounds.tries`."""
        ticket.failures += 1
        if ticket.failures >= self._bounds.tries:
            raise EngineUnavailableError(
                f"request {ticket.request.id!r} failed {ticket.failures} times; the last time: {error}"
            ) from error

    async def _cancel(self, ticket: _Ticket, task: asyncio.Task[None]) -> None:
        if ticket.asked is not None:
            with suppress(ServerError, RequestError, TimeoutError):  # closing the connection then ends it
                async with asyncio.timeout(self._bounds.cancel_s):
                    await ticket.asked.server.cancel(ticket.wire_request.id)
                    await asyncio.wait({task})
        task.cancel()

    # ---- slots

    async def _slot(self, ticket: _Ticket) -> Replica:
        """Wait for a server with a free slot, first come first served. Requests restricted to some servers go first."""
        ticket.placed = asyncio.get_running_loop().create_future()
        last = len(self._waiting)
        if ticket.restricted:
            last = next((place for place, other in enumerate(self._waiting) if not other.restricted), last)
        self._waiting.insert(last, ticket)
        self._place()
        return await ticket.placed

    def _place(self) -> None:
        """Give free slots to waiting requests. A restricted one that has to wait does not hold up the others."""
        passed: list[_Ticket] = []
        while self._waiting and not (passed and not passed[-1].restricted):
            ticket = self._waiting.popleft()
            if not ticket.placed.done() and not self._try_place(ticket):
                passed.append(ticket)
        self._waiting.extendleft(reversed(passed))

    def _try_place(self, ticket: _Ticket) -> bool:
        """Give the request a slot, or its error if no server is left that may serve it. Returns False if it has to wait."""
        if not (allowed := self._allowed(ticket)):
            ticket.placed.set_exception(next(iter(ticket.rejections.values())))
        elif (chosen := self._pool.choose(ticket.request.prompt_ids, allowed)) is not None:
            ticket.slot = chosen
            ticket.placed.set_result(chosen)
        return ticket.placed.done()

    def _allowed(self, ticket: _Ticket) -> Sequence[Replica]:
        """The servers that may serve it."""
        copy, replicas = ticket.request.copy, self._pool.replicas
        allowed = replicas if copy is None else [replicas[copy]]
        if not ticket.rejections:
            return allowed
        # A request that some servers have rejected does not wait for a server that is gone.
        return [replica for replica in allowed if replica not in ticket.rejections and not replica.gone]

    def _free_slot(self, ticket: _Ticket) -> None:
        slot, ticket.slot = ticket.slot, None
        if slot is not None:
            slot.release(ticket.request.prompt_ids)
        self._place()
