"""Predicted rates on 8 to 4,096 H100 for models of 1.5B, 7B, 32B and 235B-A22B, and the paper's 128 as a check.

    python -m benchmarks.scaling       # about 4 minutes; writes results/scaling/; the machine's speed does not matter

All of it follows from data sheets and assumptions (`experiments/planner/scaling.py`, docs/planner.md): nothing was measured.
Lengths are long-tailed (lognormal, sigma 1, mean 2048, cut at 8192), prompts have 256 tokens, K = 8. A pipeline's lag is at
most 31 steps, which is that of conventional RL at G = 32. B is 8 rollouts for each accelerator (1024 at the paper's 128), or
1024 at every size.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.common import Record
from benchmarks.paper_scale import PAPER_POINT, lengths_of
from pipelinerl.experiments.planner.analytic import PAPER_TAU, LengthDistribution, flash_s
from pipelinerl.experiments.planner.hardware import CLUSTERS, QWEN_7B, QWEN_32B, QWEN_235B, SHAPES, ModelShape
from pipelinerl.experiments.planner.scaling import (
    Question,
    Rollouts,
    ScaledConventional,
    ScaledPipeline,
    Training,
    Updates,
    best_conventional,
    best_pipeline,
    bounds,
    conventional_at,
    pipeline_at,
    simulated_costs,
    update_cost,
)
from pipelinerl.experiments.planner.simulation.run import simulate
from pipelinerl.experiments.planner.simulation.scenario import DrawnWorkload, Scenario
from pipelinerl.rounds import ConventionalSchedule
from pipelinerl.schedule import PipelineSchedule

CLUSTER = CLUSTERS["h100"]
SIZES = tuple(2**power for power in range(3, 13))
MAX_LAG = 31
PER_ACCELERATOR, FIXED = 8, 1024
LENGTHS = lengths_of("long-tailed")
BETTER_UPDATES = Updates(encoding="delta", sharded=True)
SIMULATED = tuple((name, 256) for name in SHAPES)
PUBLISHED = (
    (QWEN_7B, Updates(), "verl, nccl", "5.5 to 6"),
    (QWEN_32B, Updates(), "verl, nccl", "14 to 18"),
    (QWEN_235B, Updates(), "SkyRL, nccl", "64.7"),
    (QWEN_235B, Updates(), "verl, nccl", "246 to 266"),
    (QWEN_235B, Updates(sharded=True), "SkyRL, sharded_rdt", "3.5"),
    (QWEN_235B, Updates(encoding="delta", sharded=True), "verl, delta_sharded", "11.4 to 14.9"),
)
"""Measured by others (their documentation and pull requests), on other numbers of accelerators and other networks."""


def question(shape: ModelShape, accelerators: int, batch: int, **changes: Any) -> Question:
    rollouts = Rollouts(lengths=LENGTHS, batch_size=batch)
    asked = Question(shape=shape, cluster=CLUSTER, rollouts=rollouts, accelerators=accelerators, max_lag=MAX_LAG)
    return replace(asked, **changes)


def point(shape: ModelShape, accelerators: int, batch: int) -> Record:
    asked = question(shape, accelerators, batch)
    pipeline, conventional = best_pipeline(asked), best_conventional(asked)
    better = replace(asked, updates=BETTER_UPDATES)
    others = best_pipeline(better), best_conventional(better)
    row: Record = {"model": shape.name, "accelerators": accelerators, "B": batch}
    if conventional is not None:
        row["conventional"] = asdict(conventional)
    if pipeline is None or conventional is None or others[0] is None or others[1] is None:
        return row
    return row | {
        "pipeline": asdict(pipeline)
        | {"rate": pipeline.rate, "generating": pipeline.generating, "update_s": pipeline.update.s},
        "speed_up": pipeline.rate / conventional.rate,
        "speed_up_better_updates": others[0].rate / others[1].rate,
        "rate_better_updates": others[0].rate,
        "bounds": bounds(asked),
    }


def row_of(found: Record) -> Record:
    """A row of the printed table."""
    row: Record = {"model": found["model"], "N": found["accelerators"], "B": found["B"]}
    if "pipeline" not in found:
        return row | {"samples/s": None, "bound by": "memory: the training state and engines do not fit"}
    pipeline, conventional = found["pipeline"], found["conventional"]
    first = [f"{name} {gain:.2f}" for name, gain in found["bounds"].items() if gain >= 0.1][:3]
    return row | {
        "samples/s": pipeline["rate"],
        "generate + train": f"{pipeline['generating']} + {pipeline['ranks']}",
        "engines x devices, H": f"{pipeline['engines']} x {pipeline['devices']}, {pipeline['slots']}",
        "lag": pipeline["max_lag"],
        "step s": pipeline["step"]["compute_s"]
        + pipeline["step"]["idle_s"]
        + pipeline["step"]["exposed_s"]
        + pipeline["step"]["straggler_s"],
        "update s": pipeline["update_s"],
        "conventional samples/s": conventional["rate"],
        "speed-up": found["speed_up"],
        "with sharded deltas": found["speed_up_better_updates"],
        "bound by": ", ".join(first),
    }


# ---- the simulation of the same points


def simulated(shape: ModelShape, accelerators: int) -> Record:
    batch = PER_ACCELERATOR * accelerators
    asked = question(shape, accelerators, batch)
    pipeline, conventional = best_pipeline(asked), best_conventional(asked)
    assert pipeline is not None
    assert conventional is not None
    rates = {}
    for name, found in (("pipeline", pipeline), ("conventional", conventional)):
        prediction = simulate(scenario(asked, found))
        rates[name] = {
            "formulas": found.rate,
            "simulated": prediction.samples_per_s_later,
            "lag_p99": prediction.lag_p99,
            "lag_mean": prediction.lag_mean,
            "trainer_busy": prediction.trainer_busy_fraction,
        }
    speed_up = rates["pipeline"]["simulated"] / rates["conventional"]["simulated"]
    return {"model": shape.name, "accelerators": accelerators, "B": batch, **rates, "speed_up": speed_up}


def scenario(asked: Question, found: ScaledPipeline | ScaledConventional) -> Scenario:
    batch, pipelined = asked.rollouts.batch_size, isinstance(found, ScaledPipeline)
    G = MAX_LAG + 1
    slots = found.slots if isinstance(found, ScaledPipeline) else -(-batch * G // found.engines)
    ranks = found.ranks if isinstance(found, ScaledPipeline) else asked.accelerators
    costs, stragglers = simulated_costs(asked, devices=found.devices, engines=found.engines, ranks=ranks, slots=slots)
    workload = DrawnWorkload(LENGTHS, asked.rollouts.group_size, seed=0, prompt_tokens=asked.rollouts.prompt_tokens)
    return Scenario(
        schedule=PipelineSchedule(batch, stock=2 * batch) if pipelined else ConventionalSchedule(batch, G),
        engines=found.engines,
        slots=slots,
        group_size=asked.rollouts.group_size,
        batch_size=batch,
        steps=64,
        costs=costs,
        workload=workload,
        stragglers=stragglers,
    )


# ---- checks


def case_study() -> list[Record]:
    """The paper's case study in tokens per flash: B = 128, lengths uniform up to 8192, lag 133. Updates are free."""
    free = replace(CLUSTER, host_bandwidth=1e18, between=replace(CLUSTER.between, bandwidth=1e18))
    rollouts = Rollouts(lengths=LengthDistribution.uniform(8192), batch_size=128, group_size=1, prompt_tokens=0)
    asked = Question(
        shape=QWEN_7B,
        cluster=free,
        rollouts=rollouts,
        accelerators=128,
        max_lag=PAPER_POINT["max_lag"],
        training=Training(mfu=3 / PAPER_TAU, straggler_cv=0),
    )
    per_flash = rollouts.mean * flash_s(QWEN_7B.parameters, CLUSTER.accelerator.peak_flops)
    conventional = conventional_at(asked, devices=1, steps_per_round=PAPER_POINT["max_lag"] + 1)
    same, best = pipeline_at(asked, devices=1, engines=44), best_pipeline(asked)
    assert same is not None
    assert conventional is not None
    assert best is not None
    any_engine = best_conventional(asked)
    assert any_engine is not None
    rows: list[Record] = [{"": "paper, H = 192, I = 44", **{k: v for k, v in PAPER_POINT.items() if k != "max_lag"}}]
    for name, pipeline, other in (
        (f"data sheets, I = 44, H = {same.slots}", same, conventional),
        (f"data sheets, best: {best.engines} x {best.devices}, H = {best.slots}", best, any_engine),
    ):
        rates = {"pipeline": pipeline.rate * per_flash, "conventional": other.rate * per_flash}
        rows.append({"": name, **rates, "speed_up": pipeline.rate / other.rate})
    return rows


def main_run() -> list[Record]:
    """The paper's main run: B = 1024, 48 accelerators generate with H = 64, 80 train; about 2x conventional RL at G = 32."""
    rows: list[Record] = [{"": "paper: 48 + 80, H = 64", "speed-up": "about 2"}]
    for lengths in ("long-tailed", "uniform"):
        rollouts = Rollouts(lengths=lengths_of(lengths), batch_size=1024)
        asked = question(QWEN_7B, 128, 1024, rollouts=rollouts)
        conventional = best_conventional(asked)
        single = conventional_at(asked, devices=1, steps_per_round=MAX_LAG + 1)
        best = best_pipeline(asked)
        theirs = pipeline_at(asked, devices=1, engines=48, slots=64)
        assert conventional is not None
        assert single is not None
        for name, found in (("48 + 80, H = 64", theirs), ("best", best)):
            assert found is not None
            rows.append(
                {
                    "": f"{lengths} lengths, {name}: {found.engines} x {found.devices}, H {found.slots}, T {found.ranks}",
                    "samples/s": found.rate,
                    "lag": found.max_lag,
                    "conventional samples/s": conventional.rate,
                    "speed-up": found.rate / conventional.rate,
                    "over conventional RL on engines of one": found.rate / single.rate,
                }
            )
    return rows


def updates() -> list[Record]:
    """Predicted times of an update on 16 ranks and 2 engines of 8, beside published measurements."""
    rows = []
    for shape, kind, who, published in PUBLISHED:
        cost = update_cost(shape, CLUSTER, kind, ranks=16, engines=2, devices=8)
        rows.append({"model": shape.name, "published by": who, "published s": published, "predicted s": cost.s})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=common.RESULTS / "scaling")
    parser.add_argument("--no-simulation", action="store_true", help="formulas only")
    options = parser.parse_args()
    found: dict[str, Sequence[Record]] = {
        name: [
            point(shape, N, FIXED if name == "B = 1024" else PER_ACCELERATOR * N) for shape in SHAPES.values() for N in SIZES
        ]
        for name in ("B = 8 N", "B = 1024")
    }
    found |= {"case study": case_study(), "main run": main_run(), "updates": updates()}
    for name, records in found.items():
        print(f"\n{name}\n\n{common.markdown([row_of(one) if 'accelerators' in one else one for one in records])}")
    if not options.no_simulation:
        found["simulated"] = [simulated(SHAPES[name], N) for name, N in SIMULATED]
        shown = [
            {
                "model": one["model"],
                "N": one["accelerators"],
                **{
                    f"{method}: {of}": one[method][of]
                    for method in ("pipeline", "conventional")
                    for of in ("formulas", "simulated")
                },
                "speed-up": one["speed_up"],
                "lag p99": one["pipeline"]["lag_p99"],
            }
            for one in found["simulated"]
        ]
        print(f"\nsimulated\n\n{common.markdown(shown)}")
    settings = {"cluster": asdict(CLUSTER), "training": asdict(Training()), "max_lag": MAX_LAG, "length_mean": LENGTHS.mean}
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "scaling.json"
    path.write_text(json.dumps({"name": "scaling", "settings": settings, **found}, indent=1) + "\n")
    print(f"\n{path}")


if __name__ == "__main__":
    main()
