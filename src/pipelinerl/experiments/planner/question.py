"""Builds a `Workload` from a run file, a calibration and flags, and records the source of each figure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import UserError
from pipelinerl.experiments.planner.analytic import Workload
from pipelinerl.experiments.planner.calibration import Calibration, read_calibration
from pipelinerl.experiments.planner.lengths import LengthDistribution, parse_lengths
from pipelinerl.experiments.planner.utilisation import (
    ACCELERATORS,
    PAPER_TAU,
    Accelerator,
    Utilisation,
    cache_share,
    flash_s,
    roofline,
    tau_from_mfu,
)

PAPER_ACCELERATORS = 128
PAPER_BATCH = 128
PAPER_LONGEST = 8192
PAPER_MAX_LAG = 133
PAPER_PARAMETERS = 7.6e9
"""Qwen2.5-7B. Used only to convert tokens per flash to tokens per second."""


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Command-line flags; None: not given."""

    accelerators: int | None = None
    hardware: str | None = None
    conventional: str | None = None
    model_params: float | None = None
    kv_bytes_per_token: float | None = None
    batch: int | None = None
    lengths: str | None = None
    mfu: float | None = None
    tau: float | None = None
    max_lag: int | None = None


@dataclass(frozen=True, kw_only=True)
class Question:
    """The inputs of a plan. `max_lag` None: no bound on lag. `facts` are (name, value, source).

    `tokens_per_s` converts a rate in the workload's unit to tokens per second. `baseline` is the workload of conventional
    RL, if its costs were measured separately.
    """

    workload: Workload
    baseline: Workload | None
    max_lag: int | None
    facts: tuple[tuple[str, str, str], ...]
    tokens_per_s: float


@dataclass(frozen=True)
class _Costs:
    utilisation: Utilisation
    tau: float
    tau_source: str
    tokens_per_s: float


def ask(config: RunConfig | None, flags: Flags) -> Question:
    """`config` None and no flags: the paper's case study. Raises UserError for missing or invalid inputs."""
    calibration = calibration_of(flags)
    if calibration and (
        used := [name for name in ("mfu", "model_params", "kv_bytes_per_token") if getattr(flags, name) is not None]
    ):
        raise UserError(f"--{used[0].replace('_', '-')} is for --hardware h100 or h200; {flags.hardware} has measured costs")
    lengths, lengths_source = _lengths(config, flags, calibration)
    accelerators, accelerators_source = _accelerators(config, flags, calibration)
    batch, batch_source = _batch(config, flags, calibration)
    max_lag, lag_source = _max_lag(config, flags)
    costs = _measured(calibration, batch, lengths, flags) if calibration else _modelled(lengths, flags)
    try:
        workload = Workload(accelerators, batch, lengths, costs.utilisation, costs.tau)
    except ValueError as error:
        raise UserError(f"invalid workload: {error}") from error
    baseline, baseline_facts = _baseline(batch, lengths, flags, calibration)
    unit = "flashes" if costs.utilisation.unit == "flash" else "s"
    return Question(
        workload=workload,
        baseline=baseline,
        max_lag=max_lag,
        tokens_per_s=costs.tokens_per_s,
        facts=(
            ("N, accelerators", f"{accelerators}", accelerators_source),
            ("B, rollouts a step", f"{batch}", batch_source),
            ("lengths", f"mean {lengths.mean:.4g}, longest {lengths.longest} tokens", lengths_source),
            ("U(h)", _curve(costs.utilisation), costs.utilisation.source),
            ("tau, training", f"{costs.tau:.3g} {unit} a token", costs.tau_source),
            *baseline_facts,
            ("g_max, lag", "any" if max_lag is None else f"at most {max_lag}", lag_source),
        ),
    )


def calibration_of(flags: Flags) -> Calibration | None:
    """The calibration that `--hardware` names; None for an accelerator or no flag. Raises UserError for any other value."""
    if flags.hardware is None or flags.hardware in ACCELERATORS:
        return None
    if not flags.hardware.endswith(".json"):
        raise UserError(f"--hardware {flags.hardware}: give {', '.join(ACCELERATORS)}, or a calibration (a .json file)")
    return read_calibration(Path(flags.hardware))


def _baseline(
    batch: int, lengths: LengthDistribution, flags: Flags, calibration: Calibration | None
) -> tuple[Workload | None, tuple[tuple[str, str, str], ...]]:
    """Conventional RL as measured. Each phase has the whole machine: first `processes` engines, then one trainer."""
    if flags.conventional is None:
        return None, ()
    measured = read_calibration(Path(flags.conventional))
    if calibration is None or measured.side_by_side:
        raise UserError(
            f"--conventional {flags.conventional}: give a calibration made with schedule.kind conventional, and --hardware "
            "a calibration made with schedule.kind pipeline"
        )
    costs = _measured(measured, batch, lengths, Flags())
    engines = measured.processes
    # The model has r_train = N / tau. With N = engines, this tau makes r_train the rate of the one trainer.
    workload = Workload(engines, batch, lengths, costs.utilisation, costs.tau * engines)
    facts = (
        ("conventional, U(h)", f"{engines} x {_curve(costs.utilisation)}", flags.conventional),
        ("conventional, tau", f"{costs.tau:.3g} s a token", flags.conventional),
    )
    return workload, facts


def _accelerators(config: RunConfig | None, flags: Flags, calibration: Calibration | None) -> tuple[int, str]:
    if flags.accelerators is not None:
        return flags.accelerators, "--accelerators"
    if calibration:
        return calibration.machine.accelerators, "the calibrated machine"
    if config is None:
        return PAPER_ACCELERATORS, "the paper's case study"
    raise UserError("the number of accelerators is unknown; give --accelerators N, or --hardware CALIBRATION.json")


def _batch(config: RunConfig | None, flags: Flags, calibration: Calibration | None) -> tuple[int, str]:
    if flags.batch is not None:
        return flags.batch, "--batch"
    if config:
        return config.trainer.batch_size, "trainer.batch_size"
    if calibration:
        return calibration.batch_size, "the calibration"
    return PAPER_BATCH, "the paper's case study"


def _lengths(config: RunConfig | None, flags: Flags, calibration: Calibration | None) -> tuple[LengthDistribution, str]:
    if flags.lengths is not None:
        return parse_lengths(flags.lengths), f"--lengths {flags.lengths}"
    if calibration:
        return calibration.length_distribution(), "the calibration, made with the initial model"
    if config:
        return LengthDistribution.uniform(config.actor.max_tokens), "uniform up to actor.max_tokens: not measured"
    return LengthDistribution.uniform(PAPER_LONGEST), "uniform, the paper's case study"


def _max_lag(config: RunConfig | None, flags: Flags) -> tuple[int | None, str]:
    if flags.max_lag is not None:
        if flags.max_lag < 0:
            raise UserError(f"--max-lag {flags.max_lag}: lag is 0 or more optimizer steps")
        return flags.max_lag, "--max-lag"
    if config and config.schedule.max_lag is not None:
        return config.schedule.max_lag, "schedule.max_lag"
    if config or flags.hardware not in (None, "h100"):
        return None, "no bound: --max-lag sets one"
    return PAPER_MAX_LAG, "the paper's case study"


def _measured(calibration: Calibration, batch: int, lengths: LengthDistribution, flags: Flags) -> _Costs:
    generation, training = calibration.generation, calibration.training
    tau = training.tau_s(batch_size=batch, mean_length=lengths.mean, prompt_tokens=generation.prompt_tokens_mean)
    return _Costs(
        utilisation=generation.utilisation().with_overhead(generation.rollout_overhead_s / lengths.mean),
        tau=flags.tau if flags.tau is not None else tau,
        tau_source="--tau" if flags.tau is not None else f"the calibration, at B = {batch}",
        tokens_per_s=1.0,
    )


def _modelled(lengths: LengthDistribution, flags: Flags) -> _Costs:
    accelerator: Accelerator = ACCELERATORS[flags.hardware or "h100"]
    parameters = flags.model_params or PAPER_PARAMETERS
    utilisation = roofline(accelerator)
    if flags.kv_bytes_per_token is not None:
        context = float((lengths.ages() * range(lengths.longest)).sum())
        utilisation = roofline(accelerator, sequence_share=cache_share(parameters, flags.kv_bytes_per_token, context))
    tau, source = _tau(flags)
    return _Costs(utilisation, tau, source, 1 / flash_s(parameters, accelerator.peak_flops))


def _tau(flags: Flags) -> tuple[float, str]:
    if flags.tau is not None and flags.mfu is not None:
        raise UserError("--tau and --mfu both set the training time; give one of them")
    if flags.tau is not None:
        return flags.tau, "--tau"
    if flags.mfu is not None:
        try:
            return tau_from_mfu(flags.mfu), f"--mfu {flags.mfu:g}: a forward, and a backward of twice its cost"
        except ValueError as error:
            raise UserError(f"--mfu {flags.mfu}: {error}") from error
    return PAPER_TAU, f"the paper's case study (MFU {3 / PAPER_TAU:.2f})"


def _curve(utilisation: Utilisation) -> str:
    """U at a few batch sizes."""
    sizes = sorted({1, min(64, int(utilisation.largest)), min(192, int(utilisation.largest))})
    if utilisation.unit == "s":
        return ", ".join(f"{float(utilisation(h)):.0f} tokens/s at {h}" for h in sizes)
    return ", ".join(f"{float(utilisation(h)):.3g} at {h}" for h in sizes)
