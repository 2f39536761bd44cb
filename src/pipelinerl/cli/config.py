"""`pipelinerl config`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from pipelinerl.cli.parser import SETTINGS_HELP, Commands, load, write
from pipelinerl.config import render


def add_to(commands: Commands) -> None:
    text = "Print the resolved configuration, with the documentation of every key."
    parser = commands.add("config", text, epilog=SETTINGS_HELP)
    parser.add_argument("run_file", nargs="?", type=Path, metavar="RUN.yaml", help="the run file (none: the demo's)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, settings: Sequence[str]) -> int:
    return write(render(load(options.run_file, settings)))
