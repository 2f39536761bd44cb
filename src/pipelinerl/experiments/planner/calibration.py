"""What predictions start from: lengths, U(h), and the costs that `pipelinerl lab calibrate` measured, stored as JSON.

A decode step of h sequences takes `step_time(h)` and produces h tokens, so `U(h) = h / step_time(h)`: in seconds tokens per
second; in flashes (the time of one token's forward at peak FLOPs) a utilisation from 0 to 1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import msgspec
import numpy as np
import numpy.typing as npt

from pipelinerl.errors import INVALID_DATA, UserError
from pipelinerl.report import count, new_table, rendered
from pipelinerl.report.series import RecordedGroup
from pipelinerl.resources.machine import Machine

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


def prompt_tokens_mean(groups: Iterable[RecordedGroup]) -> float:
    """Mean tokens of a rollout's context that were not sampled: the last turn's prompt less all earlier completions."""
    return fmean(
        len(rollout.turns[-1].prompt_ids) - sum(turn.completion.tokens for turn in rollout.turns[:-1])
        for group in groups
        for rollout in group.rollouts
        if rollout.turns
    )


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


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Costs for one machine and one run file, measured on `date` with `load_average` (1 minute, at the start).

    schedule            that of the run, as `compare` names it: it decides whether generation and training share the machine
    decode_s            median time of a decode step by number of sequences, of an engine that has the machine to itself;
                        contexts are as long as in a batch that is kept full
    prompt_tokens_mean  mean prompt length of the run's problems
    rollout_s           time of a generation process per rollout in the run beyond its share of decode steps: prefill,
                        admission, environment and reward code, records, and what other processes of the run take away
    tokens_per_s        rate of a generation process in the run, with all slots in use
    update_pause_s      the engine's pause for new weights
    train_*_s           a step of `ranks` takes `train_step_s + train_token_s * tokens`; all these tokens go through the
                        model, prompts included
    prepare_s           to prepare a rollout for training: reading it from the stream, computing advantages, joining turns
    used_share          share of the sampled tokens that have a gradient, in the first steps of a run. It is 0 if its model
                        solves no problem or every problem; a prediction then underestimates the cost of training
    lengths             sampled tokens -> number of rollouts, in the first steps of the run (training changes lengths)
    """

    machine: Machine
    date: str
    load_average: float | None = None
    model: str
    schedule: str
    slots: int
    processes: int
    ranks: int = 1
    decode_s: dict[int, float]
    prompt_tokens_mean: float
    rollout_s: float
    tokens_per_s: float
    update_pause_s: float
    train_step_s: float
    train_token_s: float
    prepare_s: float
    used_share: float
    lengths: dict[int, int]

    @property
    def disturbed(self) -> bool:
        """Whether the load suggests that other programs disturbed the measurements."""
        return self.load_average is not None and self.load_average > self.machine.cores / 2

    def utilisation(self) -> Utilisation:
        """U(h) of the decode steps alone, in seconds. Raises ValueError for an invalid table."""
        return Utilisation(tuple(map(float, self.decode_s)), tuple(self.decode_s.values()))


def read_calibration(path: Path) -> Calibration:
    """Raises UserError for a file that can't be read or is not a calibration of this version."""
    try:
        calibration = msgspec.json.decode(path.read_bytes(), type=Calibration)
        calibration.utilisation()
        LengthDistribution.of_histogram(calibration.lengths)
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror}; `pipelinerl lab calibrate` writes such a file") from error
    except (*INVALID_DATA, ValueError) as error:
        raise UserError(f"{path} is not a calibration ({error}); write one with `pipelinerl lab calibrate`") from error
    return calibration


def calibration_text(calibration: Calibration) -> str:
    """The measured costs, with a warning if other programs kept the machine busy."""
    machine, lengths = calibration.machine, LengthDistribution.of_histogram(calibration.lengths)
    rows = {
        f"decode step, {count(active, 'sequence')}": f"{1e3 * step_s:.3g} ms, {active / step_s:.0f} tokens/s"
        for active, step_s in calibration.decode_s.items()
    } | {
        "rollout, besides its decode steps": f"{1e3 * calibration.rollout_s:.3g} ms",
        "weight update": f"{1e3 * calibration.update_pause_s:.3g} ms",
        "generation, all slots in use": f"{calibration.tokens_per_s:.0f} tokens/s",
        "optimizer step": f"{1e3 * calibration.train_step_s:.3g} ms + {1e6 * calibration.train_token_s:.3g} us a token",
        "tokens that have a gradient": f"{calibration.used_share:.0%} in the first steps",
        "lengths in the first steps": f"mean {lengths.mean:.1f}, longest {lengths.longest} tokens",
        "measured": f"in a {calibration.schedule} run with {count(calibration.processes, 'engine')}",
    }
    table = new_table(f"{machine.cpu}, {machine.cores} cores, model {calibration.model}", "", "")
    for row in rows.items():
        table.add_row(*row)
    busy = f"the machine was busy (load average {calibration.load_average:g}): measure again when it is not\n"
    return rendered(table) + (busy if calibration.disturbed else "")
