"""An engine without a model, for tests: it keeps the protocol to the letter, and a script says which tokens it makes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from pipelinerl.errors import PromptTooLongError
from pipelinerl.interfaces import StepOutput, WeightUpdate
from pipelinerl.types import (
    Completion,
    EngineProgress,
    FinishReason,
    GenerationRequest,
    TokenEvent,
    UpdateReceipt,
    cancelled_completion,
)
from tests.unit.group_parts import receipt

STOP = 0


class CharTokenizer:
    """One token a character, its code point; token 0 ends a completion."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(token) for token in token_ids if token != STOP or not skip_special_tokens)

    def apply_chat_template(self, conversation: object, **options: object) -> object:
        raise ValueError("no chat template")


class _Sequence(NamedTuple):
    request: GenerationRequest
    script: Sequence[int]
    events: list[TokenEvent]

    def complete(self, reason: FinishReason) -> Completion:
        return msgspec.structs.replace(cancelled_completion(self.request.id, self.events), finish_reason=reason)


class ScriptedEngine:
    """`script(request)` gives the tokens of a completion; the log-probability of token i is -(i + 1) / 8."""

    copies = 1
    name = "e"

    def __init__(
        self,
        script: Callable[[GenerationRequest], Sequence[int]],
        *,
        slots: int = 4,
        max_length: int = 1000,
        version: int = 0,
    ) -> None:
        self.version = version
        self.requests: list[GenerationRequest] = []
        self.cancelled: list[str] = []
        self.batch_sizes: list[int] = []
        self.steps = 0
        self._script = script
        self.slots = slots
        self.max_length = max_length
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._to_cancel: set[str] = set()

    @property
    def in_progress(self) -> int:
        return len(self._running)

    @property
    def queued(self) -> int:
        return len(self._waiting)

    def progress(self) -> EngineProgress:
        return EngineProgress(
            version=self.version, in_progress=self.in_progress, queued=self.queued, decode_steps=self.steps
        )

    def submit(self, request: GenerationRequest) -> None:
        if len(request.prompt_ids) + request.sampling.max_tokens > self.max_length:
            raise PromptTooLongError(f"{len(request.prompt_ids)} + {request.sampling.max_tokens} > {self.max_length}")
        self.requests.append(request)
        self._waiting.append(_Sequence(request, self._script(request), []))

    def cancel(self, request_id: str) -> None:
        self._to_cancel.add(request_id)
        self.cancelled.append(request_id)

    def step(self) -> StepOutput:
        self.steps += 1
        gone = [item for item in (*self._running, *self._waiting) if item.request.id in self._to_cancel]
        self._running = [item for item in self._running if item not in gone]
        self._waiting = deque(item for item in self._waiting if item not in gone)
        self._to_cancel.clear()
        while self._waiting and len(self._running) < self.slots:
            self._running.append(self._waiting.popleft())
        self.batch_sizes.append(len(self._running))
        finished, events = [item.complete("cancelled") for item in gone], []
        for item in tuple(self._running):
            index = len(item.events)
            token = item.script[index]
            item.events.append(TokenEvent(item.request.id, index, token, -(index + 1) / 8, self.version))
            if item.request.stream:
                events.append(item.events[-1])
            stopped = token in item.request.sampling.stop_token_ids
            if stopped or index + 1 >= min(item.request.sampling.max_tokens, len(item.script)):
                self._running.remove(item)
                finished.append(item.complete("stop" if stopped else "length"))
        return StepOutput(events, finished)

    def update_weights(self, update: WeightUpdate) -> UpdateReceipt:
        self.version = update.version
        return receipt(update.version, update.checksum, sequences_in_flight=self.in_progress)
