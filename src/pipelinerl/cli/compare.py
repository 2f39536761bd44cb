"""`pipelinerl compare`."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipelinerl.cli.parser import SETTINGS_HELP, Commands, keyed_values, load, write
from pipelinerl.errors import UserError


def add_to(commands: Commands) -> None:
    parser = commands.add(
        "compare",
        "Compare schedules on this machine, each at its best settings. Without a run file: the demo.",
        SETTINGS_HELP,
    )
    parser.add_argument("run_file", nargs="?", type=Path, metavar="RUN.yaml", help="the run file")
    parser.add_argument(
        "--schedules", metavar="LIST", help="e.g. pipeline,conventional:1,conventional:4,async:2 (G after the colon)"
    )
    parser.add_argument(
        "--seeds", type=int, metavar="K", help="repetitions, each with a different seed (default: 2; with --quick 1)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer schedules, seeds, steps and settings: takes some minutes"
    )
    parser.add_argument("--no-tune", action="store_true", help="use only the run file's settings, without tuning")
    parser.add_argument(
        "--target",
        "--target-reward",
        dest="target",
        type=float,
        metavar="R",
        help="the reward to reach (default: chosen from the runs)",
    )
    parser.add_argument(
        "--held-out",
        type=int,
        metavar="N",
        help="held-out problems that decide when a run reached the target, answered later by copies of its weights "
        "(default: 512; with --quick 256); 0: training rewards decide, which depend on each schedule's lag",
    )
    parser.add_argument(
        "--evaluate-every",
        type=int,
        metavar="E",
        help="optimizer steps between these copies (default: a sixteenth of all steps)",
    )
    parser.add_argument(
        "--held-out-arg",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="value of environment.args for held-out problems only, e.g. to remove a delay; may be repeated",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="a new folder, or one to continue (default: runs/compare-DATE)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, settings: Sequence[str]) -> int:
    target: float | None = options.target
    if target is not None and not math.isfinite(target):
        raise UserError(f"--target: {target} is not a reward")
    config = load(options.run_file, settings)
    out: Path = options.out or Path("runs") / f"compare-{time.strftime('%Y%m%d-%H%M%S')}"
    from pipelinerl.experiments.compare.compare import compare  # noqa: PLC0415 (loads matplotlib)
    from pipelinerl.experiments.compare.request import make_request, this_machine  # noqa: PLC0415
    from pipelinerl.experiments.compare.runs import answer_held_out, check_held_out  # noqa: PLC0415
    from pipelinerl.launch import train  # noqa: PLC0415

    request = make_request(
        config,
        this_machine(),
        schedules=options.schedules,
        seeds=options.seeds,
        quick=options.quick,
        tune=not options.no_tune,
        held_out=options.held_out,
        evaluate_every=options.evaluate_every,
        held_out_args=keyed_values("--held-out-arg", options.held_out_arg),
    )
    check_held_out(request)
    print(f"results and runs: {out} (if stopped, the same command with --out {out} continues)", flush=True)
    contents = compare(
        request, out, train=train, evaluate=answer_held_out, target=target, say=lambda text: print(text, flush=True)
    )
    return write(_result_text(contents, out))


def _result_text(contents: dict[str, Any], out: Path) -> str:
    lines = [f"target: a {contents['reward']} reward of {contents['target_reward']}"]
    for key in ("ratio_time_to_reward", "ratio_samples_per_s"):
        ratio = contents[key]
        if ratio and ratio["median"] is not None:
            spread = f"{ratio['min']:.2f} to {ratio['max']:.2f}"
            lines.append(f"{key}: {ratio['median']:.2f} ({spread}) against {ratio['baseline']}; above 1, pipeline is faster")
        else:
            lines.append(f"{key}: - (see the report)")
    return "\n".join([*lines, f"{out / 'report.html'}", ""])
