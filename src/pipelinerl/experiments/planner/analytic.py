"""The analytical model of arXiv 2509.19128, Appendix A, in the paper's notation, and its inputs: lengths and U(h).

The distribution of completion lengths determines how a batch drains and the lag of H sequences in progress. U(h) is the
generation rate of one accelerator with h sequences in progress. A decode step at batch size h takes `step_time(h)` and
produces h tokens, so `U(h) = h / step_time(h)`. In flashes (the time of one token's forward at peak FLOPs) U is a
utilisation in [0, 1]. In seconds it is tokens per second. Every formula of the model holds in either unit, if the training
time `tau` is in the same unit. Rates are in sampled tokens per unit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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


# ---- U(h), and the sources of its figures


TimeUnit = Literal["flash", "s"]

PAPER_TAU = 128 / 26.02
"""Training time per token in flashes: the case study trains 26.02 tokens per flash on 128 accelerators."""

PAPER_STEP_FLASHES = 451.8
PAPER_SEQUENCE_FLASHES = 0.251
"""The simplest curve through both generation figures of the paper's case study, U(192) = 0.384 and the conventional
r_gen = 18.3 tokens/flash at 134 sequences per accelerator (G = 134): a decode step takes 451.8 flashes for the weights and
0.251 for each sequence. Fitted to these two figures; not measured, and not read off a plot."""


@dataclass(frozen=True)
class Accelerator:
    """`peak_flops` (dense BF16) per second and memory bandwidth in bytes per second, from NVIDIA's data sheets."""

    name: str
    peak_flops: float
    bandwidth: float

    @property
    def weights_flashes(self) -> float:
        """Flashes to read BF16 weights once at full bandwidth: (2P / bandwidth) / (2P / peak), for any P."""
        return self.peak_flops / self.bandwidth


H100 = Accelerator("h100", peak_flops=989.4e12, bandwidth=3.35e12)
H200 = Accelerator("h200", peak_flops=989.4e12, bandwidth=4.8e12)
ACCELERATORS = {accelerator.name: accelerator for accelerator in (H100, H200)}

BANDWIDTH_EFFICIENCY = H100.weights_flashes / PAPER_STEP_FLASHES
"""Share of the H100's bandwidth that the fit to the paper implies: 0.65."""
SEQUENCE_SHARE = PAPER_SEQUENCE_FLASHES / PAPER_STEP_FLASHES
"""Time that a sequence adds to a decode step, over the time to read the weights: 5.6e-4 (8 MB for a model of 7B)."""
COMPUTE_CEILING = 3 / PAPER_TAU
"""Highest U: compute-bound decoding is assumed as efficient as the paper's training (3 forwards in tau)."""


@dataclass(frozen=True)
class Utilisation:
    """Seconds or flashes of a decode step at some batch sizes, with linear interpolation between them.

    `active` (sequences, ascending) and `step_times` have equal lengths. Below the first entry the step time is constant.
    Above the last entry U is constant, as if the additional sequences took turns.
    Raises ValueError for a table that is empty, not ascending, or has a step time that is not above 0.
    """

    active: tuple[float, ...]
    step_times: tuple[float, ...]
    unit: TimeUnit = "flash"
    source: str = "a table"

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
        """U(h): tokens per unit of time of one accelerator. In flashes this is a share of its peak."""
        return np.asarray(np.asarray(active, dtype=np.float64) / self.step_time(active), dtype=np.float64)

    def with_overhead(self, time_per_token: float) -> Utilisation:
        """The same table with `time_per_token` added for every token, e.g. a rollout's fixed cost over its mean length."""
        times = tuple(time + time_per_token * h for h, time in zip(self.active, self.step_times, strict=True))
        return Utilisation(self.active, times, self.unit, self.source)


def roofline(
    accelerator: Accelerator,
    *,
    sequence_share: float = SEQUENCE_SHARE,
    bandwidth_efficiency: float = BANDWIDTH_EFFICIENCY,
    ceiling: float = COMPUTE_CEILING,
    largest: float = 8192,
) -> Utilisation:
    """U of a dense BF16 model. The time of a decode step is the longer of reading (weights and caches) and computing.

    step_time(h) = max(w (1 + s h), h / ceiling) flashes, with w = weights_flashes / bandwidth_efficiency and
    s = `sequence_share`, the bytes read per sequence over those of the weights. With the defaults, the H100 has the curve
    fitted to the paper, and the H200 the same curve at its own bandwidth. The model's size cancels out, except in
    `sequence_share` (see `cache_share`).
    """
    weights = accelerator.weights_flashes / bandwidth_efficiency
    slope = 1 / ceiling - weights * sequence_share  # slope of the compute line minus slope of the memory line
    knee = weights / slope if slope > 0 else largest
    active = tuple(sorted({0.0, min(knee, largest), largest}))
    times = tuple(max(weights * (1 + sequence_share * h), h / ceiling) for h in active)
    return Utilisation(
        active, times, "flash", f"roofline of the {accelerator.name.upper()}, fitted to the paper's case study"
    )


def cache_share(parameters: float, kv_bytes_per_token: float, context_tokens: float) -> float:
    """`sequence_share` of a BF16 model whose sequences have `context_tokens` in the KV cache on average."""
    return kv_bytes_per_token * context_tokens / (2 * parameters)


def flash_s(parameters: float, peak_flops: float) -> float:
    """Seconds per flash: one token's forward, 2 FLOPs per parameter, at peak FLOPs."""
    return 2 * parameters / peak_flops


def tau_from_mfu(mfu: float) -> float:
    """Training time per token in flashes at this model FLOPs utilisation: a forward, and a backward of twice its cost."""
    if not 0 < mfu <= 1:
        raise ValueError(f"MFU is a share of peak FLOPs, above 0 and at most 1: {mfu}")
    return 3 / mfu


# ---- both methods


@dataclass(frozen=True)
class Workload:
    """N `accelerators`, B sequences per optimizer step, their lengths, U(h), and training time per sampled token, tau.

    Raises ValueError unless N and B are at least 1 and tau is finite and above 0.
    """

    accelerators: int
    batch_size: int
    lengths: LengthDistribution
    utilisation: Utilisation
    tau: float

    def __post_init__(self) -> None:
        if self.accelerators < 1 or self.batch_size < 1 or not (self.tau > 0 and math.isfinite(self.tau)):
            raise ValueError(f"N {self.accelerators} and B {self.batch_size} must be at least 1, and tau {self.tau} above 0")


@dataclass(frozen=True)
class Conventional:
    """Conventional RL with G = `steps_per_round`: all accelerators generate B*G sequences, then all train."""

    steps_per_round: int
    generation_rate: float
    training_rate: float

    @property
    def rate(self) -> float:
        """r = 1 / (1/r_gen + 1/r_train): the phases alternate, so their times per token add up."""
        return 1 / (1 / self.generation_rate + 1 / self.training_rate)

    @property
    def max_lag(self) -> int:
        """G - 1: the last step of a round trains on tokens sampled by the weights from before its first step."""
        return self.steps_per_round - 1


@dataclass(frozen=True)
class Pipeline:
    """PipelineRL with I = `generating` accelerators of H = `slots` sequences each. The others train."""

    slots: int
    generating: int
    generation_rate: float
    training_rate: float
    max_lag: int

    @property
    def rate(self) -> float:
        """r = min(r_gen, r_train): the faster phase waits for the slower."""
        return min(self.generation_rate, self.training_rate)


def conventional(workload: Workload, steps_per_round: int) -> Conventional:
    """One round at G = `steps_per_round`.

    r_gen = K / sum_{l=1..L} (h(l)/N) / U(h(l)/N), where S = B G sequences have K = S Lbar tokens. Each summand is the time
    of the l-th decode step, when the h(l) sequences of at least l tokens are spread evenly. r_train = N / tau.
    """
    accelerators, sequences = workload.accelerators, workload.batch_size * steps_per_round
    running = workload.lengths.survival() * (sequences / accelerators)
    time = float(workload.utilisation.step_time(running).sum())
    return Conventional(
        steps_per_round=steps_per_round,
        generation_rate=sequences * workload.lengths.mean / time,
        training_rate=accelerators / workload.tau,
    )


def pipeline(workload: Workload, slots: int, generating: int) -> Pipeline:
    """`generating` accelerators with `slots` sequences each: r_gen = U(H) I, r_train = (N - I) / tau.

    Raises ValueError unless at least one accelerator generates and one trains.
    """
    if not 0 < generating < workload.accelerators or slots < 1:
        raise ValueError(f"{generating} of {workload.accelerators} accelerators with {slots} slots each can't be a pipeline")
    return Pipeline(
        slots=slots,
        generating=generating,
        generation_rate=float(workload.utilisation(slots)) * generating,
        training_rate=(workload.accelerators - generating) / workload.tau,
        max_lag=int(pipeline_max_lag(workload, slots * generating)),
    )


def pipeline_max_lag(workload: Workload, in_progress: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """g_max = ceil(H I L / (Lbar B)) for H I sequences `in_progress` (any shape).

    This is the number of optimizer steps while the longest sequence is generated, if neither phase waits: L decode steps
    finish H I L / Lbar sequences, and a step takes B of them.
    """
    steps = np.asarray(in_progress, dtype=np.float64) * (workload.lengths.tail / workload.batch_size)
    return np.ceil(steps * (1 - 1e-12))  # do not round up a whole number that is off by floating-point error
