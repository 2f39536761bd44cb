"""After each weight update: what does the engine compute with now? The trainer compares it with its own model.

A checksum says what an engine was given, and an echo what it says it holds. Only what comes out of it says what it uses.
The question is an ordinary request, one token after a fixed prompt, so any engine can answer it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from pipelinerl.actor.client import EngineClient
from pipelinerl.errors import RequestError
from pipelinerl.interfaces import Engine
from pipelinerl.types import GenerationRequest, ProbeReading, SamplingParams

READINGS_KEPT = 16
LONGEST_S = 60.0
"""A probe that was not answered by then is given up: other versions have been asked about since."""


class WeightProbe:
    """`readings` are the latest answers, oldest first; `news` says that there is one which was not told yet.

    `asked` is the version that was asked about last.
    """

    def __init__(self, engine: Engine, client: EngineClient, name: str) -> None:
        self.readings: deque[ProbeReading] = deque(maxlen=READINGS_KEPT)
        self.news = False
        self._engine = engine
        self._client = client
        self._name = name
        self.asked = -1
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(self, prompt_ids: Sequence[int]) -> None:
        """Ask every copy of the model, once for each version. Does not wait."""
        version = self._engine.version
        if version == self.asked or not prompt_ids:
            return
        self.asked = version
        for copy in range(self._engine.copies):
            request = GenerationRequest(
                id=f"probe-v{version}.{copy}",
                prompt_ids=tuple(prompt_ids),
                sampling=SamplingParams(max_tokens=1),
                copy=copy,
            )
            task = asyncio.create_task(self._read(request, copy))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()

    async def _read(self, request: GenerationRequest, copy: int) -> None:
        try:
            completion = await asyncio.wait_for(self._client.generate(request), LONGEST_S)
        except (RequestError, TimeoutError):
            return
        versions = {span.version for span in (*completion.prompt_versions, *completion.weight_versions)}
        if len(versions) == 1 and completion.token_ids:  # else an update came in the middle of it
            name = self._name if self._engine.copies == 1 else f"{self._name}[{copy}]"
            reading = ProbeReading(
                engine=name, version=versions.pop(), token_id=completion.token_ids[0], logprob=completion.logprobs[0]
            )
            self.readings.append(reading)
            self.news = True
