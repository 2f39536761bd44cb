"""The simulation at the paper's scale: 128 H100 and a model of 7B, compared with conventional RL at equal lag.

python -m benchmarks.paper_scale        # about 8 minutes on 2 cores; writes results/paper-scale/

1. The paper's case study (its Figure 9), from the formulas of Appendix A and from the simulation of every rollout.
2. Results beyond the formulas: how the speed-up depends on lengths, on slow tools and judges, and on the pause of a weight
   update. For each of these cases every (H, I) below is simulated, and conventional RL at all G.

Two systems are compared at equal lag: conventional RL at G, and the fastest pipeline whose lag (the 99th percentile over the
tokens it trains on) is at most that of conventional RL, G - 1.

Assumed, not measured: the decode step and `tau` are the planner's fit to the case study, prompts cost nothing, nothing
fails, every rollout has a gradient, and conventional RL switches all accelerators between phases instantly.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks import common
from pipelinerl.experiments.planner.calibration import LengthDistribution
from pipelinerl.experiments.planner.paper import TAU, PaperWorkload, compare, h100, uniform
from pipelinerl.experiments.planner.scenario import Costs, DrawnWorkload, Scenario
from pipelinerl.experiments.planner.simulate import RunPrediction, simulate
from pipelinerl.report.curves import png_of
from pipelinerl.schedule import ConventionalSchedule, PipelineSchedule

N = 128
FLASH_S = 2 * 7.6e9 / 989.4e12
"""Seconds of a flash: 2 FLOPs for each parameter of Qwen2.5-7B, over an H100's peak (dense BF16, from its data sheet)."""
CURVE = h100()

CASE_BATCH, CASE_LONGEST = 128, 8192
PAPER_POINT = {"max_lag": 133, "pipeline": 16.9, "conventional": 10.7, "speed_up": 1.57}

BATCH, GROUP = 1024, 8
"""B of the paper's main run. K of 8 lets conventional RL spread a round evenly over the accelerators at every G."""
MEAN = 2048
ROUNDS = (8, 16, 32, 64)
SLOTS = (24, 48, 64, 96, 128, 192, 256, 384)
LONGEST_WAIT = 10
PIPELINE_STEPS = 96
"""Enough for lags up to some 50 steps to become stationary. Larger lags are still rising: such a run is too short."""


@dataclass(frozen=True)
class Case:
    """All `lengths` have the mean MEAN. Rewards take lognormal time (sigma 1), cut at LONGEST_WAIT times the median, like a
    timeout. An engine pauses for `pause_s` when it applies weights.
    """

    lengths: str = "long-tailed"
    wait_median_s: float = 0.0
    pause_s: float = 0.0

    @property
    def label(self) -> str:
        parts = [f"{self.lengths} lengths"]
        parts += [f"tool {self.wait_median_s:g} s"] if self.wait_median_s else []
        parts += [f"pause {self.pause_s:g} s"] if self.pause_s else []
        return ", ".join(parts)


BASE = Case()
CASES = (
    Case(lengths="equal"),
    Case(lengths="uniform"),
    BASE,
    *(Case(wait_median_s=wait_s) for wait_s in (1.0, 10.0, 60.0)),
    *(Case(pause_s=pause_s) for pause_s in (1.0, 5.0, 20.0)),
)


def lengths_of(kind: str) -> LengthDistribution:
    """Lengths with a mean of MEAN tokens; the longest is the mean, twice or four times the mean."""
    if kind == "equal":
        return LengthDistribution({MEAN: 1})
    if kind == "uniform":
        return uniform(2 * MEAN - 1)
    longest = 4 * MEAN
    low, high = 1.0, float(longest)  # the median of a lognormal of sigma 1, cut at `longest`, whose mean is MEAN
    while high - low > 0.5:
        median = (low + high) / 2
        low, high = (median, high) if _cut_lognormal(median, longest).mean < MEAN else (low, median)
    return _cut_lognormal(low, longest)


def _cut_lognormal(median: float, longest: int) -> LengthDistribution:
    lengths = np.arange(1, longest + 1)
    weights = np.exp(-0.5 * np.log(lengths / median) ** 2) / lengths
    return LengthDistribution(dict(zip(lengths.tolist(), weights.tolist(), strict=True)))


@dataclass(frozen=True)
class Point:
    """One simulated configuration. `steps_per_round` 0: a pipeline, with H = `slots` on I = `engines` accelerators."""

    case: Case
    engines: int
    slots: int
    steps_per_round: int = 0


def run_point(point: Point) -> dict[str, Any]:
    """Simulate one point: samples/s after the first fifth of the steps, lag, and shares of time."""
    case, G = point.case, point.steps_per_round
    costs = Costs(
        decode_step_s=tuple((CURVE.step_time(np.arange(point.slots + 1)) * FLASH_S).tolist()),
        update_pause_s=case.pause_s,
        train_token_s=TAU * FLASH_S / (N if G else N - point.engines),
    )
    waits = {"wait_median_s": case.wait_median_s, "wait_most_s": LONGEST_WAIT * case.wait_median_s}
    workload = DrawnWorkload(lengths_of(case.lengths), GROUP, seed=0, **waits)
    scenario = Scenario(
        schedule=ConventionalSchedule(BATCH, G) if G else PipelineSchedule(BATCH, stock=2 * BATCH),
        engines=point.engines,
        slots=point.slots,
        group_size=GROUP,
        batch_size=BATCH,
        steps=max(2 * G, 64) if G else PIPELINE_STEPS,
        costs=costs,
        workload=workload,
    )
    return {**asdict(point), **_figures(simulate(scenario))}


def _figures(found: RunPrediction) -> dict[str, Any]:
    return {
        "samples_per_s": found.samples_per_s_later,
        "lag_mean": found.lag_mean,
        "lag_p99": found.lag_p99,
        "lag_max": found.lag_max,
        "engine_busy": found.engine_busy_fraction,
        "trainer_busy": found.trainer_busy_fraction,
        "slots_used": found.slots_used,
    }


def points(case: Case) -> list[Point]:
    """Every G; every H with the I at which both sides are equally fast (rounded up), and with 8 more generators."""
    found = [Point(case, N, BATCH * G // N, G) for G in ROUNDS]
    for slots in SLOTS:
        balanced = N / (1 + slots / float(CURVE.step_time(slots)) * TAU)
        found += [Point(case, engines, slots) for engines in sorted({int(balanced) + more for more in (1, 9)})]
    return found


def speed_ups(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each G: conventional RL, the fastest pipeline with no more lag, and the speed-up of the fastest with any lag."""
    rows = []
    fastest = max(result["samples_per_s"] for result in results if not result["steps_per_round"])
    for conventional in (result for result in results if result["steps_per_round"]):
        fresh = [r for r in results if not r["steps_per_round"] and r["lag_p99"] <= conventional["steps_per_round"] - 1]
        best = max(fresh, key=lambda result: result["samples_per_s"], default=None)
        rows.append(
            {
                "G": conventional["steps_per_round"],
                "conventional": conventional,
                "pipeline": best,
                "speed_up": best["samples_per_s"] / conventional["samples_per_s"] if best else None,
                "speed_up_any_lag": fastest / conventional["samples_per_s"],
            }
        )
    return rows


# ---- the case study


def case_study_curves() -> dict[str, Any]:
    """Throughput against g_max in tokens per flash: formulas at many lags, the simulation at three."""
    simulated_at = (15, 47, PAPER_POINT["max_lag"])
    lags = sorted({*np.unique(np.geomspace(4, 400, 40).round().astype(int)).tolist(), *simulated_at})
    curve, simulated = [], []
    for found in compare(PaperWorkload(), [int(lag) for lag in lags]):
        assert found.pipeline is not None
        row = {
            "max_lag": found.max_lag,
            "pipeline": found.pipeline.rate,
            "H": found.pipeline.slots,
            "I": found.pipeline.generating,
            "conventional": found.conventional.rate,
            "G": found.conventional.steps_per_round,
            "speed_up": found.speed_up,
        }
        curve.append(row)
        if found.max_lag in simulated_at:
            pipeline = _case_study_run(PipelineSchedule(CASE_BATCH), found.pipeline.generating, found.pipeline.slots)
            G = found.conventional.steps_per_round
            slots = -(-CASE_BATCH * G // N)
            conventional = _case_study_run(ConventionalSchedule(CASE_BATCH, G), N, slots, G)
            rates = pipeline.trained_tokens_per_s_later, conventional.trained_tokens_per_s_later
            simulated.append(
                {
                    "max_lag": found.max_lag,
                    "pipeline": rates[0],
                    "pipeline_lag_max": pipeline.lag_max,
                    "conventional": rates[1],
                    "conventional_lag_max": conventional.lag_max,
                    "speed_up": rates[0] / rates[1],
                }
            )
    return {"paper": PAPER_POINT, "formulas": curve, "simulated": simulated}


def _case_study_run(
    schedule: PipelineSchedule | ConventionalSchedule, engines: int, slots: int, G: int = 0
) -> RunPrediction:
    """With K = 1 and an unbounded stream, as in the formulas. Time is in flashes."""
    trainers = N if G else N - engines
    return simulate(
        Scenario(
            schedule=schedule,
            engines=engines,
            slots=slots,
            group_size=1,
            batch_size=CASE_BATCH,
            steps=max(2 * G, 300) // max(1, G) * max(1, G),
            costs=Costs(decode_step_s=tuple(CURVE.step_time(np.arange(slots + 1)).tolist()), train_token_s=TAU / trainers),
            workload=DrawnWorkload(uniform(CASE_LONGEST), 1, seed=0),
        )
    )


# ---- output


def draw(study: dict[str, Any], cases: Sequence[dict[str, Any]], G: int) -> Figure:
    figure = Figure(figsize=(11, 4.4), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
    for system, name in (("pipeline", "PipelineRL, best (H, I)"), ("conventional", "conventional RL, best G")):
        curve = [(row["max_lag"], row[system]) for row in study["formulas"]]
        (line,) = left.plot(*zip(*curve, strict=True), label=f"{name}: formulas")
        dots = [(row["max_lag"], row[system]) for row in study["simulated"]]
        left.plot(*zip(*dots, strict=True), "o", color=line.get_color(), label="... simulated")
        left.plot(study["paper"]["max_lag"], study["paper"][system], "kx", markersize=9, label="_")
    left.plot([], [], "kx", markersize=9, label="the paper's figures")
    left.set(xscale="log", xlabel="largest lag $g_{max}$, optimizer steps", ylabel="sampled tokens per flash")
    left.set_title("case study: N = 128 H100, B = 128, uniform lengths", fontsize=10)
    left.set_ylim(bottom=0)
    rows = [next(row for row in case["by_G"] if row["G"] == G) for case in cases]
    places = range(len(rows))[::-1]
    right.barh(places, [row["speed_up_any_lag"] for row in rows], color="tab:blue", alpha=0.3, label="at any lag")
    right.barh(places, [row["speed_up"] or 0.0 for row in rows], color="tab:blue", alpha=0.8, label="at equal lag")
    for place, row in zip(places, rows, strict=True):
        shown = f"{row['speed_up']:.2f}x" if row["speed_up"] else f"none as fresh; {row['speed_up_any_lag']:.2f}x"
        right.text(max(row["speed_up"] or 0.0, row["speed_up_any_lag"]), place, f" {shown}", va="center", fontsize=9)
    right.set_yticks(places, [case["label"] for case in cases], fontsize=9)
    right.axvline(1.0, color="k", linewidth=0.8)
    right.legend(edgecolor="none", framealpha=0.8, fontsize=8)
    right.set_xlabel(f"samples/s of PipelineRL over those of conventional RL, G = {G}")
    right.set_title(f"simulated: N = 128 H100, B = {BATCH}, mean length {MEAN}", fontsize=10)
    right.set_xlim(right=1.45 * max(row["speed_up_any_lag"] for row in rows))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend(edgecolor="none", framealpha=0.8, fontsize=8)
    return figure


def table(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for case in cases:
        row: dict[str, Any] = {"case": case["label"]}
        for at in case["by_G"]:
            row[f"G = {at['G']}"] = at["speed_up"]
        best = next(at for at in case["by_G"] if at["G"] == 32)
        row["any lag, over G = 32"] = best["speed_up_any_lag"]
        row["samples/s at G = 32"] = best["conventional"]["samples_per_s"]
        if best["pipeline"]:
            row |= {"pipeline samples/s": best["pipeline"]["samples_per_s"]}
            row |= {"H, I": f"{best['pipeline']['slots']}, {best['pipeline']['engines']}"}
            row |= {"lag p99": best["pipeline"]["lag_p99"], "lag mean": best["pipeline"]["lag_mean"]}
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2, help="simulations in parallel (2)")
    parser.add_argument("--out", type=Path, default=common.RESULTS / "paper-scale")
    options = parser.parse_args()
    with ProcessPoolExecutor(options.processes) as pool:
        study_later = pool.submit(case_study_curves)
        later = [(case, [pool.submit(run_point, point) for point in points(case)]) for case in CASES]
        paper_run_later = pool.submit(run_point, Point(BASE, 48, 64))
        cases = []
        for case, futures in later:
            results = [future.result() for future in futures]
            cases.append({"label": case.label, "case": asdict(case), "by_G": speed_ups(results), "simulated": results})
            print(common.markdown(table(cases[-1:])), flush=True)
        study, paper_run = study_later.result(), paper_run_later.result()
    settings = {"N": N, "B": BATCH, "K": GROUP, "mean_length": MEAN, "flash_s": FLASH_S, "tau_flashes": TAU}
    contents = {"settings": settings, "case_study": study, "cases": cases, "paper_configuration": paper_run}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "paper-scale.json").write_text(json.dumps(contents, indent=1) + "\n")
    (options.out / "paper-scale.png").write_bytes(png_of(draw(study, cases, G=32)))
    print(common.markdown(study["simulated"]))
    print(common.markdown(table(cases)))
    print(
        f"H = 64, I = 48, as in the paper's run: {paper_run['samples_per_s']:.0f} samples/s, lag p99 {paper_run['lag_p99']}"
    )
    print(f"\n{options.out}")


if __name__ == "__main__":
    main()
