"""A request that is sent again is answered with what the first one made, and never generated twice."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from pipelinerl.errors import RequestError
from pipelinerl.server.exchange import Exchange, Generation
from pipelinerl.types import Completion, GenerationRequest


class _Ended(NamedTuple):
    request_id: str
    size: int
    at_s: float


class OncePerId:
    """Generations by request id: those in progress and, for `keep_s`, those that ended (the last `keep_tokens` of them)."""

    def __init__(
        self,
        exchange: Exchange,
        *,
        keep_s: float = 600.0,
        keep_tokens: int = 500_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._exchange = exchange
        self._keep_s = keep_s
        self._keep_tokens = keep_tokens
        self._clock = clock
        self._known: dict[str, Generation] = {}
        self._ended: deque[_Ended] = deque()
        self._size = 0

    async def generation(self, request: GenerationRequest) -> Generation:
        """The generation of this request: the one there is, or a new one.

        Raises as `EngineThread.submit` does, and RequestError if the id was that of another request.
        """
        while (known := self._known.get(request.id)) is not None:
            if msgspec.structs.replace(known.request, stream=request.stream) != request:
                raise RequestError(f"request id {request.id!r} was used for another request; give each an id of its own")
            if not known.abandoned:
                return known
            # Given up a moment ago, as nobody wanted it: it ends with the next step, and this one begins anew.
            await known.ended()
        generation = self._known[request.id] = self._exchange.submit(request, on_end=self._keep)
        return generation

    def _keep(self, generation: Generation) -> None:
        """Keep what ended, and forget what is too old or too much."""
        request, outcome = generation.request, generation.outcome
        if not isinstance(outcome, Completion) or generation.abandoned:
            del self._known[request.id]  # there is nothing that a second try should get
            return
        now_s = self._clock()
        size = len(request.prompt_ids) + len(outcome.token_ids)
        self._ended.append(_Ended(request.id, size, now_s))
        self._size += size
        while self._ended and (self._size > self._keep_tokens or now_s - self._ended[0].at_s > self._keep_s):
            oldest = self._ended.popleft()
            self._size -= oldest.size
            del self._known[oldest.request_id]
