"""`pipelinerl train`: a run, new or resumed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from pipelinerl.cli.parser import PORTS, SETTINGS_HELP, Commands, write
from pipelinerl.config.load import load_config
from pipelinerl.errors import UserError


def add_to(commands: Commands) -> None:
    text = "Train a model. Without a run file: the built-in demo."
    flag = commands.add("train", text, SETTINGS_HELP, run=run_train).add_argument
    flag("run_file", nargs="?", type=Path, metavar="RUN.yaml", help="the run file")
    flag("--resume", type=Path, metavar="RUN_DIR", help="continue a run from its last checkpoint")
    text = "check the settings, the memory, and the environment (with an empty answer), without training"
    flag("--dry-run", action="store_true", help=text)
    flag("--verbose", action="store_true", help="more rows in the table at the end (--metrics.verbose)")
    flag("--watch", action="store_true", help="also show the run in a browser, until it ends (see `pipelinerl watch`)")
    flag(
        "--watch-port",
        type=PORTS,
        metavar="PORT",
        help="port of that page, 0: any free port (default: 7117)",
    )


def run_train(options: argparse.Namespace, settings: Sequence[str]) -> int:
    run_file: Path | None = options.run_file
    if options.resume is not None and run_file is not None:
        raise UserError(f"--resume takes the configuration from {options.resume / 'config.yaml'}; leave out {run_file}")
    if options.watch_port is not None and not options.watch:
        raise UserError("--watch-port needs --watch")
    settings = [*settings, *(["--metrics.verbose"] if options.verbose else [])]
    if options.resume is None:
        config = load_config(run_file, settings)
    else:
        from pipelinerl.launch.resume import resumed_config  # noqa: PLC0415 - few commands resume

        config = resumed_config(options.resume, settings)
    if options.dry_run:
        from pipelinerl.launch.checks import dry_run  # noqa: PLC0415 - as below

        return write("\n".join(dry_run(config)) + "\n")
    from pipelinerl.launch.run import train  # noqa: PLC0415 - it is not needed for --help

    if not options.watch:
        train(config, resume=options.resume)
        return 0
    from pipelinerl.cli.watch import PORT, page_beside  # noqa: PLC0415 - few runs have a page

    with closing(page_beside(PORT if options.watch_port is None else options.watch_port)) as page:
        train(config, resume=options.resume, began=page.begin)
    return 0
