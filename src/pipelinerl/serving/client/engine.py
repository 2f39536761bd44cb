"""Engine servers as one `Engine`: the actor steps it like the embedded one, while a thread talks to the servers.

    submit, cancel ─▶ event loop in a thread of its own ─▶ servers
    step ◀─ mailbox ◀─ tokens, completions ◀──────────────────┘
    update_weights ─▶ one file, or what the trainer has broadcast ─▶ all servers at once ─▶ one receipt

Each request is answered exactly once, whatever happens to connections and servers: `_open` decides, in the caller's thread.
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
from pipelinerl.serving.client.adapter import BroadcastWeights, EngineServer, SavedWeights, WeightOffer
from pipelinerl.serving.client.checks import Limits, check_request
from pipelinerl.serving.client.dispatch import Dispatcher, Mailbox
from pipelinerl.serving.client.errors import Bounds, EngineUnavailableError
from pipelinerl.serving.client.fleet import Fleet
from pipelinerl.serving.client.weights_file import SHARED_MEMORY, WeightFiles
from pipelinerl.types import Completion, EngineProgress, GenerationRequest, TokenEvent, UpdateReceipt

T = TypeVar("T")

_MARGIN_S = 20.0
"""How much longer the calling thread waits than the event loop, which knows better what it waits for."""


class RemoteEngine:
    """1 to N engine servers behind `interfaces.Engine`. Used from one thread; `close` it.

    Waits until all servers answer (`bounds.startup_s`). `weight_dirs`: where files of weights may go, best first; the
    servers read them there. `step_s`: how long `step` waits for something to come.

    Raises UserError, EngineUnavailableError naming the servers that do not answer, or what they answered.
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
        self._kept: WeightOffer | None = None
        self._joined = False
        self._prefix = secrets.token_hex(4)  # other clients of the same servers have other ids
        self._submitted = 0
        self._open: dict[str, GenerationRequest] = {}
        self._tickets: dict[str, str] = {}
        self._cancelled: list[Completion] = []
        self._tokens_generated = 0
        self._busy_s = 0.0
        self._busy_since_s: float | None = None
        self._updates = 0
        self._pauses_s: deque[float] = deque(maxlen=512)

        self._fleet = Fleet(servers, bounds, self._servers_changed, clock)
        self._dispatcher: Dispatcher | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"{name}-http", daemon=True)
        self._thread.start()
        try:
            infos = self._call(self._fleet.start(), bounds.startup_s)
            self.limits = Limits(min(info.max_length for info in infos), infos[0].vocabulary)
            versions = [info.version for info in infos]
            self._version, self.newest_version = min(versions), max(versions)
            self._call(self._begin(), 0.0)
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int:
        """The newest that every server has acknowledged, but for those that are gone."""
        return self._version

    @property
    def slots(self) -> int:
        """Of all servers that take requests now."""
        return self._dispatcher.slots if self._dispatcher else 0

    @property
    def in_progress(self) -> int:
        return min(self._requests, self.slots)

    @property
    def queued(self) -> int:
        return self._requests - self.in_progress

    @property
    def copies(self) -> int:
        """A copy of the model on each server, in the order in which they were given; those that are gone included."""
        return len(self._fleet.members)

    @property
    def _requests(self) -> int:
        return len(self._open) + len(self._cancelled)

    def progress(self) -> EngineProgress:
        """Counts since the engine was made.

        `tokens_generated` are those of completions that came, `busy_s` the time with a request in progress, `decode_steps`
        those that the servers made, for other clients too, as of their last health check; 0 if they do not count them.
        """
        since_s = self._clock() - self._busy_since_s if self._busy_since_s is not None else 0.0
        return EngineProgress(
            version=self._version,
            slots=self.slots,
            in_progress=self.in_progress,
            queued=self.queued,
            tokens_generated=self._tokens_generated,
            decode_steps=sum(member.decode_steps for member in self._fleet.members),
            busy_s=self._busy_s + since_s,
            weight_updates=self._updates,
            pauses_s=tuple(self._pauses_s),
        )

    # ---------------------------------------------------------------------------------------------- requests

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. Raises PromptTooLongError or RequestError, for this request alone, if it can't be served.

        Raises what ended the engine, if something did.
        """
        self._mailbox.check()
        if request.id in self._tickets:
            raise RequestError(f"request {request.id!r} is already in the engine; give each request an id of its own")
        if request.copy is not None and not 0 <= request.copy < self.copies:
            raise RequestError(f"request {request.id!r} is for copy {request.copy}; there are {self.copies} servers")
        check_request(request, self.limits)
        ticket = f"{self._prefix}.{self._submitted}"
        self._submitted += 1
        self._open[ticket] = request
        self._tickets[request.id] = ticket
        self._note_busy()
        self._in_loop(lambda dispatcher: dispatcher.submit(msgspec.structs.replace(request, id=ticket)))

    def cancel(self, request_id: str) -> None:
        """End a request: the next step hands out a completion of reason "cancelled". Unknown ids (ended) are ignored.

        The server lets go of it in the background.
        """
        ticket = self._tickets.pop(request_id, None)
        if ticket is None:
            return
        del self._open[ticket]
        self._cancelled.append(
            Completion(request_id=request_id, token_ids=(), logprobs=(), weight_versions=(), finish_reason="cancelled")
        )
        self._in_loop(lambda dispatcher: dispatcher.cancel(ticket))

    def step(self) -> StepOutput:
        """What came since the last step; waits up to `step_s` if there is nothing yet.

        Raises EngineUnavailableError when no server is left, ServerError when one can't be used as it is.
        """
        finished, self._cancelled = self._cancelled, []
        if not self._open:
            self._mailbox.check()
            self._note_busy()
            return StepOutput((), finished)
        output = self._mailbox.take(0.0 if finished else self._step_s)
        tokens = [
            TokenEvent(self._open[event.request_id].id, event.index, event.token_id, event.logprob, event.version)
            for event in output.tokens
            if event.request_id in self._open
        ]
        for completion in output.finished:
            self._tokens_generated += len(completion.token_ids)
            if (request_id := self._ended(completion.request_id)) is not None:
                finished.append(msgspec.structs.replace(completion, request_id=request_id))
        failed = [(ended, error) for ticket, error in output.failed if (ended := self._ended(ticket)) is not None]
        self._note_busy()
        return StepOutput(tokens, finished, failed)

    def _ended(self, ticket: str) -> str | None:
        """The id of the request, which is not open any more; None if it was cancelled before."""
        request = self._open.pop(ticket, None)
        if request is None:
            return None
        del self._tickets[request.id]
        return request.id

    # ----------------------------------------------------------------------------------------------- weights

    def join_broadcast(self, host: str, port: int) -> None:
        """Have all servers join the trainer's broadcast: they receive weights by themselves then, and no file is written.

        Raises WeightUpdateError, or what a server answered, naming the one that does not join within `bounds.join_s`.
        """
        self._call(self._fleet.join(host, port), self._bounds.join_s)
        self._joined = True

    def update_weights(self, update: WeightUpdate) -> UpdateReceipt:
        """Have all servers take the weights in flight; they go on generating meanwhile, this thread waits.

        Servers that joined the trainer's broadcast have received them: `update.tensors` is not looked at.

        Each takes all or none. `pause_s` is the longest of theirs; the checksum is the one that each of them echoed. If
        some refuse, the receipt's error names them. Raises WeightUpdateError if the version goes back, the file can't be
        written, or a server does not answer within `bounds.update_s`, EngineUnavailableError if none is left.
        """
        self._mailbox.check()
        if update.version < self._version:
            raise WeightUpdateError(
                f"version {update.version} is older than the engine's {self._version}; nothing was changed"
            )
        offer = BroadcastWeights(update.version, update.checksum) if self._joined else self._files.write(update)
        # Twice: a server that came back may be taking the update before this one.
        receipt = self._call(self._fleet.update(offer), 2 * self._bounds.update_s)
        if receipt.error is not None:
            self._let_go(offer)
            return receipt
        self._let_go(self._kept)
        self._kept = offer
        self._version = update.version
        self._updates += 1
        self._pauses_s.append(receipt.pause_s)
        return msgspec.structs.replace(receipt, engine=self.name)

    def _let_go(self, offer: WeightOffer | None) -> None:
        """No server will be sent it again."""
        if isinstance(offer, SavedWeights):
            self._files.remove(offer)

    def close(self) -> None:
        """Give up what is in progress, close all connections, end the thread, remove the files. Twice is fine."""
        if self._loop.is_closed():
            return
        try:
            self._call(self._end(), 0.0)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_MARGIN_S)
            if not self._thread.is_alive():
                self._loop.close()
            self._files.close()

    # --------------------------------------------------------------------------------------- the event loop

    def _in_loop(self, action: Callable[[Dispatcher], None]) -> None:
        dispatcher = self._dispatcher
        assert dispatcher is not None  # noqa: S101 - it is there once the engine is made
        self._loop.call_soon_threadsafe(action, dispatcher)

    def _call(self, work: Coroutine[Any, Any, T], bound_s: float) -> T:
        """The result of `work` in the event loop, which is to bound itself by `bound_s`."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(bound_s + _MARGIN_S)
        except TimeoutError as error:
            future.cancel()
            urls = ", ".join(member.url for member in self._fleet.members)
            raise EngineUnavailableError(f"no answer from the engine servers within {bound_s:g} s: {urls}") from error

    async def _begin(self) -> None:
        self._dispatcher = Dispatcher(self._fleet, self._mailbox, self._bounds, self.limits.vocabulary, self._clock)
        self._dispatcher.servers_changed()
        self._watch = asyncio.create_task(self._fleet.watch())
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
        await asyncio.gather(*(member.server.close() for member in self._fleet.members), return_exceptions=True)

    def _note_busy(self) -> None:
        """Count the time since the last look as busy if there was a request in progress then."""
        now_s = self._clock()
        if self._busy_since_s is not None:
            self._busy_s += now_s - self._busy_since_s
        self._busy_since_s = now_s if self._open else None
