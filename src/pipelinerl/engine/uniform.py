"""Randomness of sampling: one uniform number for each (request, position), whoever shares the batch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def request_key(request_id: str, seed: int | None) -> int:
    """The 64-bit key of a request: of its seed if it has one, else of its id."""
    name = f"id:{request_id}" if seed is None else f"seed:{seed}"
    return xxhash.xxh3_64_intdigest(name.encode())


def uniforms(keys_n: npt.NDArray[np.uint64], positions_n: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1) with 53 random bits: a counter-based generator.

    SplitMix64's output function (Steele, Lea and Flood, OOPSLA 2014) applied twice to key and position, so that streams of
    related keys are unrelated.
    """
    mixed = _finalize(keys_n + _GOLDEN * (positions_n.astype(np.uint64) + np.uint64(1)))  # modulo 2^64
    mixed = _finalize(mixed ^ (keys_n * _MIX_1))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _finalize(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))
