"""The analytical model of arXiv 2509.19128, Appendix A, in the paper's notation. Pure.

Times are in the unit of `Workload.utilisation` and `Workload.tau` (flashes or seconds), rates in sampled tokens per unit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipelinerl.experiments.planner.lengths import LengthDistribution
from pipelinerl.experiments.planner.utilisation import Utilisation


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
