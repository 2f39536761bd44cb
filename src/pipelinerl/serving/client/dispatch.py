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
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import msgspec

from pipelinerl.errors import RequestError
from pipelinerl.interfaces import CANCELLED_KEPT
from pipelinerl.serving.client.adapter import TokenListener, find_fault
from pipelinerl.serving.client.errors import (
    Bounds,
    EngineUnavailableError,
    ServerBusyError,
    ServerError,
    ServerUnreachableError,
    back_off_s,
)
from pipelinerl.serving.client.fleet import LostError, Replica, ReplicaPool
from pipelinerl.serving.client.routing import Router
from pipelinerl.serving.wire import token_events
from pipelinerl.types import Completion, GenerationRequest, TokenEvent, cancelled_completion

# ---- the tokens of one streamed request


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


# ---- requests


logger = logging.getLogger(__name__)

_LONGEST_WAIT_S = 30.0


class _NotAcceptedError(Exception):
    """The server did not accept the request. It, or another server, may be tried after `after_s`."""

    def __init__(self, after_s: float) -> None:
        super().__init__()
        self.after_s = after_s


class _Ticket:
    """A request that is being served. `name` is its id at the servers, unique also among their other clients."""

    def __init__(self, name: str, request: GenerationRequest, forward: TokenListener) -> None:
        self.name = name
        self.request = request
        self.relay = TokenRelay(request.id, forward)
        self.answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.attempt = 0
        self.failures = 0
        self.refusals = 0
        self.refused_since_s: float | None = None
        self.replica: Replica | None = None
        self.rejections: dict[str, RequestError] = {}
        """Errors of the servers that can never serve it, by address."""

    @property
    def cancelled(self) -> bool:
        return self.answer.cancelled()

    @property
    def wire_request(self) -> GenerationRequest:
        return msgspec.structs.replace(self.request, id=f"{self.name}.{self.attempt}", copy=None)


class _Waiting(NamedTuple):
    ticket: _Ticket
    replica: asyncio.Future[Replica]


class Dispatcher:
    """Serves requests in the running event loop until `close`.

    `slots`: total slots of the servers that accept requests now. `tokens_received`: tokens of all completions. `error`: the
    first error that ended the engine; requests that are open then get no answer. `arrived` is set with each token, answer
    and error.
    """

    def __init__(self, pool: ReplicaPool, bounds: Bounds, vocabulary: int, clock: Callable[[], float]) -> None:
        self.slots = 0
        self.tokens_received = 0
        self.error: BaseException | None = None
        self.arrived = asyncio.Event()
        self._pool, self._bounds, self._vocabulary, self._clock = pool, bounds, vocabulary, clock
        self._router = Router()
        self._prefix = secrets.token_hex(4)
        self._started = 0
        self._waiting: deque[_Waiting] = deque()
        self._waiting_restricted: list[_Waiting] = []
        self._cancelled: deque[Completion] = deque(maxlen=CANCELLED_KEPT)
        self._tasks: set[asyncio.Task[None]] = set()
        pool.on_change = self._servers_changed
        self._servers_changed()

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
        """Update the router with the servers that accept requests, and place waiting requests."""
        for replica in self._pool.replicas:
            if replica.info is not None:
                self._router.set_server(replica.url, replica.info.slots, open_=self._pool.accepts(replica))
        self.slots = self._router.slots
        if self._pool.none_left():
            self.fail(self._pool.unavailable())
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
            self._router.release(ticket.name)
            self._place()

    async def _serve(self, ticket: _Ticket) -> Completion:
        """Return the completion, under the id used at the server. Raises RequestError if no server can serve the request."""
        while True:
            replica = ticket.replica = await self._acquire_slot(ticket)
            wait_s = 0.0
            try:
                return await self._ask(ticket, replica)
            except RequestError as error:  # Rare: the request has passed the client's checks.
                if ticket.relay.count:  # Tokens were forwarded; another server might produce different ones.
                    raise
                ticket.rejections[replica.url] = error
                ticket.attempt += 1
            except LostError as error:
                ticket.attempt += 1
                if ticket.relay.count:  # Tokens were forwarded; another server might produce different ones.
                    return ticket.relay.partial_completion()
                logger.info("sending request %s again under a new id: %s", ticket.request.id, error)
            except _NotAcceptedError as refusal:
                wait_s = refusal.after_s
            finally:
                ticket.replica = None
                self._router.release(ticket.name)
                self._place()
            await asyncio.sleep(wait_s)

    async def _ask(self, ticket: _Ticket, replica: Replica) -> Completion:
        """Send the request to one server until it answers.

        Raises LostError, _NotAcceptedError, RequestError, or an error that ends the engine.
        """
        request, instance = ticket.wire_request, replica.instance
        may_have_started = False
        while True:
            try:
                completion = await replica.call(replica.server.generate(request, ticket.relay.take))
            except ServerUnreachableError as error:
                may_have_started = True
                self._count_failure(ticket, error)
            except ServerBusyError as error:
                if not may_have_started:
                    raise await self._count_refusal(ticket, replica, error) from error
                self._count_failure(ticket, error)
            else:
                return self._checked(ticket, replica, request, completion)
            if ticket.cancelled:
                return ticket.relay.partial_completion()
            await asyncio.sleep(back_off_s(ticket.failures))
            await self._pool.check_health(replica)
            if replica.gone or replica.instance != instance:
                raise LostError(f"engine server {replica.url} was lost: {replica.last_error}")

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
        """Count a request that was probably accepted but not answered. Raises EngineUnavailableError at `Bounds.tries`."""
        ticket.failures += 1
        ticket.refused_since_s = None
        if ticket.failures >= self._bounds.tries:
            raise EngineUnavailableError(
                f"request {ticket.request.id!r} failed {ticket.failures} times; the last time: {error}"
            ) from error

    async def _count_refusal(self, ticket: _Ticket, replica: Replica, error: ServerBusyError) -> _NotAcceptedError:
        """Count a request that was not accepted. Raises EngineUnavailableError after `Bounds.overload_s` of refusals."""
        now_s = self._clock()
        ticket.refusals += 1
        if ticket.refused_since_s is None:
            ticket.refused_since_s = now_s
        if now_s - ticket.refused_since_s > self._bounds.overload_s:
            raise EngineUnavailableError(
                f"no server accepted request {ticket.request.id!r} within {self._bounds.overload_s:g} s; the last: {error}"
            ) from error
        await self._pool.check_health(replica)
        return _NotAcceptedError(min(error.retry_after_s or back_off_s(ticket.refusals), _LONGEST_WAIT_S))

    async def _cancel(self, ticket: _Ticket, task: asyncio.Task[None]) -> None:
        replica = ticket.replica
        if replica is not None:
            with suppress(ServerError, RequestError, TimeoutError):  # closing the connection then ends it
                async with asyncio.timeout(self._bounds.cancel_s):
                    await replica.server.cancel(ticket.wire_request.id)
                    await asyncio.wait({task})
        task.cancel()

    # ---- slots

    async def _acquire_slot(self, ticket: _Ticket) -> Replica:
        """Wait for a server with a free slot, first come first served. Requests restricted to some servers go first."""
        waiting = _Waiting(ticket, asyncio.get_running_loop().create_future())
        (self._waiting if self._eligible(ticket) is None else self._waiting_restricted).append(waiting)
        self._place()
        return await waiting.replica

    def _place(self) -> None:
        self._waiting_restricted = [waiting for waiting in self._waiting_restricted if not self._try_place(waiting)]
        while self._waiting and self._try_place(self._waiting[0]):
            self._waiting.popleft()

    def _try_place(self, waiting: _Waiting) -> bool:
        """Try to give the request a slot. Returns whether it no longer waits: it has a slot, failed, or was cancelled."""
        ticket = waiting.ticket
        if waiting.replica.done():
            return True
        eligible = self._eligible(ticket)
        if eligible is not None and not eligible:
            waiting.replica.set_exception(next(iter(ticket.rejections.values())))
            return True
        url = self._router.place(ticket.name, ticket.request.prompt_ids, only=eligible)
        if url is None:
            return False
        waiting.replica.set_result(next(replica for replica in self._pool.replicas if replica.url == url))
        return True

    def _eligible(self, ticket: _Ticket) -> Sequence[str] | None:
        """Addresses of the servers that may serve it; None: any."""
        replicas = self._pool.replicas
        if ticket.request.copy is not None:
            replicas = [replicas[ticket.request.copy]]
        elif not ticket.rejections:
            return None
        # A request that some servers have rejected does not wait for a server that is gone.
        return [
            replica.url
            for replica in replicas
            if replica.url not in ticket.rejections and not (ticket.rejections and replica.gone)
        ]
