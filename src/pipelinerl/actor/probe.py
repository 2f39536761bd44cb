"""Weight probe: after each update, samples a token whose log-prob the trainer compares with its own model's.

Checksums prove what an engine was sent and what it stores; only its output proves which weights it uses. The probe is an
ordinary request for one token after a fixed prompt, so it works with any engine.
"""

from __future__ import annotations

import asyncio
from collections import deque

from pipelinerl.errors import RequestError
from pipelinerl.interfaces import AsyncEngine, Board
from pipelinerl.types import TRAINER, GenerationRequest, ProbeReading, SamplingParams, trainer_progress

READINGS_KEPT = 16
TIMEOUT_S = 60.0
"""Timeout of a probe. Later versions have been probed by then."""


class WeightProbe:
    """Probes the weights of `engine`, with the prompt that the trainer publishes on `board`.

    `stage` is the engine's name there. `readings` are the latest results, oldest first. `unreported` is true if there are
    new ones; the reader resets it.
    """

    def __init__(self, engine: AsyncEngine, board: Board, stage: str) -> None:
        self.readings: deque[ProbeReading] = deque(maxlen=READINGS_KEPT)
        self.unreported = False
        self._engine = engine
        self._board = board
        self._stage = stage
        self._prompt_ids: tuple[int, ...] = ()
        self._asked = -1
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(self) -> None:
        """Probe every replica of the model, once per version. Does not wait."""
        version = self._engine.version
        if version == self._asked or not self._find_prompt():
            return
        self._asked = version
        for copy in range(self._engine.copies):
            request = GenerationRequest(
                id=f"probe-v{version}.{copy}",
                prompt_ids=self._prompt_ids,
                sampling=SamplingParams(max_tokens=1),
                copy=copy,
            )
            task = asyncio.create_task(self._read(request, copy))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _find_prompt(self) -> bool:
        if not self._prompt_ids and (trainer := trainer_progress(self._board.read(TRAINER))):
            self._prompt_ids = tuple(trainer.probe_ids)
        return bool(self._prompt_ids)

    async def _read(self, request: GenerationRequest, copy: int) -> None:
        try:
            completion = await asyncio.wait_for(self._engine.generate(request), TIMEOUT_S)
        except (RequestError, TimeoutError):
            return
        versions = {span.version for span in (*completion.prompt_versions, *completion.weight_versions)}
        if len(versions) == 1 and completion.token_ids:  # otherwise an update came during the probe
            name = self._stage if self._engine.copies == 1 else f"{self._stage}[{copy}]"
            reading = ProbeReading(
                engine=name, version=versions.pop(), token_id=completion.token_ids[0], logprob=completion.logprobs[0]
            )
            self.readings.append(reading)
            self.unreported = True
