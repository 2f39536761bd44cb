"""The plan: its inputs from a run file, a calibration and flags, the search of both methods, and throughput against lag."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import UserError
from pipelinerl.experiments.planner.analytic import (
    ACCELERATORS,
    PAPER_TAU,
    Conventional,
    LengthDistribution,
    Pipeline,
    Utilisation,
    Workload,
    cache_share,
    conventional,
    flash_s,
    parse_lengths,
    pipeline,
    pipeline_max_lag,
    roofline,
    tau_from_mfu,
)
from pipelinerl.experiments.planner.calibration import Calibration, read_calibration
from pipelinerl.experiments.statistics import powers_of_two

T = TypeVar("T")

PAPER_ACCELERATORS = 128
PAPER_BATCH = 128
PAPER_LONGEST = 8192
PAPER_MAX_LAG = 133
PAPER_PARAMETERS = 7.6e9
"""Qwen2.5-7B. Used only to convert tokens per flash to tokens per second."""
PAPER = "the paper's case study"

CURVE_POINTS = 48
MAX_SLOTS = 1024
"""The search tries up to this many sequences per accelerator, or fewer if U is known only for fewer."""
_SAME = 1 - 1e-9
"""Rates within rounding of the best count as equal. The lowest lag decides between them, then the fewest slots."""


# ---- the question: a workload, and the source of each of its figures


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
    shape: str | None = None
    network: float | None = None
    prompt_tokens: float | None = None
    stragglers: float | None = None


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


class _Costs(NamedTuple):
    utilisation: Utilisation
    tau: float
    tau_source: str
    tokens_per_s: float


def ask(config: RunConfig | None, flags: Flags) -> Question:
    """`config` None and no flags: the paper's case study. Raises UserError for missing or invalid inputs."""
    if used := [name for name in ("network", "prompt_tokens", "stragglers") if getattr(flags, name) is not None]:
        raise UserError(f"--{used[0].replace('_', '-')} needs a model's --shape, from which its cost is computed")
    calibration = calibration_of(flags)
    if calibration and (
        used := [name for name in ("mfu", "model_params", "kv_bytes_per_token") if getattr(flags, name) is not None]
    ):
        raise UserError(f"--{used[0].replace('_', '-')} is for --hardware h100 or h200; {flags.hardware} has measured costs")
    lengths, lengths_source = _lengths(config, flags, calibration)
    measured_n = calibration.machine.accelerators if calibration else None
    accelerators, accelerators_source = _first_given(
        (flags.accelerators, "--accelerators"),
        (measured_n, "the calibrated machine"),
        (None if config else PAPER_ACCELERATORS, PAPER),
    )
    if accelerators is None:
        raise UserError(
            "a run file does not say how many accelerators there are: give --accelerators N (on a CPU: processes), or "
            "--hardware CALIBRATION.json"
        )
    batch, batch_source = _first_given(
        (flags.batch, "--batch"),
        (config.trainer.batch_size if config else None, "trainer.batch_size"),
        (calibration.batch_size if calibration else None, "the calibration"),
    )
    if batch is None:
        batch, batch_source = PAPER_BATCH, PAPER
    if flags.max_lag is not None and flags.max_lag < 0:
        raise UserError(f"--max-lag {flags.max_lag}: lag is 0 or more optimizer steps")
    max_lag, lag_source = _first_given(
        (flags.max_lag, "--max-lag"),
        (config.schedule.max_lag if config else None, "schedule.max_lag"),
        (PAPER_MAX_LAG if config is None and flags.hardware in (None, "h100") else None, PAPER),
    )
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
            (
                "g_max, lag",
                *(("any", "no bound: --max-lag sets one") if max_lag is None else (f"at most {max_lag}", lag_source)),
            ),
        ),
    )


def calibration_of(flags: Flags) -> Calibration | None:
    """The calibration that `--hardware` names; None for an accelerator or no flag. Raises UserError for any other value."""
    if flags.hardware is None or flags.hardware in ACCELERATORS:
        return None
    if not flags.hardware.endswith(".json"):
        raise UserError(f"--hardware {flags.hardware}: give {', '.join(ACCELERATORS)}, or a calibration (a .json file)")
    return read_calibration(Path(flags.hardware))


def _first_given(*options: tuple[T | None, str]) -> tuple[T | None, str]:
    """The first (value, source) whose value is not None."""
    return next((option for option in options if option[0] is not None), (None, ""))


def _lengths(config: RunConfig | None, flags: Flags, calibration: Calibration | None) -> tuple[LengthDistribution, str]:
    if flags.lengths is not None:
        return parse_lengths(flags.lengths), f"--lengths {flags.lengths}"
    if calibration:
        return calibration.length_distribution(), "the calibration, made with the initial model"
    if config:
        return LengthDistribution.uniform(config.actor.max_tokens), "uniform up to actor.max_tokens: not measured"
    return LengthDistribution.uniform(PAPER_LONGEST), f"uniform, {PAPER}"


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
    workload = Workload(engines, batch, lengths, costs.utilisation, costs.tau * engines / measured.training.ranks)
    facts = (
        ("conventional, U(h)", f"{engines} x {_curve(costs.utilisation)}", flags.conventional),
        ("conventional, tau", f"{costs.tau:.3g} s a token", flags.conventional),
    )
    return workload, facts


def _measured(calibration: Calibration, batch: int, lengths: LengthDistribution, flags: Flags) -> _Costs:
    generation, training = calibration.generation, calibration.training
    tau_s = training.tau_s(batch_size=batch, mean_length=lengths.mean, prompt_tokens=generation.prompt_tokens_mean)
    tau = tau_s * training.ranks  # each rank is an accelerator
    return _Costs(
        utilisation=generation.utilisation().with_overhead(generation.rollout_overhead_s / lengths.mean),
        tau=flags.tau if flags.tau is not None else tau,
        tau_source="--tau" if flags.tau is not None else _tau_source(training.ranks, batch),
        tokens_per_s=1.0,
    )


def _tau_source(ranks: int, batch: int) -> str:
    return f"the calibration, at B = {batch}" + (f", on {ranks} ranks (together)" if ranks > 1 else "")


def _modelled(lengths: LengthDistribution, flags: Flags) -> _Costs:
    accelerator = ACCELERATORS[flags.hardware or "h100"]
    parameters = flags.model_params or PAPER_PARAMETERS
    utilisation = roofline(accelerator)
    if flags.kv_bytes_per_token is not None:
        context = float((lengths.ages() * range(lengths.longest)).sum())
        utilisation = roofline(accelerator, sequence_share=cache_share(parameters, flags.kv_bytes_per_token, context))
    if flags.tau is not None and flags.mfu is not None:
        raise UserError("--tau and --mfu both set the training time; give one of them")
    tau, source = PAPER_TAU, f"{PAPER} (MFU {3 / PAPER_TAU:.2f})"
    if flags.tau is not None:
        tau, source = flags.tau, "--tau"
    elif flags.mfu is not None:
        try:
            tau, source = tau_from_mfu(flags.mfu), f"--mfu {flags.mfu:g}: a forward, and a backward of twice its cost"
        except ValueError as error:
            raise UserError(f"--mfu {flags.mfu}: {error}") from error
    return _Costs(utilisation, tau, source, 1 / flash_s(parameters, accelerator.peak_flops))


def _curve(utilisation: Utilisation) -> str:
    """U at a few batch sizes."""
    sizes = sorted({1, min(64, int(utilisation.largest)), min(192, int(utilisation.largest))})
    if utilisation.unit == "s":
        return ", ".join(f"{float(utilisation(h)):.0f} tokens/s at {h}" for h in sizes)
    return ", ".join(f"{float(utilisation(h)):.3g} at {h}" for h in sizes)


# ---- the search: every (H, I) of a pipeline, every G of conventional RL


class Comparison(NamedTuple):
    """Both methods with a lag of at most `max_lag`. `pipeline` is None if no pipeline has such a low lag."""

    max_lag: int
    pipeline: Pipeline | None
    conventional: Conventional

    @property
    def speed_up(self) -> float | None:
        return self.pipeline.rate / self.conventional.rate if self.pipeline else None


@dataclass(frozen=True, eq=False)
class PipelineGrid:
    """All pipelines of a workload: `rates` and `max_lags` [slots, generating]; `slots` and `generating` are their axes."""

    workload: Workload
    slots: npt.NDArray[np.int64]
    generating: npt.NDArray[np.int64]
    rates: npt.NDArray[np.float64]
    max_lags: npt.NDArray[np.float64]

    @classmethod
    def of(cls, workload: Workload, most_slots: int | None = None) -> PipelineGrid:
        """H = 1..most_slots (None: as far as U is known, at most MAX_SLOTS), I = 1..N-1. Empty if N = 1."""
        most = most_slots or max(1, min(MAX_SLOTS, int(workload.utilisation.largest)))
        slots, generating = np.arange(1, most + 1), np.arange(1, workload.accelerators)
        generation = workload.utilisation(slots)[:, None] * generating
        training = (workload.accelerators - generating) / workload.tau
        max_lags = pipeline_max_lag(workload, slots[:, None] * generating)
        return cls(workload, slots, generating, np.minimum(generation, training), max_lags)

    def best(self, max_lag: int | None = None) -> Pipeline | None:
        """The fastest with a lag of at most `max_lag` (None: any). Ties go to the lowest lag, then to the lowest H."""
        rates = self.rates if max_lag is None else np.where(self.max_lags <= max_lag, self.rates, 0.0)
        if not rates.size or rates.max() <= 0:
            return None
        rows, columns = np.nonzero(rates >= rates.max() * _SAME)
        first = np.lexsort((columns, rows, self.max_lags[rows, columns]))[0]
        return pipeline(self.workload, int(self.slots[rows[first]]), int(self.generating[columns[first]]))


def compare(
    workload: Workload, max_lags: Sequence[int], *, most_slots: int | None = None, baseline: Workload | None = None
) -> list[Comparison]:
    """Throughput against g_max (the paper's Figure 9): the best of both methods at each of these lags (>= 0), ascending.

    `baseline` is the workload of conventional RL, if costs differ when a phase has the whole machine.
    """
    grid = PipelineGrid.of(workload, most_slots)
    best, tried = conventional(baseline or workload, 1), 1
    comparisons = []
    for max_lag in sorted(max_lags):
        for steps in range(tried + 1, max_lag + 2):
            candidate = conventional(baseline or workload, steps)
            if candidate.rate * _SAME > best.rate:
                best = candidate
        tried = max(tried, max_lag + 1)
        comparisons.append(Comparison(max_lag, grid.best(max_lag), best))
    return comparisons


# ---- the plan


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`chosen` compares both methods at the requested lag, `curve` at lags up to four times that (at least 8), ascending."""

    question: Question
    chosen: Comparison
    curve: tuple[Comparison, ...]


def make_plan(question: Question) -> Plan:
    """Search all configurations. Raises UserError, with the reason, if no pipeline is possible."""
    workload = question.workload
    if workload.accelerators < 2:
        raise UserError("a pipeline needs at least 2 accelerators, one to generate and one to train: --accelerators 2")
    max_lag = question.max_lag
    if max_lag is None:
        fastest = PipelineGrid.of(workload).best()
        max_lag = fastest.max_lag if fastest else 0
    lags = np.unique(np.geomspace(1, max(8, 4 * max_lag), CURVE_POINTS).round().astype(int)).tolist()
    curve = compare(workload, sorted({*lags, *powers_of_two(lags[-1]), max_lag}), baseline=question.baseline)
    chosen = next(comparison for comparison in curve if comparison.max_lag == max_lag)
    if chosen.pipeline is None:
        lowest = min((c.max_lag for c in curve if c.pipeline), default=None)
        hint = f"; there is one at --max-lag {lowest}" if lowest is not None else ""
        raise UserError(f"no pipeline has a lag of at most {max_lag}{hint}")
    return Plan(question=question, chosen=chosen, curve=tuple(curve))


def tabulated(plan: Plan) -> list[Comparison]:
    """The points of the curve to print: lags that are powers of two, and the requested lag."""
    doublings = {*powers_of_two(plan.curve[-1].max_lag), plan.chosen.max_lag}
    return [comparison for comparison in plan.curve if comparison.max_lag in doublings]


def plan_json(plan: Plan) -> bytes:
    """Inputs and results as JSON. Rates are in tokens per `unit`."""
    workload = plan.question.workload
    utilisation = workload.utilisation
    contents = {
        "unit": utilisation.unit,
        "tokens_per_s_of_a_token_per_unit": plan.question.tokens_per_s,
        "accelerators": workload.accelerators,
        "batch_size": workload.batch_size,
        "length_mean": workload.lengths.mean,
        "length_max": workload.lengths.longest,
        "utilisation": {"active": utilisation.active, "step_times": utilisation.step_times, "source": utilisation.source},
        "tau": workload.tau,
        "chosen": _numbers(plan.chosen),
        "throughput_by_max_lag": [_numbers(comparison) for comparison in plan.curve],
    }
    return msgspec.json.format(msgspec.json.encode(contents), indent=1)


def _numbers(comparison: Comparison) -> dict[str, object]:
    def method(found: Pipeline | Conventional) -> dict[str, object]:
        return asdict(found) | {"rate": found.rate, "max_lag": found.max_lag}

    return {
        "max_lag": comparison.max_lag,
        "pipeline": method(comparison.pipeline) if comparison.pipeline else None,
        "conventional": method(comparison.conventional),
        "speed_up": comparison.speed_up,
    }
