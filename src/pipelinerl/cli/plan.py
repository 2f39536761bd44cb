"""`pipelinerl plan`, `calibrate` and `simulate`: predictions of a run, from formulas or event by event."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pipelinerl.cli.parser import SETTINGS_HELP, Commands, at_least, config_of_run, say, write
from pipelinerl.config.load import load_config
from pipelinerl.errors import UserError

if TYPE_CHECKING:
    from pipelinerl.config.schema import RunConfig
    from pipelinerl.experiments.planner.calibration import Calibration
    from pipelinerl.experiments.planner.plan import Flags
    from pipelinerl.experiments.planner.simulation.run import Prediction
    from pipelinerl.experiments.planner.simulation.scenario import Scenario, Workload

CALIBRATION = Path("calibration.json")
_LENGTHS = "lengths of completions: uniform:L, a JSON file of length -> count, or a run directory"


def _add_cluster(flag: Callable[..., object]) -> None:
    text = "predict from data sheets: qwen2.5-1.5b, qwen2.5-7b, qwen2.5-32b, qwen3-235b-a22b, or a model's config.json"
    flag("--shape", metavar="MODEL", help=text)
    flag("--network", type=float, metavar="GB/S", help="--shape: between machines, for each accelerator (default: 50)")
    flag("--prompt-tokens", type=float, metavar="P", help="--shape: mean length of prompts (default: 256)")
    text = "--shape: coefficient of variation of the ranks' step times, and of the engines' speeds (default: 0.03)"
    flag("--stragglers", type=float, metavar="X", help=text)


def add_to(commands: Commands) -> None:
    text = (
        "Find the number of generating accelerators and slots with the highest throughput, and compare it with conventional "
        "RL at equal lag. Without arguments: the paper's case study."
    )
    flag = commands.add("plan", text, SETTINGS_HELP, run=run_plan).add_argument
    flag("run_file", nargs="?", type=Path, metavar="RUN.yaml", help="plan for this run file")
    flag("--accelerators", type=int, metavar="N", help="accelerators, or processes on a CPU")
    flag("--hardware", metavar="NAME", help="h100, h200, or the .json file that `pipelinerl calibrate` wrote")
    flag("--conventional", metavar="FILE", help="calibration with schedule.kind conventional: the baseline's own costs")
    text = "the model's parameters, e.g. 7.6e9 or 7B (h100, h200)"
    flag("--model-params", "--model-size", type=_amount, metavar="P", help=text)
    text = "bytes of KV cache per token, to compute its share of U(h) exactly (h100, h200)"
    flag("--kv-bytes-per-token", type=float, metavar="BYTES", help=text)
    flag("--batch", type=int, metavar="B", help="rollouts per optimizer step")
    flag("--lengths", metavar="WHAT", help=_LENGTHS)
    flag("--mfu", type=float, metavar="X", help="model FLOPs utilisation of training, 0 to 1 (h100, h200)")
    flag("--tau", type=float, metavar="T", help="training time per token, in flashes (calibration: seconds)")
    flag("--max-lag", type=int, metavar="G", help="largest lag g_max, in optimizer steps")
    _add_cluster(flag)
    flag("--figure", type=Path, metavar="PNG", help="draw throughput against lag")
    flag("--json", type=Path, metavar="FILE", help="write the plan as JSON")

    text = (
        "Measure how long the steps of a run (default: the demo) take on this machine, for `pipelinerl plan` and "
        "`pipelinerl simulate`. Takes under a minute for the demo."
    )
    flag = commands.add("calibrate", text, SETTINGS_HELP, run=run_calibrate).add_argument
    flag("run_file", nargs="?", type=Path, metavar="RUN.yaml", help="the run file")
    flag("-o", "--out", type=Path, default=CALIBRATION, metavar="FILE", help=f"output file (default: {CALIBRATION})")

    text = (
        "Predict a run (default: the demo) by discrete-event simulation, from the calibration of a machine. With --compare: "
        "simulate a past run, and compare with what it measured."
    )
    flag = commands.add("simulate", text, SETTINGS_HELP, run=run_simulate).add_argument
    flag("run_file", nargs="?", type=Path, metavar="RUN.yaml", help="the run file")
    text = f"the file that `pipelinerl calibrate` wrote (default: {CALIBRATION})"
    flag("--calibration", type=Path, default=CALIBRATION, metavar="FILE", help=text)
    text = (
        "number of engines with `engine.slots` slots, each on cores of its own (default: engine.processes, which share the "
        "calibrated machine)"
    )
    flag("--engines", type=at_least(1), metavar="I", help=text)
    text = "number of ranks that share each batch, likewise (default: trainer.ranks)"
    flag("--trainers", type=at_least(1), metavar="T", help=text)
    flag("--lengths", metavar="WHAT", help=_LENGTHS)
    _add_cluster(flag)
    flag("--hardware", metavar="NAME", help="--shape: h100 or h200 (default: h100)")
    flag("--devices", type=at_least(1), default=1, metavar="D", help="--shape: accelerators of each engine (default: 1)")
    flag("--mfu", type=float, metavar="X", help="--shape: model FLOPs utilisation of training (default: 0.4)")
    text = "simulate this run, and show its measurements next to the prediction"
    flag("--compare", type=Path, metavar="RUN_DIR", help=text)
    flag("--json", type=Path, metavar="FILE", help="write the whole prediction as JSON")


def run_plan(options: argparse.Namespace, settings: Sequence[str]) -> int:
    config = load_config(options.run_file, settings) if options.run_file or settings else None
    from pipelinerl.experiments.planner.plan import Flags, ask, calibration_of, make_plan, plan_json  # noqa: PLC0415 (numpy)
    from pipelinerl.experiments.planner.simulation.scenario import doubts  # noqa: PLC0415 (as above)
    from pipelinerl.experiments.planner.table import plan_text  # noqa: PLC0415 (as above)
    from pipelinerl.report import write_file  # noqa: PLC0415 (as above)

    flags = Flags(**{field.name: getattr(options, field.name) for field in fields(Flags)})
    if flags.shape is not None:
        return _plan_cluster(options, config, flags)
    plan = make_plan(ask(config, flags))
    if options.figure:
        from pipelinerl.experiments.planner.table import draw_plan  # noqa: PLC0415 (loads matplotlib)

        draw_plan(plan, options.figure)
    if options.json:
        write_file(options.json, plan_json(plan) + b"\n")
    calibration = calibration_of(flags)
    notes = doubts(config, calibration) if config and calibration else []
    return write(plan_text(plan, config) + "".join(f"doubtful: {note}\n" for note in notes))


def _plan_cluster(options: argparse.Namespace, config: RunConfig | None, flags: Flags) -> int:
    from pipelinerl.experiments.planner.cluster import (  # noqa: PLC0415 (loads numpy)
        ask_cluster,
        scaled_json,
        scaled_plan,
        scaled_text,
    )
    from pipelinerl.report import write_file  # noqa: PLC0415 (as above)

    if options.figure:
        raise UserError("--figure draws throughput against lag, which --shape does not compute; give --json FILE")
    plan = scaled_plan(ask_cluster(config, flags))
    if options.json:
        write_file(options.json, scaled_json(plan) + b"\n")
    return write(scaled_text(plan))


def _amount(text: str) -> float:
    """Parse `7.6e9`, `7B` or `135M`. Raises ValueError."""
    scales = {"K": 1e3, "M": 1e6, "B": 1e9}
    scale = scales.get(text[-1:].upper(), 1.0)
    amount = float(text[:-1] if scale > 1 else text) * scale
    if not 0 < amount < float("inf"):
        raise ValueError(text)
    return amount


def run_calibrate(options: argparse.Namespace, settings: Sequence[str]) -> int:
    config = load_config(options.run_file, settings)
    from pipelinerl.experiments.planner.calibrate import calibrate  # noqa: PLC0415 (loads torch)
    from pipelinerl.experiments.planner.calibration import write_calibration  # noqa: PLC0415 (as above)
    from pipelinerl.experiments.planner.table import calibration_text  # noqa: PLC0415 (as above)

    calibration = calibrate(config, report=lambda text: say(f"{text} ..."))
    write_calibration(options.out, calibration)
    return write(calibration_text(calibration) + f"written to {options.out}\n")


def run_simulate(options: argparse.Namespace, settings: Sequence[str]) -> int:
    compared = options.compare if options.run_file is None else None
    config = load_config(config_of_run(compared) if compared else options.run_file, settings)
    if options.shape is not None:
        return _simulate_cluster(options, config)
    from pipelinerl.experiments.planner.calibration import read_calibration  # noqa: PLC0415 (loads numpy)
    from pipelinerl.experiments.planner.simulation.scenario import (  # noqa: PLC0415 (as above)
        calibrated_costs,
        doubts,
        read_measured,
        run_scenario,
        shared_costs,
    )
    from pipelinerl.experiments.planner.table import comparison_text, prediction_text  # noqa: PLC0415 (as above)
    from pipelinerl.report import write_file  # noqa: PLC0415 (as above)

    calibration = read_calibration(options.calibration)
    measured = read_measured(options.compare, config) if options.compare else None
    workload, source = _workload(options, config, calibration)
    trainers = options.trainers or config.trainer.ranks
    costs = calibrated_costs(calibration, slots=config.engine.slots, group_size=config.actor.group_size, trainers=trainers)
    if options.engines is None and options.trainers is None:
        costs = shared_costs(config, calibration, costs, workload)
    scenario = run_scenario(
        config,
        costs,
        workload,
        engines=options.engines,
        steps=measured.steps if measured else None,
    )
    prediction = _simulated(scenario)
    if options.json:
        found = {"prediction": prediction, "measured": measured, "lengths": source, "doubts": doubts(config, calibration)}
        write_file(options.json, msgspec.json.encode(found) + b"\n")
    text = comparison_text(prediction, measured, str(options.compare)) if measured else prediction_text(prediction)
    notes = [f"lengths: {source}", *(f"doubtful: {doubt}" for doubt in doubts(config, calibration))]
    return write(text + "".join(f"{note}\n" for note in notes))


def _simulate_cluster(options: argparse.Namespace, config: RunConfig) -> int:
    from pipelinerl.experiments.planner.cluster import ask_cluster, cluster_scenario  # noqa: PLC0415 (loads numpy)
    from pipelinerl.experiments.planner.plan import Flags  # noqa: PLC0415 (as above)
    from pipelinerl.experiments.planner.table import prediction_text  # noqa: PLC0415 (as above)
    from pipelinerl.report import write_file  # noqa: PLC0415 (as above)

    if options.compare:
        raise UserError("--compare needs the calibration of the run's machine; remove --shape")
    names = ("shape", "hardware", "network", "prompt_tokens", "stragglers", "mfu", "lengths")
    question = ask_cluster(config, Flags(**{name: getattr(options, name) for name in names}))
    prediction = _simulated(
        cluster_scenario(config, question, devices=options.devices, engines=options.engines, ranks=options.trainers)
    )
    if options.json:
        write_file(options.json, msgspec.json.encode({"prediction": prediction}) + b"\n")
    return write(prediction_text(prediction) + "Predicted from data sheets.\n")


def _simulated(scenario: Scenario) -> Prediction:
    """Raises UserError if the run would never end."""
    from pipelinerl.experiments.planner.simulation.run import simulate  # noqa: PLC0415 (loads numpy)

    try:
        return simulate(scenario)
    except ValueError as error:
        raise UserError(f"this run would never end: {error}") from error


def _workload(options: argparse.Namespace, config: RunConfig, calibration: Calibration) -> tuple[Workload, str]:
    """The workload to simulate, and the source of its lengths as text."""
    from pipelinerl.experiments.planner.analytic import parse_lengths  # noqa: PLC0415 (loads numpy)
    from pipelinerl.experiments.planner.simulation.scenario import calibrated_workload, read_workload  # noqa: PLC0415 (as above)

    if options.lengths:
        drawn = calibrated_workload(calibration, config, seed=config.seed, lengths=parse_lengths(options.lengths))
        return drawn, options.lengths
    if options.compare:
        return read_workload(options.compare, config), f"each group's own, from {options.compare}"
    return calibrated_workload(calibration, config, seed=config.seed), "of the untrained model, from the calibration"
