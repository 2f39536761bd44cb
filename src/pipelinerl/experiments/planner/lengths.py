"""The distribution of completion lengths, which determines how a batch drains and the lag of H sequences in progress."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from pipelinerl.errors import UserError
from pipelinerl.files import read_json_lines

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

ROLLOUTS = Path("rollouts") / "rollouts.jsonl"


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
        values, counts = np.unique(np.asarray(lengths, dtype=np.int64), return_counts=True)
        return cls.of_histogram(dict(zip(values.tolist(), counts.tolist(), strict=True)))

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

    def histogram(self) -> dict[int, float]:
        """Length -> share, for lengths that occur."""
        return {int(i) + 1: float(self.probabilities[i]) for i in np.flatnonzero(self.probabilities)}


def parse_lengths(text: str) -> LengthDistribution:
    """Read a `--lengths` value: `uniform:L`, a JSON file `{"LENGTH": COUNT, ...}`, or a run directory. Raises UserError."""
    kind, colon, longest = text.partition(":")
    if kind == "uniform" and colon:
        if not longest.isdecimal() or int(longest) < 1:
            raise UserError(f"--lengths {text}: give the longest completion in tokens, as in uniform:8192")
        return LengthDistribution.uniform(int(longest))
    path = Path(text)
    if path.is_dir():
        return read_run_lengths(path)
    if path.is_file():
        return read_histogram(path)
    raise UserError(f"--lengths {text}: neither uniform:L, nor a JSON file, nor a run directory")


def read_histogram(path: Path) -> LengthDistribution:
    """Read a JSON object of length -> count (or share). Raises UserError."""
    try:
        return LengthDistribution.of_histogram(msgspec.json.decode(path.read_bytes(), type=dict[int, float]))
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror}") from error
    except (ValueError, msgspec.DecodeError) as error:
        raise UserError(f'{path} is not a histogram of lengths like {{"12": 340, "13": 295}}: {error}') from error


class _Span(msgspec.Struct, frozen=True):
    end: int


class _Completion(msgspec.Struct, frozen=True):
    weight_versions: tuple[_Span, ...]


class _Turn(msgspec.Struct, frozen=True):
    completion: _Completion


class _Rollout(msgspec.Struct, frozen=True):
    turns: tuple[_Turn, ...]


class _Group(msgspec.Struct, frozen=True):
    """The fields of `types.Group` that lengths need. Version spans cover a completion's tokens exactly, so the end of the
    last span is the number of tokens, and the ids need not be decoded."""

    rollouts: tuple[_Rollout, ...]


def read_run_lengths(run_dir: Path) -> LengthDistribution:
    """Sampled tokens per rollout, summed over turns, of all groups that a run finished. Raises UserError.

    Rollouts still in progress when the run ended are missing. They are longer than average, so lengths from a run of few
    steps are biased a little low.
    """
    path = run_dir / ROLLOUTS
    try:
        groups = read_json_lines(path, _Group)
        return LengthDistribution.of_lengths([length for group in groups for length in _lengths(group)])
    except FileNotFoundError as error:
        raise UserError(f"{run_dir} is not a run directory (there is no {path})") from error
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"no lengths in {path}: {error}") from error


def _lengths(group: _Group) -> list[int]:
    spans = [[turn.completion.weight_versions for turn in rollout.turns] for rollout in group.rollouts]
    lengths = [sum(span[-1].end for span in turns if span) for turns in spans]
    return [length for length in lengths if length]
