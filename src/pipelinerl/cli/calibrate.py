"""`pipelinerl calibrate`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pipelinerl.cli.parser import SETTINGS_HELP, Commands, load, write

DEFAULT_OUTPUT = Path("calibration.json")


def add_to(commands: Commands) -> None:
    text = (
        "Measure how long the steps of a run (default: the demo) take on this machine, for `pipelinerl plan` and "
        "`pipelinerl simulate`. Takes under a minute for the demo."
    )
    parser = commands.add("calibrate", text, epilog=SETTINGS_HELP)
    parser.add_argument("run_file", nargs="?", type=Path, metavar="RUN.yaml", help="the run file")
    parser.add_argument(
        "--out", type=Path, default=DEFAULT_OUTPUT, metavar="FILE", help=f"output file (default: {DEFAULT_OUTPUT})"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, settings: Sequence[str]) -> int:
    config = load(options.run_file, settings)
    from pipelinerl.experiments.planner.calibrate import calibrate  # noqa: PLC0415 (loads torch)
    from pipelinerl.experiments.planner.calibration import write_calibration  # noqa: PLC0415 (as above)
    from pipelinerl.experiments.planner.table import calibration_text  # noqa: PLC0415 (as above)

    calibration = calibrate(config, report=lambda text: print(f"{text} ...", file=sys.stderr, flush=True))
    write_calibration(options.out, calibration)
    return write(calibration_text(calibration) + f"written to {options.out}\n")
