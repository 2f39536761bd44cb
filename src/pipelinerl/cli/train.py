"""`pipelinerl train`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from pipelinerl.cli.parser import SETTINGS_HELP, Commands, load, write
from pipelinerl.errors import RunDirectoryError, UserError


def add_to(commands: Commands) -> None:
    parser = commands.add("train", "Train a model. Without a run file: the built-in demo.", epilog=SETTINGS_HELP)
    parser.add_argument("run_file", nargs="?", type=Path, metavar="RUN.yaml", help="the run file")
    parser.add_argument("--resume", type=Path, metavar="RUN_DIR", help="continue a run from its last checkpoint")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check settings, memory, and the environment (with an empty answer) without training",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, settings: Sequence[str]) -> int:
    run_file: Path | None = options.run_file
    if options.resume is not None:
        run_file = _config_of_run(run_file, options.resume)
    config = load(run_file, settings)
    if options.dry_run:
        from pipelinerl.launch.dry_run import dry_run  # noqa: PLC0415 - as below

        return write("\n".join(dry_run(config)) + "\n")
    from pipelinerl.launch import train  # noqa: PLC0415 (loads torch: after the checks above)

    train(config, resume=options.resume)
    return 0


def _config_of_run(run_file: Path | None, run_dir: Path) -> Path:
    if run_file is not None:
        raise UserError(f"--resume takes the configuration from {run_dir / 'config.yaml'}; leave out {run_file}")
    config = run_dir / "config.yaml"
    if not config.is_file():
        raise RunDirectoryError(f"can't resume {run_dir}: it is not a run directory (there is no {config})")
    return config
