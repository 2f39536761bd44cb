"""Checks that engines use the weights they acknowledged, by comparing their log-prob of a token with the trainer's."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipelinerl.errors import WeightUpdateError
from pipelinerl.models.state import compute_dtype
from pipelinerl.types import ProbeReading, Segment

PROMPT_TOKENS = 16
VERSIONS_KEPT = 32
TOLERANCE = {torch.float32: 2e-3}
"""Largest allowed difference of log-probs, by dtype. In float32, two implementations differ by 1e-5 to 1e-4."""
COARSE_TOLERANCE = 0.3


class ProbeCheck:
    """Checks engines' probe readings against the trainer's model.

    For each of the latest published versions it keeps the log-probs [V] of the token after `prompt_ids`, so that engines may
    sample any token. `model` is the trainer's; `logits(segments)` are its logits [P, V] that predict the sampled tokens.
    """

    def __init__(self, model: Any, logits: Callable[[Sequence[Segment]], Tensor]) -> None:
        self._logits = logits
        vocabulary = int(model.get_input_embeddings().weight.shape[0])
        draw = random.Random(0)
        self.prompt_ids = tuple(draw.randrange(vocabulary) for _ in range(PROMPT_TOKENS))
        self._tolerance = TOLERANCE.get(compute_dtype(model), COARSE_TOLERANCE)
        self._expected: dict[int, Tensor] = {}
        self._checked: dict[str, int] = {}

    def expect(self, version: int) -> None:
        """Store the expected log-probs of `version`, whose weights the model must hold now."""
        segment = Segment(token_ids=(*self.prompt_ids, 0), sampled=((PROMPT_TOKENS, PROMPT_TOKENS + 1),))
        self._expected[version] = self._logits([segment])[0].float().log_softmax(-1).cpu()
        while len(self._expected) > VERSIONS_KEPT:
            del self._expected[min(self._expected)]

    def check(self, readings: Iterable[ProbeReading]) -> None:
        """Raise WeightUpdateError for a reading that does not match its version. Each reading is checked once."""
        for reading in readings:
            expected_V = self._expected.get(reading.version)
            if expected_V is None or reading.version <= self._checked.get(reading.engine, -1):
                continue
            self._checked[reading.engine] = reading.version
            ours = float(expected_V[reading.token_id])
            if not abs(reading.logprob - ours) <= self._tolerance:
                raise WeightUpdateError(self._mismatch_message(reading, ours))

    def _mismatch_message(self, reading: ProbeReading, ours: float) -> str:
        off = {
            version: abs(reading.logprob - float(expected_V[reading.token_id]))
            for version, expected_V in self._expected.items()
        }
        nearest = min(off, key=off.__getitem__)  # not the reading's own version, which is beyond the tolerance
        right = off[nearest] <= self._tolerance
        hint = f"version {nearest} would compute this value" if right else "check that both run the same model and dtype"
        return (
            f"engine {reading.engine!r} acknowledged weights of version {reading.version}, but does not compute with "
            f"them: its log-prob of token {reading.token_id} after a fixed prompt is {reading.logprob:.5f}, the trainer's "
            f"{ours:.5f} (bound: {self._tolerance:g}); {hint}"
        )
