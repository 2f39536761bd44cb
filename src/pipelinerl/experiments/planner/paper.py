"""The analytical model of arXiv 2509.19128, Appendix A, in the paper's notation, with the paper's case study.

Times are in flashes (the time of one token's forward at peak FLOPs), and rates in sampled tokens per flash. `U(h)` is an
accelerator's generation rate with h sequences in progress, `tau` the training time per sampled token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipelinerl.experiments.planner.calibration import LengthDistribution, Utilisation
from pipelinerl.experiments.statistics import powers_of_two
from pipelinerl.report import new_table, rendered

ACCELERATORS = BATCH = 128
LONGEST = 8192
MAX_LAG = 133
TAU = 128 / 26.02
"""The case study trains 26.02 tokens per flash on 128 accelerators."""
STEP_FLASHES = 451.8
SEQUENCE_FLASHES = 0.251
"""The simplest curve through both generation figures of the case study, U(192) = 0.384 and the conventional r_gen = 18.3
tokens/flash at 134 sequences per accelerator (G = 134): a decode step takes 451.8 flashes for the weights and 0.251 for each
sequence. Fitted to these two figures; not measured, and not read off a plot."""
CEILING = 3 / TAU
"""Highest U: decoding that arithmetic limits is assumed as efficient as the paper's training (3 forwards in tau)."""
_MOST_SLOTS = 1024
_SAME = 1 - 1e-9
"""Rates whose ratio is closer to 1 are equal."""


def h100() -> Utilisation:
    """U of the case study: the longer of reading (the fitted curve) and computing."""
    knee, largest = STEP_FLASHES / (1 / CEILING - SEQUENCE_FLASHES), 8192.0
    active = (0.0, knee, largest)
    return Utilisation(active, tuple(max(STEP_FLASHES + SEQUENCE_FLASHES * h, h / CEILING) for h in active))


@dataclass(frozen=True)
class PaperWorkload:
    """N `accelerators`, B sequences per optimizer step, their lengths, U(h), and training time per sampled token, tau."""

    accelerators: int
    batch_size: int
    lengths: LengthDistribution
    utilisation: Utilisation
    tau: float


def case_study() -> PaperWorkload:
    return PaperWorkload(ACCELERATORS, BATCH, LengthDistribution.uniform(LONGEST), h100(), TAU)


class Conventional(NamedTuple):
    """Conventional RL with G = `steps_per_round`: all accelerators generate B*G sequences, then all train.

    The phases alternate, so their times per token add up: r = 1 / (1/r_gen + 1/r_train). The last step of a round trains on
    tokens sampled by the weights from before its first step: the lag is at most G - 1.
    """

    steps_per_round: int
    generation_rate: float
    training_rate: float

    @property
    def rate(self) -> float:
        return 1 / (1 / self.generation_rate + 1 / self.training_rate)


class Pipeline(NamedTuple):
    """PipelineRL with I = `generating` accelerators of H = `slots` sequences each. The others train.

    The faster phase waits for the slower: r = min(r_gen, r_train).
    """

    slots: int
    generating: int
    generation_rate: float
    training_rate: float
    max_lag: int

    @property
    def rate(self) -> float:
        return min(self.generation_rate, self.training_rate)


def conventional(workload: PaperWorkload, steps_per_round: int) -> Conventional:
    """One round at G = `steps_per_round`.

    r_gen = K / sum_{l=1..L} (h(l)/N) / U(h(l)/N), where S = B G sequences have K = S Lbar tokens. Each summand is the time
    of the l-th decode step, when the h(l) sequences of at least l tokens are spread evenly. r_train = N / tau.
    """
    accelerators, sequences = workload.accelerators, workload.batch_size * steps_per_round
    running = workload.lengths.survival() * (sequences / accelerators)
    time = float(workload.utilisation.step_time(running).sum())
    return Conventional(steps_per_round, sequences * workload.lengths.mean / time, accelerators / workload.tau)


def pipeline(workload: PaperWorkload, slots: int, generating: int) -> Pipeline:
    """`generating` accelerators with `slots` sequences each: r_gen = U(H) I, r_train = (N - I) / tau."""
    return Pipeline(
        slots=slots,
        generating=generating,
        generation_rate=float(workload.utilisation(slots)) * generating,
        training_rate=(workload.accelerators - generating) / workload.tau,
        max_lag=int(pipeline_max_lag(workload, slots * generating)),
    )


def pipeline_max_lag(workload: PaperWorkload, in_progress: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """g_max = ceil(H I L / (Lbar B)) for H I sequences `in_progress` (any shape).

    This is the number of optimizer steps while the longest sequence is generated, if neither phase waits: L decode steps
    finish H I L / Lbar sequences, and a step takes B of them.
    """
    tail = workload.lengths.longest / workload.lengths.mean
    steps = np.asarray(in_progress, dtype=np.float64) * (tail / workload.batch_size)
    return np.ceil(steps * (1 - 1e-12))  # do not round up a whole number that is off by floating-point error


class Comparison(NamedTuple):
    """Both methods with a lag of at most `max_lag`. `pipeline` is None if no pipeline has such a low lag."""

    max_lag: int
    pipeline: Pipeline | None
    conventional: Conventional

    @property
    def speed_up(self) -> float | None:
        return self.pipeline.rate / self.conventional.rate if self.pipeline else None


def best_pipeline(workload: PaperWorkload, max_lag: int, most_slots: int = _MOST_SLOTS) -> Pipeline | None:
    """The fastest of all H and I with a lag of at most `max_lag`. Ties go to the lowest lag, then to the lowest H."""
    slots, generating = np.arange(1, most_slots + 1), np.arange(1, workload.accelerators)
    generation = workload.utilisation(slots)[:, None] * generating
    lags = pipeline_max_lag(workload, slots[:, None] * generating)
    rates = np.minimum(generation, (workload.accelerators - generating) / workload.tau)
    rates = np.where(lags <= max_lag, rates, 0.0)
    if not rates.size or rates.max() <= 0:
        return None
    rows, columns = np.nonzero(rates >= rates.max() * _SAME)
    first = np.lexsort((columns, rows, lags[rows, columns]))[0]
    return pipeline(workload, int(slots[rows[first]]), int(generating[columns[first]]))


def compare(workload: PaperWorkload, max_lags: Sequence[int], most_slots: int = _MOST_SLOTS) -> list[Comparison]:
    """Throughput against g_max (the paper's Figure 9): the best of both methods at each of these lags (>= 0), ascending."""
    best, tried, found = conventional(workload, 1), 1, []
    for max_lag in sorted(max_lags):
        for steps in range(tried + 1, max_lag + 2):
            candidate = conventional(workload, steps)
            if candidate.rate * _SAME > best.rate:
                best = candidate
        tried = max(tried, max_lag + 1)
        found.append(Comparison(max_lag, best_pipeline(workload, max_lag, most_slots), best))
    return found


def plan_text() -> str:
    """The case study as a table: throughput by lag."""
    title = f"N = {ACCELERATORS} H100, B = {BATCH}, lengths uniform up to {LONGEST}: tokens per flash"
    caption = "A flash is the time of one token's forward at peak FLOPs. U(h) and tau are fitted to the paper's case study."
    table = new_table(title, "largest lag", "PipelineRL", "H", "I", "conventional", "G", "speed-up", caption=caption)
    for found in compare(case_study(), sorted({*powers_of_two(4 * MAX_LAG), MAX_LAG})):
        ours, theirs = found.pipeline, found.conventional
        cells = (f"{ours.rate:.4g}", f"{ours.slots}", f"{ours.generating}") if ours else ("-", "-", "-")
        speed_up = f"{found.speed_up:.2f}x" if found.speed_up is not None else "-"
        row = (f"{found.max_lag}", *cells, f"{theirs.rate:.4g}", f"{theirs.steps_per_round}", speed_up)
        table.add_row(*row, style="bold" if found.max_lag == MAX_LAG else "")
    return rendered(table)
