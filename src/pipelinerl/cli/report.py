"""`pipelinerl report`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from pipelinerl.cli.parser import Commands, refuse_settings, write


def add_to(commands: Commands) -> None:
    parser = commands.add("report", "Write the figures and numbers of one or more runs to a self-contained HTML page.")
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR", help="a run directory")
    parser.add_argument(
        "--out", type=Path, metavar="FILE.html", help="output file (default: report.html in the first run directory)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, settings: Sequence[str]) -> int:
    refuse_settings("pipelinerl report", settings)
    from pipelinerl.report import write_file  # noqa: PLC0415 (with the others)
    from pipelinerl.report.run_report import report_page  # noqa: PLC0415

    run_dirs: list[Path] = options.run_dirs
    out: Path = options.out or run_dirs[0] / "report.html"
    write_file(out, report_page(run_dirs).encode())
    return write(f"{out}\n")
