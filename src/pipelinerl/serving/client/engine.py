"""`RemoteEngine`: several engine servers as one `Engine`. A background thread communicates with the servers.

    submit, cancel ─▶ event loop in a background thread ─▶ servers
    step ◀─ mailbox ◀─ tokens, completions ◀──────────────────┘
    update_weights ─▶ a file, or the trainer's broadcast ─▶ all servers at once ─▶ one receipt

Each request gets exactly one completion, whatever happens to connections and servers: results of requests that are not in
`_open` are dropped, and only the caller's thread changes `_open`.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pipelinerl.errors import RequestError, UserError, WeightUpdateError
from pipelinerl.interfaces import StepOutput, WeightUpdate
from pipelinerl.serving.client.adapter import BroadcastWeights, EngineServer, SavedWeights, WeightSource
from pipelinerl.serving.client.checks import Limits, check_request
from pipelinerl.serving.client.dispatch import Dispatcher, Mailbox
from pipelinerl.serving.client.errors import Bounds, EngineUnavailableError
from pipelinerl.serving.client.fleet import ReplicaPool
from pipelinerl.serving.client.weights_file import SHARED_MEMORY, WeightFiles
from pipelinerl.types import Completion, EngineProgress, GenerationRequest, TokenEvent, UpdateReceipt

T = TypeVar("T")

_MARGIN_S = 20.0
"""The calling thread waits this much longer than the event loop, whose timeout errors say more."""


class RemoteEngine:
    """One or more engine servers behind `interfaces.Engine`. Not thread-safe; call `close` at the end.

    The constructor waits until all servers answer (`bounds.startup_s`). `weight_dirs`: directories for weight files,
    preferred first; the servers read the files there. `step_s`: how long `step` waits for results.

    Raises UserError, EngineUnavailableError naming the servers that do not answer, or the servers' errors.
    """

    def __init__(
        self,
        servers: Sequence[EngineServer],
        *,
        name: str = "engine",
        weight_dirs: Sequence[Path] = (SHARED_MEMORY,),
        bounds: Bounds = Bounds(),  # noqa: B008 - immutable
        step_s: float = 0.005,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        urls = [server.url for server in servers]
        if not urls or len(set(urls)) < len(urls):
            raise UserError(f"give each engine server once, and at least one: {urls}")
        self.name = name
        self._clock = clock
        self._bounds = bounds
        self._step_s = step_s
        self._mailbox = Mailbox()
        self._files = WeightFiles(*weight_dirs)
        self._last_update: WeightSource | None = None
        self._joined = False
        self._prefix = secrets.token_hex(4)  # keeps ids distinct from those of other clients of the same servers
        self._submitted = 0
        self._open: dict[str, GenerationRequest] = {}
        self._internal_ids: dict[str, str] = {}
        self._cancelled: list[Completion] = []
        self._tokens_generated = 0
        self._busy_s = 0.0
        self._busy_since_s: float | None = None
        self._updates = 0
        self._pauses_s: deque[float] = deque(maxlen=512)

        self._pool = ReplicaPool(servers, bounds, self._servers_changed, clock)
        self._dispatcher: Dispatcher | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"{name}-http", daemon=True)
        self._thread.start()
        try:
            infos = self._run_in_loop(self._pool.start(), bounds.startup_s)
            self.limits = Limits(min(info.max_length for info in infos), infos[0].vocabulary)
            versions = [info.version for info in infos]
            self._version, self.newest_version = min(versions), max(versions)
            self._run_in_loop(self._begin(), 0.0)
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int:
        """The newest version that all servers have acknowledged, except those that are gone."""
        return self._version

    @property
    def slots(self) -> int:
        """Total slots of the servers that accept requests now."""
        return self._dispatcher.slots if self._dispatcher else 0

    @property
    def in_progress(self) -> int:
        return min(self._requests, self.slots)

    @property
    def queued(self) -> int:
        return self._requests - self.in_progress

    @property
    def copies(self) -> int:
        """Number of model replicas: one per server, in the order of `servers`, including those that are gone."""
        return len(self._pool.replicas)

    @property
    def _requests(self) -> int:
        return len(self._open) + len(self._cancelled)

    def progress(self) -> EngineProgress:
        """Counts since the engine was created.

        `tokens_generated`: tokens of received completions. `busy_s`: time with a request in progress. `decode_steps`: steps
        of the servers, also for other clients, as of the last health checks; 0 if the servers do not count them.
        """
        since_s = self._clock() - self._busy_since_s if self._busy_since_s is not None else 0.0
        return EngineProgress(
            version=self._version,
            slots=self.slots,
            in_progress=self.in_progress,
            queued=self.queued,
            tokens_generated=self._tokens_generated,
            decode_steps=sum(replica.decode_steps for replica in self._pool.replicas),
            busy_s=self._busy_s + since_s,
            weight_updates=self._updates,
            pauses_s=tuple(self._pauses_s),
        )

    # ---- requests

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. Raises PromptTooLongError or RequestError if this request can't be served.

        If the engine has failed, raises the error that ended it.
        """
        self._mailbox.check()
        if request.id in self._internal_ids:
            raise RequestError(f"request {request.id!r} is already in the engine; give each request a unique id")
        if request.copy is not None and not 0 <= request.copy < self.copies:
            raise RequestError(f"request {request.id!r} is for copy {request.copy}; there are {self.copies} servers")
        check_request(request, self.limits)
        internal_id = f"{self._prefix}.{self._submitted}"
        self._submitted += 1
        self._open[internal_id] = request
        self._internal_ids[request.id] = internal_id
        self._count_busy_time()
        self._schedule(lambda dispatcher: dispatcher.submit(msgspec.structs.replace(request, id=internal_id)))

    def cancel(self, request_id: str) -> None:
        """End a request: the next step returns a completion with reason "cancelled". Unknown and ended ids are ignored.

        The request is cancelled at its server in the background.
        """
        internal_id = self._internal_ids.pop(request_id, None)
        if internal_id is None:
            return
        del self._open[internal_id]
        self._cancelled.append(
            Completion(request_id=request_id, token_ids=(), logprobs=(), weight_versions=(), finish_reason="cancelled")
        )
        self._schedule(lambda dispatcher: dispatcher.cancel(internal_id))

    def step(self) -> StepOutput:
        """Return the results since the last step; waits up to `step_s` if there are none.

        Raises EngineUnavailableError when no server is left, ServerError when a server can't be used as it is.
        """
        finished, self._cancelled = self._cancelled, []
        if not self._open:
            self._mailbox.check()
            self._count_busy_time()
            return StepOutput((), finished)
        output = self._mailbox.take(0.0 if finished else self._step_s)
        tokens = [
            TokenEvent(self._open[event.request_id].id, event.index, event.token_id, event.logprob, event.version)
            for event in output.tokens
            if event.request_id in self._open
        ]
        for completion in output.finished:
            self._tokens_generated += len(completion.token_ids)
            if (request_id := self._finish_request(completion.request_id)) is not None:
                finished.append(msgspec.structs.replace(completion, request_id=request_id))
        failed = [
            (ended, error)
            for internal_id, error in output.failed
            if (ended := self._finish_request(internal_id)) is not None
        ]
        self._count_busy_time()
        return StepOutput(tokens, finished, failed)

    def _finish_request(self, internal_id: str) -> str | None:
        """Remove a request from the open ones and return its id, or None if it was cancelled before."""
        request = self._open.pop(internal_id, None)
        if request is None:
            return None
        del self._internal_ids[request.id]
        return request.id

    # ---- weights

    def join_broadcast(self, host: str, port: int, key: str) -> None:
        """Have all servers join the trainer's broadcast. They then receive weights from the trainer; no file is written.

        Raises WeightUpdateError or ServerError, naming the server that does not join within `bounds.join_s`.
        """
        self._run_in_loop(self._pool.join(host, port, key), self._bounds.join_s)
        self._joined = True

    def update_weights(self, update: WeightUpdate) -> UpdateReceipt:
        """Have all servers apply the weights in flight. The servers continue to generate; this thread waits.

        After `join_broadcast` the servers have already received the weights, and `update.tensors` is not used.

        Each server applies all weights or none. The receipt has the longest pause, and the checksum that every server
        reported. If some servers refuse, the receipt's error names them. Raises WeightUpdateError if the version decreases,
        the file can't be written, or a server does not answer within `bounds.update_s`; EngineUnavailableError if no server
        is left.
        """
        self._mailbox.check()
        if update.version < self._version:
            raise WeightUpdateError(
                f"version {update.version} is older than the engine's {self._version}; nothing was changed"
            )
        source = BroadcastWeights(update.version, update.checksum) if self._joined else self._files.write(update)
        # Twice: a server that came back may still be applying the previous update.
        receipt = self._run_in_loop(self._pool.update(source), 2 * self._bounds.update_s)
        if receipt.error is not None:
            self._release(source)
            return receipt
        self._release(self._last_update)
        self._last_update = source
        self._version = update.version
        self._updates += 1
        self._pauses_s.append(receipt.pause_s)
        return msgspec.structs.replace(receipt, engine=self.name)

    def _release(self, source: WeightSource | None) -> None:
        """Free weights that will not be sent again."""
        if isinstance(source, SavedWeights):
            self._files.remove(source)

    def close(self) -> None:
        """Cancel all requests, close all connections, end the thread, remove the files. May be called twice."""
        if self._loop.is_closed():
            return
        try:
            self._run_in_loop(self._end(), 0.0)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_MARGIN_S)
            if not self._thread.is_alive():
                self._loop.close()
            self._files.close()

    # ---- the event loop

    def _schedule(self, action: Callable[[Dispatcher], None]) -> None:
        dispatcher = self._dispatcher
        assert dispatcher is not None  # noqa: S101 - set by the constructor
        self._loop.call_soon_threadsafe(action, dispatcher)

    def _run_in_loop(self, work: Coroutine[Any, Any, T], bound_s: float) -> T:
        """Run `work` in the event loop and return its result. `work` must limit itself to `bound_s`."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(bound_s + _MARGIN_S)
        except TimeoutError as error:
            future.cancel()
            urls = ", ".join(replica.url for replica in self._pool.replicas)
            raise EngineUnavailableError(f"no answer from the engine servers within {bound_s:g} s: {urls}") from error

    async def _begin(self) -> None:
        self._dispatcher = Dispatcher(self._pool, self._mailbox, self._bounds, self.limits.vocabulary, self._clock)
        self._dispatcher.servers_changed()
        self._watch = asyncio.create_task(self._pool.watch())
        self._watch.add_done_callback(self._watch_ended)

    def _watch_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._mailbox.fail(error)

    def _servers_changed(self) -> None:
        if self._dispatcher is not None:
            self._dispatcher.servers_changed()

    async def _end(self) -> None:
        if self._dispatcher is not None:
            self._watch.cancel()
            await self._dispatcher.close()
        await asyncio.gather(*(replica.server.close() for replica in self._pool.replicas), return_exceptions=True)

    def _count_busy_time(self) -> None:
        """Count the time since the last call as busy if a request was in progress then."""
        now_s = self._clock()
        if self._busy_since_s is not None:
            self._busy_s += now_s - self._busy_since_s
        self._busy_since_s = now_s if self._open else None
