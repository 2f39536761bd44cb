"""`RemoteEngine`: several engine servers as one `AsyncEngine`, in the event loop of the actor.

    generate, stream ─▶ servers
    advance ◀─ something arrived ◀─ tokens, completions ◀─┘
    update_weights ─▶ all servers at once: the trainer's file or broadcast ─▶ one receipt

A request waits for a slot and gets exactly one completion:

    waiting for a slot ─▶ sent ─▶ completion ─▶ checked ─▶ answer
          ▲                │
          └────────────────┘ the connection broke, or the server is busy, was restarted or is gone:
                             send it under a new id to any server with room

Nothing from an abandoned attempt is passed on: its connection is closed, and its id is not used again.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import count
from typing import Any, Self, TypeVar

import msgspec

from pipelinerl.errors import BroadcastEndedError, PromptTooLongError, RequestError, UserError, WeightUpdateError
from pipelinerl.interfaces import WeightUpdate
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
from pipelinerl.serving.client.fleet import Fleet, Replica
from pipelinerl.serving.wire import ProcessGroupRequest, WeightUpdateRequest, token_events
from pipelinerl.types import (
    Completion,
    EngineProgress,
    GenerationRequest,
    TokenEvent,
    UpdateReceipt,
    cancelled_completion,
)

T = TypeVar("T")

STEP_S = 0.005
"""How long `advance` waits for results."""


class RemoteEngine:
    """One or more engine servers behind `interfaces.AsyncEngine`. Made by `connect`, and used in the same event loop.

    `version`: the newest that all servers but the lost ones have acknowledged. `copies`: the number of servers,
    each with a replica of the model, including the lost ones.
    """

    def __init__(self, replicas: Sequence[Replica], *, name: str, bounds: Bounds) -> None:
        self.name = name
        self.max_length = self.vocabulary = self.version = 0
        self.copies = len(replicas)
        self._fleet, self._bounds = Fleet(replicas), bounds
        self._joined = False
        self._error: BaseException | None = None  # the first that ended the engine: open requests then get no answer
        self._arrived = asyncio.Event()  # a token, an answer or an error
        self._prefix, self._numbers = secrets.token_hex(4), count()  # of names
        self._open: set[str] = set()
        self._tokens_received = 0
        self._busy_s = 0.0
        self._busy_since_s = 0.0
        self._updates = 0
        self._pauses_s: deque[float] = deque(maxlen=512)

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        servers: Sequence[EngineServer],
        *,
        name: str = "engine",
        first: int | None = None,
        bounds: Bounds = Bounds(),  # noqa: B008 - immutable
    ) -> AsyncIterator[Self]:
        """An engine over `servers`, once all of them answer. At the end, nothing watches them any more.

        `first`: the version of the first weights, if these may replace later ones of another session.

        Raises UserError, EngineUnavailableError naming the servers that do not answer, or the servers' errors.
        """
        urls = [server.url for server in servers]
        if not urls or len(set(urls)) < len(urls):
            raise UserError(f"give each engine server once, and at least one: {urls}")
        replicas = [Replica(server, bounds) for server in servers]
        engine = cls(replicas, name=name, bounds=bounds)
        watching: list[asyncio.Task[None]] = []
        try:
            infos = await _gather_or_cancel(replica.first_answer() for replica in replicas)
            vocabularies = {url: info.vocabulary for url, info in zip(urls, infos, strict=True)}
            if len(set(vocabularies.values())) > 1:
                raise UserError(f"the engine servers have different models: vocabularies of {vocabularies}")
            engine.max_length, engine.vocabulary = min(info.max_length for info in infos), infos[0].vocabulary
            held = [info.version for info in infos]
            engine.version = min(held if first is None else [first, *held])
            watching += [asyncio.create_task(engine._watch(replica)) for replica in replicas]
            yield engine
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, *(server.close() for server in servers), return_exceptions=True)

    async def _watch(self, replica: Replica) -> None:
        """Check the health of a server periodically, until cancelled."""
        try:
            while True:
                await asyncio.sleep(self._bounds.health_every_s)
                await replica.look()
                self._servers_changed()
        except Exception as error:  # noqa: BLE001 - it ends the engine
            self._fail(error)

    @property
    def slots(self) -> int:
        """Total slots of the servers that accept requests now."""
        return self._fleet.slots

    @property
    def in_progress(self) -> int:
        return min(len(self._open), self.slots)

    @property
    def queued(self) -> int:
        return len(self._open) - self.in_progress

    def progress(self) -> EngineProgress:
        """Counts since the engine was created.

        `tokens_generated`: tokens of received completions. `busy_s`: time with a request in progress.
        """
        since_s = time.monotonic() - self._busy_since_s if self._open else 0.0
        return EngineProgress(
            version=self.version,
            slots=self.slots,
            in_progress=self.in_progress,
            queued=self.queued,
            tokens_generated=self._tokens_received,
            busy_s=self._busy_s + since_s,
            weight_updates=self._updates,
            pauses_s=tuple(self._pauses_s),
        )

    # ---- requests

    async def generate(self, request: GenerationRequest) -> Completion:
        """One completion. Raises PromptTooLongError or RequestError if this request can't be served.

        If the engine has failed, raises the error that ended it. If it fails meanwhile, `advance` raises the error, and this
        does not return: the error is not the rollout's. Cancelling this ends the request at its server.
        """
        with self._admitted(request):
            return await self._answer(request)

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent | Completion, None]:
        """The same, with every token as it arrives."""
        tokens: asyncio.Queue[TokenEvent | None] = asyncio.Queue()

        def forward(event: TokenEvent) -> None:
            tokens.put_nowait(event)
            self._arrived.set()

        with self._admitted(request):
            task = asyncio.create_task(self._answer(msgspec.structs.replace(request, stream=True), forward))
            task.add_done_callback(lambda _: tokens.put_nowait(None))
            try:
                while (event := await tokens.get()) is not None:
                    yield event
                yield await task
            finally:
                task.cancel()

    @contextmanager
    def _admitted(self, request: GenerationRequest) -> Iterator[None]:
        """Count the request as open inside. Raises RequestError if it can never be served."""
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
        if not self._open:
            self._busy_since_s = time.monotonic()
        self._open.add(request.id)
        try:
            yield
        finally:
            self._open.discard(request.id)
            if not self._open:
                self._busy_s += time.monotonic() - self._busy_since_s

    def take_cancelled(self) -> list[Completion]:
        """None: a cancelled request ends with its connection, so nothing is known of its tokens."""
        return []

    async def advance(self) -> bool:
        """Wait until something arrives, at most `STEP_S`.

        Raises EngineUnavailableError when no server is left, ServerError when a server can't be used as it is.
        """
        self._check()
        if not self._open:
            return False
        with suppress(TimeoutError):
            async with asyncio.timeout(STEP_S):
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
        """End the engine. The first error stays."""
        self._error = self._error or error
        self._arrived.set()

    def _servers_changed(self) -> None:
        if (error := self._fleet.unavailable()) is not None:
            self._fail(error)
        if self._joined and (gone := next((one for one in self._fleet.replicas if one.gone), None)):
            self._fail(BroadcastEndedError(f"engine server {gone.url} is gone, and all receive weights: {gone.last_error}"))
        self._fleet.place()

    # ---- one request

    async def _answer(self, request: GenerationRequest, forward: TokenListener = lambda _: None) -> Completion:
        """`forward`: called once for each token of a stream, in order."""
        try:
            completion = msgspec.structs.replace(await self._serve(request, forward), request_id=request.id)
        except RequestError:
            raise
        except Exception as error:
            self._fail(error)
            await asyncio.Event().wait()  # for ever
            raise
        finally:
            self._arrived.set()
        self._tokens_received += len(completion.token_ids)
        return completion

    async def _serve(self, wanted: GenerationRequest, forward: TokenListener) -> Completion:
        """Send the request, under another id each time, until a server answers it.

        Raises RequestError, or an error that ends the engine.
        """
        name, failures = f"{self._prefix}.{next(self._numbers)}", 0
        tokens: list[TokenEvent] = []

        def take(event: TokenEvent) -> None:
            tokens.append(msgspec.structs.replace(event, request_id=wanted.id))
            forward(tokens[-1])

        while True:
            async with self._fleet.slot(wanted) as replica:
                request = msgspec.structs.replace(wanted, id=f"{name}.{failures}", copy=None)
                try:
                    completion = await replica.call(replica.server.generate(request, take))
                    fault = find_fault(completion, request, self.vocabulary)
                    if not fault and wanted.stream:
                        events = token_events(msgspec.structs.replace(completion, request_id=wanted.id))
                        if tokens != events[: len(tokens)]:
                            fault = "its tokens differ from those streamed before"
                        else:
                            for event in events[len(tokens) :]:  # the tokens that were not streamed
                                take(event)
                    if fault:
                        why = f"returned an invalid completion for request {request.id!r}: {fault}"
                        raise ServerError(replica.url, why)
                    if completion.finish_reason != "cancelled":
                        replica.hold((*wanted.prompt_ids, *completion.token_ids))
                        return completion
                    error: ServerError = ServerBusyError(replica.url, "cancelled a request without being asked to")
                except (ServerUnreachableError, ServerBusyError) as failure:
                    error = failure
                if tokens:  # another attempt might produce other tokens
                    return cancelled_completion(wanted.id, tokens)
                failures += 1
                if failures >= self._bounds.tries:
                    raise EngineUnavailableError(
                        f"request {wanted.id!r} failed {failures} times; the last time: {error}"
                    ) from error
                await asyncio.sleep(back_off_s(failures))

    # ---- weights

    async def join_broadcast(self, host: str, port: int, key: str) -> None:
        """Have all servers join the trainer's broadcast, and receive weights by it instead of reading files.

        Their indices follow the order of `servers`. Raises WeightUpdateError or ServerError, naming the server that does not
        join within `bounds.join_s`.
        """
        timeout_s = self._bounds.join_s
        await _gather_or_cancel(
            replica.server.join_broadcast(
                ProcessGroupRequest(host=host, port=port, key=key, index=index, timeout_s=timeout_s, name=replica.url)
            )
            for index, replica in enumerate(self._fleet.replicas)
        )
        self._joined = True

    async def update_weights(self, update: WeightUpdate) -> UpdateReceipt:
        """Have all servers that are not gone apply the weights in flight. Servers and coroutines continue.

        They read the file at `update.path`. After `join_broadcast`, they have already received the weights.

        Each server applies all weights or none. The receipt has the longest pause, the sum of the sequences in flight, and
        the checksum that every server reported. If some servers refuse, or give no answer within `bounds.update_s`, its
        error names them. Raises WeightUpdateError if the version decreases; EngineUnavailableError if no server is left.
        """
        self._check()
        if update.version < self.version:
            older = f"version {update.version} is older than the engine's {self.version}"
            raise WeightUpdateError(f"{older}; nothing was changed")
        weights = WeightUpdateRequest(version=update.version, checksum=update.checksum, path=update.path or None)
        receipts: list[UpdateReceipt] = []
        problems: list[str] = []
        while True:
            work = (replica.update(weights) for replica in self._fleet.replicas)
            for answer in await asyncio.gather(*work, return_exceptions=True):
                if isinstance(answer, UpdateReceipt):
                    receipts.append(answer)
                elif isinstance(answer, WeightUpdateError):
                    problems.append(str(answer))
                elif answer is not None:
                    raise answer
            if receipts or problems:
                break
            if (error := self._fleet.unavailable()) is not None:
                raise error
            await asyncio.sleep(self._bounds.health_every_s)
        pause_s = max((receipt.pause_s for receipt in receipts), default=0.0)
        if not problems:
            for replica in self._fleet.replicas:
                replica.wanted = weights
            self.version = update.version
            self._updates += 1
            self._pauses_s.append(pause_s)
        self._servers_changed()
        return UpdateReceipt(
            engine=self.name,
            version=weights.version,
            checksum="" if problems else weights.checksum,
            pause_s=pause_s,
            sequences_in_flight=sum(receipt.sequences_in_flight for receipt in receipts),
            error="; ".join(problems) or None,
        )


async def _gather_or_cancel(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all concurrently and return their results. The first failure cancels the others."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
