"""`RemoteEngine`: several engine servers as one `AsyncEngine`, in the event loop of the actor.

    generate, stream ─▶ dispatcher: a task for each request ─▶ servers
    advance ◀─ something arrived ◀─ tokens, completions ◀─────────┘
    update_weights ─▶ a file, or the trainer's broadcast ─▶ all servers at once ─▶ one receipt

Each request gets exactly one completion, whatever happens to connections and servers.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Self

import msgspec

from pipelinerl.errors import RequestError, UserError, WeightUpdateError
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.serving.client.adapter import Bounds, EngineServer, Limits, TokenListener, check_request
from pipelinerl.serving.client.dispatch import Dispatcher
from pipelinerl.serving.client.fleet import ReplicaPool
from pipelinerl.serving.client.weights_file import SHARED_MEMORY, WeightFiles
from pipelinerl.serving.wire import ServerInfo, WeightUpdateRequest
from pipelinerl.types import Completion, EngineProgress, GenerationRequest, TokenEvent, UpdateReceipt


class RemoteEngine:
    """One or more engine servers behind `interfaces.AsyncEngine`. Made by `connect`, and used in the same event loop."""

    def __init__(
        self,
        pool: ReplicaPool,
        infos: Sequence[ServerInfo],
        files: WeightFiles,
        *,
        name: str,
        first: int | None,
        bounds: Bounds,
        step_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.name = name
        self.limits = Limits(min(info.max_length for info in infos), infos[0].vocabulary)
        held = [info.version for info in infos]
        self._version = min(held if first is None else [first, *held])
        self._pool = pool
        self._dispatcher = Dispatcher(pool, bounds, self.limits.vocabulary)
        self._files, self._step_s, self._clock = files, step_s, clock
        self._joined = False
        self._open: set[str] = set()
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
        weight_dirs: Sequence[Path] = (SHARED_MEMORY,),
        bounds: Bounds = Bounds(),  # noqa: B008 - immutable
        step_s: float = 0.005,
        clock: Callable[[], float] = time.monotonic,
    ) -> AsyncIterator[Self]:
        """An engine over `servers`, once all of them answer. At the end, its requests are cancelled and its files removed.

        `first`: the version of the first weights, if these may replace later ones of another session.
        `weight_dirs`: directories for weight files, preferred first; the servers read the files there. `step_s`: how long
        `advance` waits for results.

        Raises UserError, EngineUnavailableError naming the servers that do not answer, or the servers' errors.
        """
        urls = [server.url for server in servers]
        if not urls or len(set(urls)) < len(urls):
            raise UserError(f"give each engine server once, and at least one: {urls}")
        pool, files = ReplicaPool(servers, bounds, clock), WeightFiles(*weight_dirs)
        try:
            infos = await pool.start()
            engine = cls(pool, infos, files, name=name, first=first, bounds=bounds, step_s=step_s, clock=clock)
            watch = asyncio.create_task(pool.watch())
            watch.add_done_callback(engine._task_ended)
            try:
                yield engine
            finally:
                watch.cancel()
                await engine._dispatcher.close()
        finally:
            await asyncio.gather(*(server.close() for server in servers), return_exceptions=True)
            files.close()

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
            tokens_generated=self._dispatcher.tokens_received,
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
        """The request is open while inside."""
        self._check()
        if request.id in self._open:
            raise RequestError(f"request {request.id!r} is already in the engine; give each request a unique id")
        if request.copy is not None and not 0 <= request.copy < self.copies:
            raise RequestError(f"request {request.id!r} is for copy {request.copy}; there are {self.copies} servers")
        check_request(request, self.limits)
        if not self._open:
            self._busy_since_s = self._clock()
        self._open.add(request.id)
        try:
            with self._dispatcher.serving(request, on_token) as answer:
                yield answer
        finally:
            self._open.discard(request.id)
            if not self._open:
                self._busy_s += self._clock() - self._busy_since_s

    def take_cancelled(self) -> list[Completion]:
        """The completions of cancelled requests that have arrived since the last call."""
        return self._dispatcher.take_cancelled()

    async def advance(self) -> bool:
        """Wait until something arrives, at most `step_s`.

        Raises EngineUnavailableError when no server is left, ServerError when a server can't be used as it is.
        """
        self._check()
        if not self._open:
            return False
        with suppress(TimeoutError):
            async with asyncio.timeout(self._step_s):
                await self._dispatcher.arrived.wait()
        self._dispatcher.arrived.clear()
        self._check()
        await asyncio.sleep(0)
        return True

    def _check(self) -> None:
        """Raise the error that ended the engine, if there is one."""
        if self._dispatcher.error is not None:
            raise self._dispatcher.error

    # ---- weights

    async def join_broadcast(self, host: str, port: int, key: str) -> None:
        """Have all servers join the trainer's broadcast. They then receive weights from the trainer; no file is written.

        Raises WeightUpdateError or ServerError, naming the server that does not join within `bounds.join_s`.
        """
        await self._pool.join(host, port, key)
        self._joined = True

    async def update_weights(self, update: WeightUpdate) -> UpdateReceipt:
        """Have all servers apply the weights in flight. Servers and coroutines continue.

        After `join_broadcast` the servers have already received the weights, and `update.tensors` is not used.

        Each server applies all weights or none. The receipt has the longest pause, and the checksum that every server
        reported. If some servers refuse, the receipt's error names them. Raises WeightUpdateError if the version decreases,
        the file can't be written, or a server does not answer within `bounds.update_s`; EngineUnavailableError if no server
        is left.
        """
        self._check()
        if update.version < self._version:
            raise WeightUpdateError(
                f"version {update.version} is older than the engine's {self._version}; nothing was changed"
            )
        if self._joined:
            request = WeightUpdateRequest(version=update.version, checksum=update.checksum)
        else:
            request = await asyncio.to_thread(self._files.write, update)
        previous = self._pool.last_update
        receipt = await self._pool.update(request)
        unused = previous if receipt.error is None else request
        if unused is not None and unused.path is not None:
            self._files.remove(unused.path)
        if receipt.error is not None:
            return receipt
        self._version = update.version
        self._updates += 1
        self._pauses_s.append(receipt.pause_s)
        return msgspec.structs.replace(receipt, engine=self.name)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._dispatcher.fail(error)
