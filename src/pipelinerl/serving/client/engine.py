"""`RemoteEngine`: several engine servers as one `AsyncEngine`, in the event loop of the actor.

    generate, stream ─▶ a task for each request ─▶ servers
    advance ◀─ something arrived ◀─ tokens, completions ◀─┘
    update_weights ─▶ all servers at once: the trainer's file or broadcast ─▶ one receipt

A request's task waits for a slot and ends with exactly one completion:

    waiting for a slot ─▶ sent ─▶ completion ─▶ checked ─▶ answer
          ▲                │
          └────────────────┘ the connection broke, or the server is busy, was restarted or is gone:
                             send it under a new id to any server with room

Nothing from an abandoned attempt is passed on: its task has ended, and its id is not used again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Self

import msgspec

from pipelinerl.errors import BroadcastEndedError, PromptTooLongError, RequestError, UserError, WeightUpdateError
from pipelinerl.interfaces import CANCELLED_KEPT, WeightUpdate
from pipelinerl.serving.client.adapter import (
    Bounds,
    EngineServer,
    EngineUnavailableError,
    ServerBusyError,
    ServerError,
    ServerUnreachableError,
    TokenListener,
    back_off_s,
    find_fault,
)
from pipelinerl.serving.client.fleet import Replica, ReplicaPool
from pipelinerl.serving.wire import ServerInfo, WeightUpdateRequest, token_events
from pipelinerl.types import (
    Completion,
    EngineProgress,
    GenerationRequest,
    TokenEvent,
    UpdateReceipt,
    cancelled_completion,
)

logger = logging.getLogger(__name__)


class RemoteEngine:
    """One or more engine servers behind `interfaces.AsyncEngine`. Made by `connect`, and used in the same event loop."""

    def __init__(
        self,
        pool: ReplicaPool,
        infos: Sequence[ServerInfo],
        *,
        name: str,
        first: int | None,
        bounds: Bounds,
        step_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.name = name
        self.max_length, self.vocabulary = min(info.max_length for info in infos), infos[0].vocabulary
        held = [info.version for info in infos]
        self._version = min(held if first is None else [first, *held])
        self._pool, self._bounds = pool, bounds
        self._step_s, self._clock = step_s, clock
        self._joined = False
        self._error: BaseException | None = None  # the first that ended the engine: open requests then get no answer
        self._arrived = asyncio.Event()  # a token, an answer or an error
        self._prefix, self._started = secrets.token_hex(4), 0
        self._open: set[str] = set()
        self._cancelled: deque[Completion] = deque(maxlen=CANCELLED_KEPT)
        self._tasks: set[asyncio.Task[None]] = set()
        self._tokens_received = 0
        self._busy_s = 0.0
        self._busy_since_s = 0.0
        self._updates = 0
        self._pauses_s: deque[float] = deque(maxlen=512)
        pool.on_change = self._servers_changed

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        servers: Sequence[EngineServer],
        *,
        name: str = "engine",
        first: int | None = None,
        bounds: Bounds = Bounds(),  # noqa: B008 - immutable
        step_s: float = 0.005,
        clock: Callable[[], float] = time.monotonic,
    ) -> AsyncIterator[Self]:
        """An engine over `servers`, once all of them answer. At the end, its requests are cancelled.

        `first`: the version of the first weights, if these may replace later ones of another session. `step_s`: how long
        `advance` waits for results.

        Raises UserError, EngineUnavailableError naming the servers that do not answer, or the servers' errors.
        """
        urls = [server.url for server in servers]
        if not urls or len(set(urls)) < len(urls):
            raise UserError(f"give each engine server once, and at least one: {urls}")
        pool = ReplicaPool(servers, bounds, clock)
        try:
            infos = await pool.start()
            engine = cls(pool, infos, name=name, first=first, bounds=bounds, step_s=step_s, clock=clock)
            watch = asyncio.create_task(pool.watch())
            watch.add_done_callback(engine._task_ended)
            try:
                yield engine
            finally:
                watch.cancel()
                await engine._cancel_all()
        finally:
            await asyncio.gather(*(server.close() for server in servers), return_exceptions=True)

    @property
    def version(self) -> int:
        """The newest version that all servers have acknowledged, except those that are gone."""
        return self._version

    @property
    def slots(self) -> int:
        """Total slots of the servers that accept requests now."""
        return self._pool.slots

    @property
    def in_progress(self) -> int:
        return min(len(self._open), self.slots)

    @property
    def queued(self) -> int:
        return len(self._open) - self.in_progress

    @property
    def copies(self) -> int:
        """Number of model replicas: one per server, in the order of `servers`, including those that are gone."""
        return len(self._pool.replicas)

    def progress(self) -> EngineProgress:
        """Counts since the engine was created.

        `tokens_generated`: tokens of received completions. `busy_s`: time with a request in progress. `decode_steps`: steps
        of the servers, also for other clients, as of the last health checks; 0 if the servers do not count them.
        """
        since_s = self._clock() - self._busy_since_s if self._open else 0.0
        return EngineProgress(
            version=self._version,
            slots=self.slots,
            in_progress=self.in_progress,
            queued=self.queued,
            tokens_generated=self._tokens_received,
            decode_steps=sum(replica.decode_steps for replica in self._pool.replicas),
            busy_s=self._busy_s + since_s,
            weight_updates=self._updates,
            pauses_s=tuple(self._pauses_s),
        )

    # ---- requests

    async def generate(self, request: GenerationRequest) -> Completion:
        """One completion. Raises PromptTooLongError or RequestError if this request can't be served.

        If the engine has failed, raises the error that ended it. If it fails meanwhile, `advance` raises the error, and this
        does not return: the error is not the rollout's.
        """
        with self._serving(request) as answer:
            return await answer

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent | Completion, None]:
        """The same, with every token as it arrives."""
        tokens: asyncio.Queue[TokenEvent | None] = asyncio.Queue()
        with self._serving(msgspec.structs.replace(request, stream=True), tokens.put_nowait) as answer:
            answer.add_done_callback(lambda _: tokens.put_nowait(None))
            while (event := await tokens.get()) is not None:
                yield event
            yield answer.result()

    @contextmanager
    def _serving(
        self, request: GenerationRequest, on_token: TokenListener = lambda _: None
    ) -> Iterator[asyncio.Future[Completion]]:
        """Serve the request while inside: `on_token` gets the tokens of a stream, then the future gets the completion.

        The future raises RequestError if no server can serve the request. Leaving before the answer cancels the request, at
        its server in the background.
        """
        self._check()
        if request.id in self._open:
            raise RequestError(f"request {request.id!r} is already in the engine; give each request a unique id")
        if request.copy is not None and not 0 <= request.copy < self.copies:
            raise RequestError(f"request {request.id!r} is for copy {request.copy}; there are {self.copies} servers")
        prompt_tokens, new_tokens = len(request.prompt_ids), request.sampling.max_tokens
        if prompt_tokens + new_tokens > self.max_length:
            raise PromptTooLongError(
                f"request {request.id!r} can't fit: {prompt_tokens} prompt tokens + {new_tokens} new tokens > "
                f"{self.max_length} (the engine servers' longest sequence)"
            )

        def forward(event: TokenEvent) -> None:
            on_token(event)
            self._arrived.set()

        if not self._open:
            self._busy_since_s = self._clock()
        self._open.add(request.id)
        self._started += 1
        ticket = Ticket(f"{self._prefix}.{self._started}", request, forward)
        task = self._start(self._run(ticket))
        try:
            yield ticket.answer
        finally:
            ticket.answer.cancel()
            if not task.done():
                self._start(self._cancel(ticket, task))
            self._open.discard(request.id)
            if not self._open:
                self._busy_s += self._clock() - self._busy_since_s

    def take_cancelled(self) -> list[Completion]:
        """The completions of cancelled requests that have arrived since the last call."""
        taken = list(self._cancelled)
        self._cancelled.clear()
        return taken

    async def advance(self) -> bool:
        """Wait until something arrives, at most `step_s`.

        Raises EngineUnavailableError when no server is left, ServerError when a server can't be used as it is.
        """
        self._check()
        if not self._open:
            return False
        with suppress(TimeoutError):
            async with asyncio.timeout(self._step_s):
                await self._arrived.wait()
        self._arrived.clear()
        self._check()
        await asyncio.sleep(0)
        return True

    def _check(self) -> None:
        """Raise the error that ended the engine, if there is one."""
        if self._error is not None:
            raise self._error

    def _fail(self, error: BaseException) -> None:
        """End the engine. The first error is kept."""
        self._error = self._error or error
        self._arrived.set()

    def _servers_changed(self) -> None:
        if (error := self._pool.unavailable()) is not None:
            self._fail(error)
        if self._joined and (gone := next((one for one in self._pool.replicas if one.gone), None)):
            self._fail(BroadcastEndedError(f"engine server {gone.url} is gone, and all receive weights: {gone.last_error}"))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _cancel_all(self) -> None:
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- one request

    async def _run(self, ticket: Ticket) -> None:
        try:
            completion = msgspec.structs.replace(await self._serve(ticket), request_id=ticket.request.id)
            self._tokens_received += len(completion.token_ids)
            if ticket.cancelled:
                self._cancelled.append(completion)
            else:
                ticket.answer.set_result(completion)
        except RequestError as error:
            if not ticket.cancelled:
                ticket.answer.set_exception(error)
        except Exception as error:  # noqa: BLE001 - any error that is not the request's own ends the engine
            if not ticket.cancelled:
                self._fail(error)
        finally:
            self._arrived.set()

    async def _serve(self, ticket: Ticket) -> Completion:
        """Send the request until a server answers it. Raises RequestError, or an error that ends the engine."""
        while True:
            async with self._pool.slot(ticket.request) as replica:
                ticket.asked, request = replica, ticket.wire_request
                try:
                    work = replica.server.generate(request, ticket.take)
                    completion = self._checked(ticket, replica, request, await replica.call(work))
                    if completion.finish_reason != "cancelled" or ticket.cancelled:
                        return completion
                    error: ServerError = ServerBusyError(replica.url, "cancelled a request without being asked to")
                except (ServerUnreachableError, ServerBusyError) as failure:
                    error = failure
                finally:
                    ticket.asked = None
                ticket.failures += 1
                if ticket.tokens or ticket.cancelled:  # another attempt might produce other tokens
                    return cancelled_completion(ticket.request.id, ticket.tokens)
                if ticket.failures >= self._bounds.tries:
                    raise EngineUnavailableError(
                        f"request {ticket.request.id!r} failed {ticket.failures} times; the last time: {error}"
                    ) from error
                await asyncio.sleep(back_off_s(ticket.failures))

    def _checked(self, ticket: Ticket, replica: Replica, request: GenerationRequest, completion: Completion) -> Completion:
        fault = find_fault(completion, request, self.vocabulary)
        if fault is None and request.stream and not ticket.complete(completion):
            fault = "its tokens differ from those streamed before"
        if fault is not None:
            raise ServerError(replica.url, f"returned an invalid completion for request {request.id!r}: {fault}")
        return completion

    async def _cancel(self, ticket: Ticket, task: asyncio.Task[None]) -> None:
        if ticket.asked is not None:
            with suppress(ServerError, RequestError, TimeoutError):  # closing the connection then ends it
                async with asyncio.timeout(self._bounds.cancel_s):
                    await ticket.asked.server.cancel(ticket.wire_request.id)
                    await asyncio.wait({task})
        task.cancel()

    # ---- weights

    async def join_broadcast(self, host: str, port: int, key: str) -> None:
        """Have all servers join the trainer's broadcast, and receive weights by it instead of reading files.

        Raises WeightUpdateError or ServerError, naming the server that does not join within `bounds.join_s`.
        """
        await self._pool.join(host, port, key)
        self._joined = True

    async def update_weights(self, update: WeightUpdate) -> UpdateReceipt:
        """Have all servers apply the weights in flight. Servers and coroutines continue.

        They read the file at `update.path`. After `join_broadcast`, they have already received the weights.

        Each server applies all weights or none. The receipt has the longest pause, and the checksum that every server
        reported. If some servers refuse, the receipt's error names them. Raises WeightUpdateError if the version decreases
        or a server does not answer within `bounds.update_s`; EngineUnavailableError if no server is left.
        """
        self._check()
        if update.version < self._version:
            raise WeightUpdateError(
                f"version {update.version} is older than the engine's {self._version}; nothing was changed"
            )
        receipt = await self._pool.update(
            WeightUpdateRequest(version=update.version, checksum=update.checksum, path=update.path or None)
        )
        if receipt.error is not None:
            return receipt
        self._version = update.version
        self._updates += 1
        self._pauses_s.append(receipt.pause_s)
        return msgspec.structs.replace(receipt, engine=self.name)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)


class Ticket:
    """A request that is being served. `name` is its id at the servers, unique also among their other clients.

    `asked`: the server that may be serving it now. `failures`: how often a server did not serve it. `tokens`: those of a
    stream, which were forwarded in order.
    """

    def __init__(self, name: str, request: GenerationRequest, forward: TokenListener) -> None:
        self.name, self.request, self._forward = name, request, forward
        self.answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.asked: Replica | None = None
        self.failures = 0
        self.tokens: list[TokenEvent] = []

    @property
    def cancelled(self) -> bool:
        return self.answer.cancelled()

    @property
    def wire_request(self) -> GenerationRequest:
        """The request under an id of its own for each attempt."""
        return msgspec.structs.replace(self.request, id=f"{self.name}.{self.failures}", copy=None)

    def take(self, event: TokenEvent) -> None:
        """Forward the token if it is the next one. Tokens after a gap are left to `complete`."""
        if event.index == len(self.tokens):
            event = msgspec.structs.replace(event, request_id=self.request.id)
            self.tokens.append(event)
            self._forward(event)

    def complete(self, completion: Completion) -> bool:
        """Forward the remaining tokens. Returns False and forwards nothing if the completion contradicts those forwarded."""
        events = token_events(msgspec.structs.replace(completion, request_id=self.request.id))
        if self.tokens != events[: len(self.tokens)]:
            return False
        for event in events[len(self.tokens) :]:
            self.take(event)
        return True
