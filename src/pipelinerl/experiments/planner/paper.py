"""The analytical model of arXiv 2509.19128, Appendix A, in the paper's notation, with the paper's case study.

Times are in flashes (the time of one token's forward at peak FLOPs), and rates in sampled tokens per flash. `U(h)` is an
accelerator's generation rate with h sequences in progress, `tau` the training time per sampled token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipelinerl.experiments.planner.calibration import LengthDistribution, Utilisation
from pipelinerl.experiments.statistics import Floats, powers_of_two
from pipelinerl.report import PageSection, in_terminal, number

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
_SAME = 1 - 1e-9
"""Rates whose ratio is closer to 1 are equal."""


def uniform(longest: int) -> LengthDistribution:
    """Lengths 1..L with equal probability: the paper's assumption."""
    return LengthDistribution(dict.fromkeys(range(1, longest + 1), 1.0))


def h100() -> Utilisation:
    """U of the case study: the longer of reading (the fitted curve) and computing."""
    knee = STEP_FLASHES / (1 / CEILING - SEQUENCE_FLASHES)
    return Utilisation({h: max(STEP_FLASHES + SEQUENCE_FLASHES * h, h / CEILING) for h in (0.0, knee, 8192.0)})


@dataclass(frozen=True, kw_only=True)
class PaperWorkload:
    """N `accelerators`, B sequences per optimizer step, their lengths, U(h), and training time per sampled token, tau.

    The defaults are the case study's.
    """

    accelerators: int = 128
    batch_size: int = 128
    lengths: LengthDistribution = field(default_factory=lambda: uniform(8192))
    utilisation: Utilisation = field(default_factory=h100)
    tau: float = TAU


class Rates(NamedTuple):
    """Generation and training of one method, their joint `rate`, and the largest lag.

    steps_per_round     G of conventional RL: all accelerators generate B*G sequences, then all train
    slots, generating   H and I of PipelineRL: I accelerators generate with H sequences each, the others train
    """

    generation_rate: float
    training_rate: float
    rate: float
    max_lag: int
    steps_per_round: int = 0
    slots: int = 0
    generating: int = 0


def conventional(workload: PaperWorkload, steps_per_round: int) -> Rates:
    """Conventional RL. The phases alternate, so their times per token add up: r = 1 / (1/r_gen + 1/r_train).

    r_gen = K / sum_{l=1..L} (h(l)/N) / U(h(l)/N), where S = B G sequences have K = S Lbar tokens. Each summand is the time
    of the l-th decode step, when the h(l) sequences of at least l tokens are spread evenly. r_train = N / tau. The last step
    of a round trains on tokens sampled by the weights from before its first step: the lag is at most G - 1.
    """
    accelerators, sequences = workload.accelerators, workload.batch_size * steps_per_round
    running = workload.lengths.survival * (sequences / accelerators)
    generation = sequences * workload.lengths.mean / float(workload.utilisation.step_time(running).sum())
    training = accelerators / workload.tau
    rate = 1 / (1 / generation + 1 / training)
    return Rates(generation, training, rate, steps_per_round - 1, steps_per_round=steps_per_round)


def pipeline(workload: PaperWorkload, slots: int, generating: int) -> Rates:
    """PipelineRL. The faster phase waits for the slower: r = min(r_gen, r_train), r_gen = U(H) I, r_train = (N - I) / tau.

    g_max = ceil(H I L / (Lbar B)) is the number of optimizer steps while the longest sequence is generated, if neither phase
    waits: L decode steps finish H I L / Lbar sequences, and a step takes B of them.
    """
    generation = slots / float(workload.utilisation.step_time(slots)) * generating
    training = (workload.accelerators - generating) / workload.tau
    max_lag = int(pipeline_max_lag(workload, slots * generating))
    return Rates(generation, training, min(generation, training), max_lag, slots=slots, generating=generating)


def pipeline_max_lag(workload: PaperWorkload, in_progress: npt.ArrayLike) -> Floats:
    """g_max of `pipeline` for H I sequences `in_progress` (any shape)."""
    tail = workload.lengths.longest / workload.lengths.mean
    steps = np.asarray(in_progress, dtype=np.float64) * (tail / workload.batch_size)
    return np.ceil(steps * (1 - 1e-12))  # do not round up a whole number that is off by floating-point error


class Comparison(NamedTuple):
    """Both methods with a lag of at most `max_lag`. `pipeline` is None if no pipeline has such a low lag."""

    max_lag: int
    pipeline: Rates | None
    conventional: Rates

    @property
    def speed_up(self) -> float | None:
        return self.pipeline.rate / self.conventional.rate if self.pipeline else None


def best_pipeline(workload: PaperWorkload, max_lag: int, most_slots: int = 1024) -> Rates | None:
    """The fastest of all H and I with a lag of at most `max_lag`. Ties go to the lowest lag, then to the lowest H."""
    slots, generating = np.arange(1, most_slots + 1), np.arange(1, workload.accelerators)
    generation = (slots / workload.utilisation.step_time(slots))[:, None] * generating
    lags = pipeline_max_lag(workload, slots[:, None] * generating)
    rates = np.where(lags <= max_lag, np.minimum(generation, (workload.accelerators - generating) / workload.tau), 0.0)
    if not rates.any():
        return None
    rows, columns = np.nonzero(rates >= rates.max() * _SAME)
    first = np.lexsort((columns, rows, lags[rows, columns]))[0]
    return pipeline(workload, int(slots[rows[first]]), int(generating[columns[first]]))


def compare(workload: PaperWorkload, max_lags: Sequence[int]) -> list[Comparison]:
    """Throughput against g_max (the paper's Figure 9): the best of both methods at each of these lags (>= 0), ascending."""
    best, found = conventional(workload, 1), []
    for before, max_lag in pairwise((0, *sorted(max_lags))):
        for steps in range(before + 2, max_lag + 2):
            candidate = conventional(workload, steps)
            if candidate.rate * _SAME > best.rate:
                best = candidate
        found.append(Comparison(max_lag, best_pipeline(workload, max_lag), best))
    return found


def plan_text() -> str:
    """The case study as a table: throughput by lag."""
    study = PaperWorkload()
    title = f"N = {study.accelerators} H100, B = {study.batch_size}, lengths uniform up to {study.lengths.longest}: "
    note = "A flash is the time of one token's forward at peak FLOPs. U(h) and tau are fitted to the paper's case study."
    rows = []
    for found in compare(study, sorted({*powers_of_two(4 * MAX_LAG), MAX_LAG})):
        ours, theirs = found.pipeline, found.conventional
        cells = (f"{ours.rate:.4g}", f"{ours.slots}", f"{ours.generating}") if ours else ("-", "-", "-")
        others = (f"{theirs.rate:.4g}", f"{theirs.steps_per_round}", number(found.speed_up, ".2f"))
        rows.append((f"{found.max_lag}", *cells, *others))
    header = ("largest lag", "PipelineRL", "H", "I", "conventional", "G", "speed-up")
    return in_terminal(PageSection(title=f"{title}tokens per flash", texts=[note], header=header, rows=rows))
