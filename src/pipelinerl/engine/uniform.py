"""Randomness of sampling: one uniform number for each (request, position), whoever shares the batch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import xxhash

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MOST_AHEAD = 1024


def request_key(request_id: str, seed: int | None) -> int:
    """The 64-bit key of a request: of its seed if it has one, else of its id."""
    name = f"id:{request_id}" if seed is None else f"seed:{seed}"
    return xxhash.xxh3_64_intdigest(name.encode())


def uniforms(keys_n: npt.NDArray[np.uint64], positions_n: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1) with 53 random bits: a counter-based generator. The two shapes are broadcast together.

    SplitMix64's output function (Steele, Lea and Flood, OOPSLA 2014) applied twice to key and position, so that streams of
    related keys are unrelated.
    """
    mixed = _finalize(keys_n + _GOLDEN * (positions_n.astype(np.uint64) + np.uint64(1)))  # modulo 2^64
    mixed = _finalize(mixed ^ (keys_n * _MIX_1))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


class StepsAhead:
    """What is known of the next steps: positions [R] and uniform numbers [R]. Prepared for several steps at once, since
    little costs as much as much.

    Good for as long as the same rows decode: one token each a step. The longer that lasts, the more steps are prepared.
    """

    def __init__(
        self, keys_R: npt.NDArray[np.uint64], counts_R: npt.NDArray[np.int64], positions_R: npt.NDArray[np.int64]
    ) -> None:
        """`counts_R`: tokens sampled so far; `positions_R`: where the next one goes in the cache."""
        self._steps = 8
        self._most_steps = max(8, _MOST_AHEAD // max(1, len(keys_R)))
        self._keys_R = keys_R.copy()
        self._counts_R = counts_R.copy()
        self._positions_R = positions_R.copy()
        self._prepared: list[tuple[torch.Tensor, torch.Tensor]] = []

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions and uniform numbers of the rows' next tokens."""
        if not self._prepared:
            self._prepare()
        return self._prepared.pop()

    def _prepare(self) -> None:
        steps_S1 = np.arange(self._steps)[::-1, None]  # the next step last: from there they are taken
        drawn_SR = torch.from_numpy(uniforms(self._keys_R, self._counts_R + steps_S1))
        positions_SR = torch.from_numpy(self._positions_R + steps_S1)
        self._prepared = list(zip(positions_SR.unbind(), drawn_SR.unbind(), strict=True))
        self._counts_R += self._steps
        self._positions_R += self._steps
        self._steps = min(2 * self._steps, self._most_steps)


def _finalize(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))
