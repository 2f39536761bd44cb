"""`pipelinerl plan`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from pipelinerl.cli.parser import SETTINGS_HELP, Commands, load, write

_FLAGS = (
    "accelerators",
    "hardware",
    "conventional",
    "model_params",
    "kv_bytes_per_token",
    "batch",
    "lengths",
    "mfu",
    "tau",
    "max_lag",
)


def add_to(commands: Commands) -> None:
    text = (
        "Find the fastest split of accelerators and number of slots, and compare it with conventional RL at equal lag. "
        "Without arguments: the paper's case study."
    )
    parser = commands.add("plan", text, epilog=SETTINGS_HELP)
    parser.add_argument("run_file", nargs="?", type=Path, metavar="RUN.yaml", help="plan for this run file")
    parser.add_argument("--accelerators", type=int, metavar="N", help="accelerators, or processes on a CPU")
    parser.add_argument("--hardware", metavar="NAME", help="h100, h200, or the .json file that `pipelinerl calibrate` wrote")
    parser.add_argument(
        "--conventional", metavar="FILE", help="calibration with schedule.kind conventional: the baseline's own costs"
    )
    parser.add_argument(
        "--model-params",
        "--model-size",
        type=_amount,
        metavar="P",
        help="the model's parameters, e.g. 7.6e9 or 7B (h100, h200)",
    )
    parser.add_argument(
        "--kv-bytes-per-token",
        type=float,
        metavar="BYTES",
        help="bytes of KV cache per token, to count it exactly in U(h) (h100, h200)",
    )
    parser.add_argument("--batch", type=int, metavar="B", help="rollouts per optimizer step")
    parser.add_argument("--lengths", metavar="WHAT", help="uniform:L, a JSON file of length -> count, or a run directory")
    parser.add_argument("--mfu", type=float, metavar="X", help="model FLOPs utilisation of training, 0 to 1 (h100, h200)")
    parser.add_argument("--tau", type=float, metavar="T", help="training time per token, in flashes (calibration: seconds)")
    parser.add_argument("--max-lag", type=int, metavar="G", help="largest lag g_max, in optimizer steps")
    parser.add_argument("--figure", type=Path, metavar="PNG", help="draw throughput against lag")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the plan as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, settings: Sequence[str]) -> int:
    config = load(options.run_file, settings) if options.run_file or settings else None
    from pipelinerl.experiments.planner.plan import Flags, ask, calibration_of, make_plan, plan_json  # noqa: PLC0415 (numpy)
    from pipelinerl.experiments.planner.simulation.scenario import doubts  # noqa: PLC0415 (as above)
    from pipelinerl.experiments.planner.table import plan_text  # noqa: PLC0415 (as above)
    from pipelinerl.report import write_file  # noqa: PLC0415 (as above)

    flags = Flags(**{name: getattr(options, name) for name in _FLAGS})
    plan = make_plan(ask(config, flags))
    if options.figure:
        from pipelinerl.experiments.planner.table import draw_plan  # noqa: PLC0415 (loads matplotlib)

        draw_plan(plan, options.figure)
    if options.json:
        write_file(options.json, plan_json(plan) + b"\n")
    calibration = calibration_of(flags)
    notes = doubts(config, calibration) if config and calibration else []
    return write(plan_text(plan, config) + "".join(f"doubtful: {note}\n" for note in notes))


def _amount(text: str) -> float:
    """Parse `7.6e9`, `7B` or `135M`. Raises ValueError."""
    scales = {"K": 1e3, "M": 1e6, "B": 1e9}
    scale = scales.get(text[-1:].upper(), 1.0)
    amount = float(text[:-1] if scale > 1 else text) * scale
    if not 0 < amount < float("inf"):
        raise ValueError(text)
    return amount
