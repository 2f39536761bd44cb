"""`pipelinerl simulate`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipelinerl.cli.parser import SETTINGS_HELP, Commands, load, write
from pipelinerl.errors import RunDirectoryError, UserError

if TYPE_CHECKING:
    from pipelinerl.config import RunConfig
    from pipelinerl.experiments.planner.calibration import Calibration
    from pipelinerl.experiments.planner.simulation import Workload

DEFAULT_CALIBRATION = Path("calibration.json")


def add_to(commands: Commands) -> None:
    text = (
        "Predict a run (default: the demo) by discrete-event simulation, from the calibration of a machine. With --compare: "
        "simulate a past run, and compare with what it measured."
    )
    parser = commands.add("simulate", text, epilog=SETTINGS_HELP)
    parser.add_argument("run_file", nargs="?", type=Path, metavar="RUN.yaml", help="the run file")
    parser.add_argument(
        "--calibration",
        type=Path,
        default=DEFAULT_CALIBRATION,
        metavar="FILE",
        help=f"the file that `pipelinerl calibrate` wrote (default: {DEFAULT_CALIBRATION})",
    )
    parser.add_argument(
        "--engines",
        type=int,
        metavar="I",
        help="number of engines, each with `engine.slots` slots (default: engine.processes)",
    )
    parser.add_argument(
        "--trainers", type=int, default=1, metavar="T", help="number of trainers that share each batch (default: 1)"
    )
    parser.add_argument("--lengths", metavar="WHAT", help="uniform:L, a JSON file of length -> count, or a run directory")
    parser.add_argument(
        "--compare", type=Path, metavar="RUN_DIR", help="simulate this run, and show its measurements next to the prediction"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the whole prediction as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, settings: Sequence[str]) -> int:
    _check(options)
    config = load(_run_file(options), settings)
    from pipelinerl.experiments.planner.calibration import read_calibration  # noqa: PLC0415 (loads numpy)
    from pipelinerl.experiments.planner.simulation import simulate  # noqa: PLC0415 (as above)
    from pipelinerl.experiments.planner.simulation.scenario import (  # noqa: PLC0415 (as above)
        calibrated_costs,
        doubts,
        read_measured,
        run_scenario,
    )
    from pipelinerl.experiments.planner.table import comparison_text, prediction_text  # noqa: PLC0415 (as above)
    from pipelinerl.launch.stages.streams import stream_capacity  # noqa: PLC0415 (as above)

    calibration = read_calibration(options.calibration)
    measured = read_measured(options.compare, config) if options.compare else None
    workload, source = _workload(options, config, calibration)
    slots, group_size = config.engine.slots, config.actor.group_size
    scenario = run_scenario(
        config,
        calibrated_costs(calibration, slots=slots, group_size=group_size, trainers=options.trainers),
        workload,
        capacity=stream_capacity(config),
        engines=options.engines,
        steps=measured.steps if measured else None,
    )
    try:
        prediction = simulate(scenario)
    except ValueError as error:
        raise UserError(f"this run would never end: {error}") from error
    if options.json:
        _write_json(
            options.json,
            {"prediction": prediction, "measured": measured, "lengths": source, "doubts": doubts(config, calibration)},
        )
    text = comparison_text(prediction, measured, str(options.compare)) if measured else prediction_text(prediction)
    notes = [f"lengths: {source}", *(f"doubtful: {doubt}" for doubt in doubts(config, calibration))]
    return write(text + "".join(f"{note}\n" for note in notes))


def _check(options: argparse.Namespace) -> None:
    for name in ("engines", "trainers"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name} {value}: give at least 1")


def _run_file(options: argparse.Namespace) -> Path | None:
    """The given run file, or that of the run to compare with."""
    if options.run_file is not None or options.compare is None:
        run_file: Path | None = options.run_file
        return run_file
    recorded: Path = options.compare / "config.yaml"
    if not recorded.is_file():
        raise RunDirectoryError(f"{options.compare} is not a run directory (it has no config.yaml)")
    return recorded


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


def _write_json(path: Path, value: object) -> None:
    import msgspec  # noqa: PLC0415 (with the others)

    from pipelinerl.report import write_file  # noqa: PLC0415 (as above)

    write_file(path, msgspec.json.encode(value) + b"\n")
