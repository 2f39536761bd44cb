"""`pipelinerl plan`, `calibrate` and `simulate`: the paper's formulas, and predictions of a run event by event."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pipelinerl.cli.parser import SETTINGS_HELP, Commands, at_least, config_of_run, refuse_settings, say, write
from pipelinerl.config.load import load_config
from pipelinerl.errors import UserError

if TYPE_CHECKING:
    from pipelinerl.config.schema import RunConfig
    from pipelinerl.experiments.planner.calibration import Calibration
    from pipelinerl.experiments.planner.scenario import Workload

CALIBRATION = Path("calibration.json")
_LENGTHS = "lengths of completions: uniform:L, a JSON file of length -> count, or a run directory"


def add_to(commands: Commands) -> None:
    text = "Throughput against lag of PipelineRL and conventional RL in the paper's case study, from its formulas."
    commands.add("plan", text, run=run_plan)

    text = (
        "Measure how long the steps of a run (default: the demo) take on this machine, for `pipelinerl "
        "simulate`. Takes under a minute for the demo."
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
    text = "simulate this run, and show its measurements next to the prediction"
    flag("--compare", type=Path, metavar="RUN_DIR", help=text)
    flag("--json", type=Path, metavar="FILE", help="write the whole prediction as JSON")


def run_plan(_options: argparse.Namespace, settings: Sequence[str]) -> int:
    refuse_settings("pipelinerl plan", settings)
    from pipelinerl.experiments.planner.paper import plan_text  # noqa: PLC0415 (loads numpy)

    return write(plan_text())


def run_calibrate(options: argparse.Namespace, settings: Sequence[str]) -> int:
    config = load_config(options.run_file, settings)
    from pipelinerl.experiments.planner.calibrate import calibrate  # noqa: PLC0415 (loads torch)
    from pipelinerl.experiments.planner.calibration import calibration_text, write_calibration  # noqa: PLC0415 (as above)

    calibration = calibrate(config, report=lambda text: say(f"{text} ..."))
    write_calibration(options.out, calibration)
    return write(calibration_text(calibration) + f"written to {options.out}\n")


def run_simulate(options: argparse.Namespace, settings: Sequence[str]) -> int:
    compared = options.compare if options.run_file is None else None
    config = load_config(config_of_run(compared) if compared else options.run_file, settings)
    from pipelinerl.experiments.planner.calibration import read_calibration  # noqa: PLC0415 (loads numpy)
    from pipelinerl.experiments.planner.scenario import (  # noqa: PLC0415 (as above)
        calibrated_costs,
        doubts,
        read_measured,
        run_scenario,
        shared_costs,
    )
    from pipelinerl.experiments.planner.simulate import comparison_text, prediction_text, simulate  # noqa: PLC0415 (as above)
    from pipelinerl.report import write_file  # noqa: PLC0415 (as above)

    calibration = read_calibration(options.calibration)
    measured = read_measured(options.compare, config) if options.compare else None
    workload, source = _workload(options, config, calibration)
    trainers = options.trainers or config.trainer.ranks
    costs = calibrated_costs(calibration, slots=config.engine.slots, trainers=trainers)
    if options.engines is None and options.trainers is None:
        costs = shared_costs(config, calibration, costs, workload)
    scenario = run_scenario(
        config,
        costs,
        workload,
        engines=options.engines,
        steps=measured.steps if measured else None,
    )
    try:
        prediction = simulate(scenario)
    except ValueError as error:
        raise UserError(f"this run would never end: {error}") from error
    if options.json:
        found = {"prediction": prediction, "measured": measured, "lengths": source, "doubts": doubts(config, calibration)}
        write_file(options.json, msgspec.json.encode(found) + b"\n")
    text = comparison_text(prediction, measured, str(options.compare)) if measured else prediction_text(prediction)
    notes = [f"lengths: {source}", *(f"doubtful: {doubt}" for doubt in doubts(config, calibration))]
    return write(text + "".join(f"{note}\n" for note in notes))


def _workload(options: argparse.Namespace, config: RunConfig, calibration: Calibration) -> tuple[Workload, str]:
    """The workload to simulate, and the source of its lengths as text."""
    from pipelinerl.experiments.planner.calibration import parse_lengths  # noqa: PLC0415 (loads numpy)
    from pipelinerl.experiments.planner.scenario import calibrated_workload, read_workload  # noqa: PLC0415 (as above)

    if options.lengths:
        drawn = calibrated_workload(calibration, config, seed=config.seed, lengths=parse_lengths(options.lengths))
        return drawn, options.lengths
    if options.compare:
        return read_workload(options.compare, config), f"each group's own, from {options.compare}"
    return calibrated_workload(calibration, config, seed=config.seed), "of the untrained model, from the calibration"
