"""`pipelinerl replay`: a run repeated from its records."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from pipelinerl.cli.parser import Commands, at_least, config_of_run, say, write
from pipelinerl.errors import ReplayDifferenceError

_REPLAY = (
    "Without settings, training is repeated and the checksum of every published version is compared with the run's; exit "
    "status 1 if one differs. With other settings of the training side (--trainer.loss ppo --correction.token tv), the same "
    "batches are trained on with them, and gradient norms, ESS and clipped shares are compared with the run's."
)


def add_to(commands: Commands) -> None:
    text = "Repeat a run from its records and compare: training to the bit, generation within a tolerance."
    flag = commands.add("replay", text, _REPLAY, run=run_replay).add_argument
    flag("run_dir", type=Path, metavar="RUN_DIR", help="a run directory, or an unpacked export")
    text = "repeat only the first K optimizer steps; 0: do not train (default: all)"
    flag("--steps", type=at_least(0), metavar="K", help=text)
    text = "also repeat the generation of N groups, and compare the log-probs of their tokens (default: 0)"
    flag("--verify", type=at_least(0), default=0, metavar="N", help=text)
    text = "largest difference of log-probs to accept (default: 1e-4 for float32 weights, 0.3 for bfloat16)"
    flag("--tolerance", type=at_least(0, float), metavar="X", help=text)
    flag("--seed", type=at_least(0), default=0, help="seed of the choice of groups (default: 0)")
    flag("-o", "--out", type=Path, metavar="DIR", help="a new folder for the results, the metrics and the last weights")


def run_replay(options: argparse.Namespace, settings: Sequence[str]) -> int:
    """Raises ReplayDifferenceError, after printing the results, if the run was not repeated."""
    config_of_run(options.run_dir)
    from pipelinerl.experiments.replay.replay import ReplayRequest, replay  # noqa: PLC0415 (loads torch)
    from pipelinerl.experiments.replay.results import difference_text, result_text  # noqa: PLC0415
    from pipelinerl.process import counted_interrupts  # noqa: PLC0415 - as above

    request = ReplayRequest(
        run_dir=options.run_dir,
        settings=settings,
        steps=options.steps,
        verify=options.verify,
        seed=options.seed,
        tolerance=options.tolerance,
        out=options.out,
    )
    with counted_interrupts(raises_at=2) as interrupts:
        result = replay(request, lambda: interrupts.count > 0, say)
    status = write(result_text(result))
    if result.differences:
        raise ReplayDifferenceError(difference_text(result))
    return status
