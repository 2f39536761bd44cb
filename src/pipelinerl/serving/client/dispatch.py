"""Requests on their way through the servers: a task each, from a free slot to the one completion.

    waiting for a slot ─▶ asked ─▶ completion ─▶ checked ─▶ mailbox
          ▲                │ connection broke: ask the same server again, under the same id
          └── not taken ◀──┤
          ├── refused ◀────┤ can never be served there: another server is asked; if all refuse it, the request fails
          └── lost ◀───────┘ the server was restarted or is gone: under a new id, wherever there is room

Nothing of an attempt that was given up is ever passed on: its task has ended, and its id is not used again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec

from pipelinerl.errors import PipelineRLError, RequestError
from pipelinerl.interfaces import StepOutput
from pipelinerl.serving.client.checks import find_fault
from pipelinerl.serving.client.errors import (
    Bounds,
    EngineUnavailableError,
    ServerBusyError,
    ServerError,
    ServerUnreachableError,
    back_off_s,
)
from pipelinerl.serving.client.fleet import Fleet, LostError, Member
from pipelinerl.serving.client.routing import Router
from pipelinerl.types import Completion, GenerationRequest, TokenEvent, spans_from_versions, versions_from_spans

# ------------------------------------------------------------------------------------------------------------------------
# What the servers produced, on its way from the event loop's thread to the one that steps the engine.


class Mailbox:
    """Put from one thread, taken from another. After `fail`, `take` raises that error for ever."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tokens: list[TokenEvent] = []
        self._finished: list[Completion] = []
        self._failed: list[tuple[str, PipelineRLError]] = []
        self._error: BaseException | None = None

    def put_token(self, event: TokenEvent) -> None:
        with self._changed:
            self._tokens.append(event)
            self._changed.notify()

    def put_completion(self, completion: Completion) -> None:
        with self._changed:
            self._finished.append(completion)
            self._changed.notify()

    def put_failure(self, request_id: str, error: PipelineRLError) -> None:
        """Of this request alone."""
        with self._changed:
            self._failed.append((request_id, error))
            self._changed.notify()

    def fail(self, error: BaseException) -> None:
        """The first error counts."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify()

    def check(self) -> None:
        """Raises the error, if there is one."""
        if self._error is not None:
            raise self._error

    def take(self, timeout_s: float) -> StepOutput:
        """All that came since the last call; waits up to `timeout_s` for something to come."""
        with self._changed:
            self._changed.wait_for(lambda: self._tokens or self._finished or self._failed or self._error, timeout_s)
            self.check()
            output = StepOutput(self._tokens, self._finished, self._failed)
            self._tokens, self._finished, self._failed = [], [], []
            return output


# ------------------------------------------------------------------------------------------------------------------------
# The tokens of one streamed request: each is passed on once and in order, however often the server sends them.


class TokenRelay:
    """Between a server's stream, which may begin again, and whoever reads it. `request_id` is the reader's."""

    def __init__(self, request_id: str, forward: Callable[[TokenEvent], None]) -> None:
        self._request_id = request_id
        self._forward = forward
        self._seen: list[TokenEvent] = []

    @property
    def count(self) -> int:
        """Tokens passed on."""
        return len(self._seen)

    def take(self, event: TokenEvent) -> None:
        """Pass the token on, unless it was before or one before it is missing: `complete` brings those."""
        if event.index == len(self._seen):
            self._pass_on(event.token_id, event.logprob, event.version)

    def complete(self, completion: Completion) -> bool:
        """Pass on what is still missing. False, and nothing is, if the completion is not of the tokens seen so far."""
        versions = versions_from_spans(completion.weight_versions, len(completion.token_ids))
        tokens = list(zip(completion.token_ids, completion.logprobs, versions, strict=True))
        if [(event.token_id, event.logprob, event.version) for event in self._seen] != tokens[: self.count]:
            return False
        for token_id, logprob, version in tokens[self.count :]:
            self._pass_on(token_id, logprob, version)
        return True

    def cut(self) -> Completion:
        """The completion of what was passed on: for a stream that can't go on."""
        return Completion(
            request_id=self._request_id,
            token_ids=tuple(event.token_id for event in self._seen),
            logprobs=tuple(event.logprob for event in self._seen),
            weight_versions=spans_from_versions(event.version for event in self._seen),
            finish_reason="cancelled",
        )

    def _pass_on(self, token_id: int, logprob: float, version: int) -> None:
        event = TokenEvent(self._request_id, len(self._seen), token_id, logprob, version)
        self._seen.append(event)
        self._forward(event)


logger = logging.getLogger(__name__)


_LONGEST_WAIT_S = 30.0


class _NotTakenError(Exception):
    """The server never had the request. It may be asked again, or another one, after `after_s`."""

    def __init__(self, after_s: float) -> None:
        super().__init__()
        self.after_s = after_s


class _Ticket:
    """A request that is being served. Its id differs from all others, those of other clients of the servers included."""

    def __init__(self, request: GenerationRequest, relay: TokenRelay) -> None:
        self.request = request
        self.relay = relay
        self.attempt = 0
        self.failures = 0
        self.refusals = 0
        self.refused_since_s: float | None = None
        self.cancelled = False
        self.member: Member | None = None
        self.unfit: dict[str, RequestError] = {}
        """What servers that can't ever serve it have said, by address."""

    @property
    def on_the_wire(self) -> GenerationRequest:
        return msgspec.structs.replace(self.request, id=f"{self.request.id}.{self.attempt}", copy=None)


class _Waiting(NamedTuple):
    ticket: _Ticket
    member: asyncio.Future[Member]


class Dispatcher:
    """Serves requests until `close`, in one event loop. What comes of them goes to `mailbox`, errors that end all too.

    `slots`: of all servers that take requests now.
    """

    def __init__(self, fleet: Fleet, mailbox: Mailbox, bounds: Bounds, vocabulary: int, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._mailbox = mailbox
        self._bounds = bounds
        self._vocabulary = vocabulary
        self._clock = clock
        self._router = Router()
        self.slots = 0
        self._waiting: deque[_Waiting] = deque()
        self._waiting_for_some: list[_Waiting] = []
        self._tickets: dict[str, _Ticket] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._cancellations: set[asyncio.Task[None]] = set()

    def submit(self, request: GenerationRequest) -> None:
        """Begin to serve it."""
        ticket = _Ticket(request, TokenRelay(request.id, self._mailbox.put_token))
        self._tickets[request.id] = ticket
        self._tasks[request.id] = asyncio.create_task(self._run(ticket))

    def cancel(self, request_id: str) -> None:
        """Stop serving it, and have its server let go of it. Its completion may still come, or not."""
        ticket = self._tickets.get(request_id)
        if ticket is not None and not ticket.cancelled:
            ticket.cancelled = True
            task = asyncio.create_task(self._cancel(ticket, self._tasks[request_id]))
            self._cancellations.add(task)
            task.add_done_callback(self._cancellations.discard)

    def servers_changed(self) -> None:
        """Look again at which servers take requests, and place those that wait."""
        for member in self._fleet.members:
            if member.info is not None:
                self._router.set_server(member.url, member.info.slots, open_=self._fleet.accepts(member))
        self.slots = self._router.slots
        if self._fleet.all_gone:
            self._mailbox.fail(self._fleet.unavailable())
        self._place()

    async def close(self) -> None:
        """Give up all requests."""
        tasks = [*self._tasks.values(), *self._cancellations]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------------------------------------ one request

    async def _run(self, ticket: _Ticket) -> None:
        request_id = ticket.request.id
        try:
            completion = await self._serve(ticket)
            self._mailbox.put_completion(msgspec.structs.replace(completion, request_id=request_id))
        except RequestError as error:
            logger.warning("request %s can't be served: %s", request_id, error)
            self._mailbox.put_failure(request_id, error)
        except Exception as error:  # noqa: BLE001 - whatever ends a request for no fault of its own ends the engine
            if not ticket.cancelled:
                self._mailbox.fail(error)
        finally:
            self._router.release(request_id)
            del self._tickets[request_id], self._tasks[request_id]
            self._place()

    async def _serve(self, ticket: _Ticket) -> Completion:
        """The completion, under whatever id it was made. Raises RequestError if no server can serve the request."""
        while True:
            member = ticket.member = await self._slot(ticket)
            wait_s = 0.0
            try:
                return await self._ask(ticket, member)
            except RequestError as error:  # It passed our own checks, so that is rare.
                if ticket.relay.count:  # as below
                    raise
                ticket.unfit[member.url] = error
                ticket.attempt += 1
            except LostError as error:
                ticket.attempt += 1
                if ticket.relay.count:  # somebody has seen tokens that another server might not give again
                    return ticket.relay.cut()
                logger.info("request %s is sent again as new: %s", ticket.request.id, error)
            except _NotTakenError as refusal:
                wait_s = refusal.after_s
            finally:
                ticket.member = None
                self._router.release(ticket.request.id)
                self._place()
            await asyncio.sleep(wait_s)

    async def _ask(self, ticket: _Ticket, member: Member) -> Completion:
        """Ask one server until it has answered. Raises LostError, _NotTakenError, or what ends the request or the engine."""
        request, instance = ticket.on_the_wire, member.instance
        may_have_it = False
        while True:
            try:
                completion = await member.call(member.server.generate(request, ticket.relay.take))
            except ServerUnreachableError as error:
                may_have_it = True
                self._failed(ticket, error)
            except ServerBusyError as error:
                if not may_have_it:
                    raise await self._refused(ticket, member, error) from error
                self._failed(ticket, error)
            else:
                return self._checked(ticket, member, request, completion)
            if ticket.cancelled:
                return ticket.relay.cut()
            await asyncio.sleep(back_off_s(ticket.failures))
            await self._fleet.look(member)
            if member.gone or member.instance != instance:
                raise LostError(f"engine server {member.url} was lost: {member.last_error}")

    def _checked(self, ticket: _Ticket, member: Member, request: GenerationRequest, completion: Completion) -> Completion:
        fault = find_fault(completion, request, self._vocabulary)
        if fault is None and request.stream and not ticket.relay.complete(completion):
            fault = "the tokens that were streamed before are others"
        if fault is not None:
            raise ServerError(member.url, f"answered request {request.id!r} with what can't be its completion: {fault}")
        if completion.finish_reason == "cancelled" and not ticket.cancelled:
            error = ServerBusyError(member.url, "cancelled a request that nobody asked it to cancel")
            self._failed(ticket, error)
            raise LostError(str(error))
        return completion

    def _failed(self, ticket: _Ticket, error: ServerError) -> None:
        """It was taken, as it seems, but not answered. Raises EngineUnavailableError when that was once too often."""
        ticket.failures += 1
        ticket.refused_since_s = None
        if ticket.failures >= self._bounds.tries:
            raise EngineUnavailableError(
                f"request {ticket.request.id!r} failed {ticket.failures} times; the last time: {error}"
            ) from error

    async def _refused(self, ticket: _Ticket, member: Member, error: ServerBusyError) -> _NotTakenError:
        """It was not taken. Raises EngineUnavailableError when that has gone on for too long."""
        now_s = self._clock()
        ticket.refusals += 1
        if ticket.refused_since_s is None:
            ticket.refused_since_s = now_s
        if now_s - ticket.refused_since_s > self._bounds.overload_s:
            raise EngineUnavailableError(
                f"no server took request {ticket.request.id!r} within {self._bounds.overload_s:g} s; the last: {error}"
            ) from error
        await self._fleet.look(member)
        return _NotTakenError(min(error.retry_after_s or back_off_s(ticket.refusals), _LONGEST_WAIT_S))

    async def _cancel(self, ticket: _Ticket, task: asyncio.Task[None]) -> None:
        member = ticket.member
        if member is not None:
            with suppress(ServerError, RequestError, TimeoutError):  # it then ends with the connection
                async with asyncio.timeout(self._bounds.cancel_s):
                    await member.server.cancel(ticket.on_the_wire.id)
                    await asyncio.wait({task})
        task.cancel()

    # ------------------------------------------------------------------------------------------------ slots

    async def _slot(self, ticket: _Ticket) -> Member:
        """Wait for a server with a free slot, in order of arrival; those that not every server can answer come first."""
        waiting = _Waiting(ticket, asyncio.get_running_loop().create_future())
        (self._waiting if self._only(ticket) is None else self._waiting_for_some).append(waiting)
        self._place()
        return await waiting.member

    def _place(self) -> None:
        self._waiting_for_some = [waiting for waiting in self._waiting_for_some if not self._placed(waiting)]
        while self._waiting and self._placed(self._waiting[0]):
            self._waiting.popleft()

    def _placed(self, waiting: _Waiting) -> bool:
        """Whether it does not wait any more: it has a slot now, or was cancelled."""
        ticket, request = waiting.ticket, waiting.ticket.request
        if waiting.member.done():
            return True
        only = self._only(ticket)
        if only is not None and not only:
            waiting.member.set_exception(next(iter(ticket.unfit.values())))
            return True
        url = self._router.place(request.id, request.prompt_ids, self._clock(), only=only)
        if url is None:
            return False
        waiting.member.set_result(next(member for member in self._fleet.members if member.url == url))
        return True

    def _only(self, ticket: _Ticket) -> Sequence[str] | None:
        """The servers that may answer it; None: any."""
        members = self._fleet.members
        if ticket.request.copy is not None:
            members = [members[ticket.request.copy]]
        elif not ticket.unfit:
            return None
        # What others have refused does not wait for a server that is gone.
        return [member.url for member in members if member.url not in ticket.unfit and not (ticket.unfit and member.gone)]
