"""`pipelinerl sweep`."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from pipelinerl.cli.parser import Commands, say, write
from pipelinerl.errors import PipelineRLError

_EPILOG = (
    "Every key of the run file is also a flag, and may have several values: --trainer.learning_rate 1e-4,3e-4 "
    "--actor.group_size 8,16 makes four settings. Commas in [lists], {mappings} and quoted text separate nothing."
)


def add_to(commands: Commands) -> None:
    text = (
        "Train with several settings and seeds, one run after another, and rank the settings. Without a run file: the demo."
    )
    flag = commands.add("sweep", text, _EPILOG, run=run).add_argument
    flag("run_file", nargs="?", type=Path, metavar="RUN.yaml", help="the run file")
    flag("--seeds", type=int, default=1, metavar="K", help="runs of each setting, each with a different seed (default: 1)")
    flag("--dry-run", action="store_true", help="check every setting, as `train --dry-run` does, without training")
    flag("-o", "--out", type=Path, metavar="DIR", help="a new folder, or one to continue (default: runs/sweep-DATE)")


def run(options: argparse.Namespace, settings: Sequence[str]) -> int:
    """Raises PipelineRLError if a run failed, once all others have ended."""
    from pipelinerl.experiments.sweep import FAILED, RESULTS_FILE, make_grid, section, sweep  # noqa: PLC0415 (and others)

    grid = make_grid(options.run_file, settings, options.seeds)
    if options.dry_run:
        from pipelinerl.launch.dry_run import dry_run  # noqa: PLC0415

        return write("".join("\n".join([f"{one.label}:", *dry_run(one.config), "\n"]) for one in grid.settings))
    from pipelinerl.report import count  # noqa: PLC0415
    from pipelinerl.report.sections import in_terminal  # noqa: PLC0415

    out: Path = options.out or Path("runs") / f"sweep-{time.strftime('%Y%m%d-%H%M%S')}"
    say(
        f"{count(len(grid.runs), 'run')}: {count(len(grid.settings), 'setting')}, {count(len(grid.seeds), 'seed')} each; to "
        f"continue after an interruption: the same command with --out {out}"
    )
    found = sweep(grid, out, say)
    best = found.settings[0]
    lines = [in_terminal(section(found))]
    if best.reward is not None:
        values = [f"--{key}={text}" for key, text in best.setting.items()]
        run_file = [] if options.run_file is None else [str(options.run_file)]
        lines.append(f"the best: {shlex.join(['pipelinerl', 'train', *run_file, *grid.fixed, *values])}\n")
    status = write("".join([*lines, f"{out / RESULTS_FILE}\n{out / 'report.html'}\n"]))
    failed = [run for setting in found.settings for run in setting.runs if run.status.startswith(FAILED)]
    if failed:
        raise PipelineRLError(
            f"{len(failed)} of {len(grid.runs)} runs failed; the same command with --out {out} tries them again. "
            f"{failed[0].folder} {failed[0].status}"
        )
    return status
