"""Weight probe: after each update, samples a token whose log-prob the trainer compares with its own model's.

Checksums prove what an engine was sent and what it stores; only its output proves which weights it uses. The probe is an
ordinary request for one token after a fixed prompt, so it works with any engine.
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
TIMEOUT_S = 60.0
"""Timeout of a probe. Later versions have been probed by then."""


class WeightProbe:
    """Probes an engine's weights.

    `readings` are the latest results, oldest first. `unreported` is true if there are new ones; the reader resets it.
    `asked` is the version probed last.
    """

    def __init__(self, engine: Engine, client: EngineClient, name: str) -> None:
        self.readings: deque[ProbeReading] = deque(maxlen=READINGS_KEPT)
        self.unreported = False
        self._engine = engine
        self._client = client
        self._name = name
        self.asked = -1
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(self, prompt_ids: Sequence[int]) -> None:
        """Probe every replica of the model, once per version. Does not wait."""
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
            completion = await asyncio.wait_for(self._client.generate(request), TIMEOUT_S)
        except (RequestError, TimeoutError):
            return
        versions = {span.version for span in (*completion.prompt_versions, *completion.weight_versions)}
        if len(versions) == 1 and completion.token_ids:  # otherwise an update came during the probe
            name = self._name if self._engine.copies == 1 else f"{self._name}[{copy}]"
            reading = ProbeReading(
                engine=name, version=versions.pop(), token_id=completion.token_ids[0], logprob=completion.logprobs[0]
            )
            self.readings.append(reading)
            self.unreported = True
