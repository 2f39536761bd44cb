"""The results of `pipelinerl calibrate` for a machine and a run file: costs in seconds, and lengths. Stored as JSON."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pipelinerl.errors import INVALID_DATA, UserError
from pipelinerl.experiments.planner.inputs import LengthDistribution, Utilisation
from pipelinerl.report import write_file
from pipelinerl.resources.hardware import Machine

FORMAT = 2
READY, ENOUGH = "ready", "enough"
"""What a measuring process says when it computes as in a run, and when it has measured enough."""


class DecodeCost(msgspec.Struct, frozen=True, kw_only=True):
    """The median time of a decode step of the engine with `active` sequences."""

    active: int
    step_s: float


class GenerationCost(msgspec.Struct, frozen=True, kw_only=True):
    """The costs of one generation process.

    decode              decode steps by number of sequences, ascending; contexts are as long as in a batch that is kept full
    prompt_tokens_mean  mean prompt length of the run's problems
    rollout_overhead_s  process time per rollout beyond its share of decode steps: its share of its group's prefill,
                        admission, environment and reward code, records and stream
    tokens_per_s        rate of the whole process, actor and environment included, with all slots in use
    update_pause_s      the engine's pause for new weights
    """

    threads: int
    decode: tuple[DecodeCost, ...]
    prompt_tokens_mean: float
    rollout_overhead_s: float
    tokens_per_s: float
    update_pause_s: float

    def utilisation(self) -> Utilisation:
        """U(h) of the decode steps alone, in seconds. Raises ValueError for an invalid table."""
        active = tuple(float(cost.active) for cost in self.decode)
        return Utilisation(active, tuple(cost.step_s for cost in self.decode))


class TrainingCost(msgspec.Struct, frozen=True, kw_only=True):
    """A step of `ranks` takes `step_s + token_s * tokens`; all these tokens go through the model, prompts included.

    `used_share` is the share of the sampled rollouts' tokens that go through the model; the others have no gradient. It is
    measured with the initial model. It is 0 if that model solved no problem or every problem; a plan then underestimates
    the cost of training.
    """

    threads: int
    step_s: float
    token_s: float
    used_share: float
    rollout_s: float
    """Seconds to prepare a rollout for training: reading it from the stream, computing advantages, joining turns."""
    ranks: int = 1


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Costs for one machine and one run file, measured on `date` with `load_average` (1 minute, at the start).

    side_by_side   generation and training run at the same time in the run, and were measured so; otherwise each had the
                   machine to itself, as in a conventional run
    generation_yields   they do, but on the same cores, where generation has a low priority and computes mostly while the
                   trainer waits; each had the machine to itself here, too
    processes      number of generation processes in the run; `generation` has the costs of one of them, while the others
                   generated too if they share the machine's cores
    lengths        sampled tokens -> number of rollouts, with the initial model (training changes lengths)
    """

    machine: Machine
    date: str
    load_average: float | None = None
    model: str
    slots: int
    batch_size: int
    group_size: int
    processes: int
    side_by_side: bool
    generation_yields: bool = False
    generation: GenerationCost
    training: TrainingCost
    lengths: dict[int, int]
    format: int = FORMAT

    @property
    def disturbed(self) -> bool:
        """Whether the load suggests that other programs disturbed the measurements."""
        return self.load_average is not None and self.load_average > self.machine.cores / 2

    def length_distribution(self) -> LengthDistribution:
        return LengthDistribution.of_histogram(self.lengths)


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write atomically. Raises RunDirectoryError if the file can't be written."""
    write_file(path, msgspec.json.format(msgspec.json.encode(calibration), indent=1) + b"\n")


def read_calibration(path: Path) -> Calibration:
    """Raises UserError for a file that can't be read or is not a calibration of this format."""
    try:
        calibration = msgspec.json.decode(path.read_bytes(), type=Calibration)
        calibration.generation.utilisation()
        calibration.length_distribution()
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror}; `pipelinerl calibrate` writes such a file") from error
    except (*INVALID_DATA, ValueError) as error:
        raise UserError(f"{path} is not a calibration ({error}); write one with `pipelinerl calibrate`") from error
    if calibration.format != FORMAT:
        raise UserError(f"{path} has format {calibration.format}, not {FORMAT}; write it again with `pipelinerl calibrate`")
    return calibration
