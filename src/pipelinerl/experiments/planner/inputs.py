"""What predictions start from: the lengths of completions, and U(h), the generation rate with h sequences in progress.

A decode step of h sequences takes `step_time(h)` and produces h tokens, so `U(h) = h / step_time(h)`: in seconds tokens per
second; in flashes (the time of one token's forward at peak FLOPs) a utilisation from 0 to 1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from pipelinerl.errors import INVALID_DATA, UserError
from pipelinerl.report.series import read_groups

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class LengthDistribution:
    """`probabilities[l - 1]` is the share of completions with exactly l sampled tokens, l = 1..L. The last is not 0.

    Make one with `uniform`, `of_histogram` or `of_lengths`.
    """

    probabilities: Floats

    @classmethod
    def uniform(cls, longest: int) -> LengthDistribution:
        """Lengths 1..L with equal probability: the paper's assumption. Raises ValueError for L below 1."""
        return cls.of_histogram(dict.fromkeys(range(1, longest + 1), 1.0))

    @classmethod
    def of_lengths(cls, lengths: Sequence[int]) -> LengthDistribution:
        """The empirical distribution of `lengths`. Raises ValueError if it is empty or a length is below 1."""
        return cls.of_histogram(Counter(lengths))

    @classmethod
    def of_histogram(cls, weights: Mapping[int, float]) -> LengthDistribution:
        """From length -> count or share, in any scale. Raises ValueError for lengths below 1, weights below 0, or all 0."""
        used = {length: weight for length, weight in weights.items() if weight != 0}
        if not used:
            raise ValueError("a length distribution needs at least one completion")
        if min(used) < 1 or not all(weight > 0 and math.isfinite(weight) for weight in used.values()):
            raise ValueError("lengths must be at least 1, and counts must be finite and not below 0")
        probabilities = np.zeros(max(used))
        probabilities[np.fromiter(used, dtype=np.int64) - 1] = list(used.values())
        return cls(probabilities / probabilities.sum())

    @property
    def longest(self) -> int:
        """L, the number of tokens of the longest completion."""
        return len(self.probabilities)

    @property
    def mean(self) -> float:
        """Lbar, the mean number of tokens of a completion."""
        return float(self.survival().sum())

    @property
    def tail(self) -> float:
        """L / Lbar: 1 if all lengths are equal, 2L/(L+1) if they are uniform."""
        return self.longest / self.mean

    def survival(self) -> Floats:
        """[L]: entry l - 1 is the share of sequences that decode an l-th token, h(l) / S. Sums to Lbar."""
        survival: Floats = np.minimum(np.cumsum(self.probabilities[::-1])[::-1], 1.0)
        return survival

    def ages(self) -> Floats:
        """[L]: entry a is the share of sequences with a tokens so far, at a random moment in a batch that is kept full."""
        survival = self.survival()
        ages: Floats = survival / survival.sum()
        return ages

    def sample(self, rng: np.random.Generator, count: int) -> Ints:
        """`count` lengths, drawn independently."""
        return rng.choice(self.longest, size=count, p=self.probabilities).astype(np.int64) + 1


def parse_lengths(text: str) -> LengthDistribution:
    """Read a `--lengths` value: `uniform:L`, a JSON file `{"LENGTH": COUNT, ...}`, or a run directory. Raises UserError."""
    kind, colon, longest = text.partition(":")
    if kind == "uniform" and colon:
        if not longest.isdecimal() or int(longest) < 1:
            raise UserError(f"--lengths {text}: give the longest completion in tokens, as in uniform:8192")
        return LengthDistribution.uniform(int(longest))
    path = Path(text)
    if path.is_dir():
        return _run_lengths(path)
    if not path.is_file():
        raise UserError(f"--lengths {text}: neither uniform:L, nor a JSON file, nor a run directory")
    try:
        return LengthDistribution.of_histogram(msgspec.json.decode(path.read_bytes(), type=dict[int, float]))
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror}") from error
    except (ValueError, *INVALID_DATA) as error:
        raise UserError(f'{path} is not a histogram of lengths like {{"12": 340, "13": 295}}: {error}') from error


def _run_lengths(run_dir: Path) -> LengthDistribution:
    """Sampled tokens per rollout, summed over turns, of all groups that a run finished.

    Rollouts still in progress when the run ended are missing. They are longer than average, so lengths from a run of few
    steps are biased a little low.
    """
    lengths = [rollout.tokens for group in read_groups(run_dir) for rollout in group.rollouts if rollout.tokens]
    if not lengths:
        raise UserError(f"no lengths in {run_dir}: it finished no rollout")
    return LengthDistribution.of_lengths(lengths)


@dataclass(frozen=True)
class Utilisation:
    """Time of a decode step at some batch sizes, with linear interpolation between them.

    `active` (sequences, ascending) and `step_times` have equal lengths. Below the first entry the step time is constant.
    Above the last entry U is constant, as if the additional sequences took turns.
    Raises ValueError for a table that is empty, not ascending, or has a step time that is not above 0.
    """

    active: tuple[float, ...]
    step_times: tuple[float, ...]

    def __post_init__(self) -> None:
        h, times = np.asarray(self.active, dtype=np.float64), np.asarray(self.step_times, dtype=np.float64)
        if not len(h) or h.shape != times.shape or (np.diff(h) <= 0).any() or h[0] < 0 or h[-1] <= 0:
            raise ValueError(f"batch sizes must ascend, with a step time each: {self.active}, {self.step_times}")
        if not (np.isfinite(times).all() and (times > 0).all()):
            raise ValueError(f"step times must be above 0: {self.step_times}")

    @property
    def largest(self) -> float:
        """The largest batch size in the table."""
        return self.active[-1]

    def step_time(self, active: npt.ArrayLike) -> Floats:
        """Time of a decode step with `active` sequences (any shape; may be fractional, as an average over accelerators)."""
        h = np.asarray(active, dtype=np.float64)
        within = np.interp(h, self.active, self.step_times)
        return np.asarray(within * np.maximum(h / self.largest, 1.0), dtype=np.float64)

    def __call__(self, active: npt.ArrayLike) -> Floats:
        """U(h): tokens per unit of time of one accelerator."""
        return np.asarray(np.asarray(active, dtype=np.float64) / self.step_time(active), dtype=np.float64)
