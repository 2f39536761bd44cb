"""`pipelinerl study`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pipelinerl.cli.parser import Commands, load, write
from pipelinerl.errors import RunDirectoryError, UserError

_EPILOG = (
    "kv-cache: KL to the on-policy policy of sequences whose weights changed while they were being generated, with stale "
    "and with recomputed KV, against conventional lags. Needs a run that saved consecutive checkpoints: pipelinerl train "
    "--trainer.checkpoint_every 1 --trainer.keep_checkpoints N, where N is the number of steps. Keys of the run file are "
    "also flags here (--engine.device cpu)."
)


def add_to(commands: Commands) -> None:
    parser = commands.add("study", "Run a study on the checkpoints of a run.", epilog=_EPILOG)
    parser.add_argument("what", choices=["kv-cache"], help="the study")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="a run with consecutive checkpoints")
    parser.add_argument(
        "--lag", type=int, default=16, metavar="G", help="g_max, number of steps from version C to the policy (default: 16)"
    )
    parser.add_argument(
        "--from",
        dest="starts",
        default="early,middle,late",
        metavar="C,...",
        help="versions C to start from, or early, middle, late (default: early,middle,late)",
    )
    parser.add_argument("--problems", type=int, default=64, metavar="N", help="number of problems (default: 64)")
    parser.add_argument("--attempts", type=int, default=4, metavar="K", help="attempts per problem (default: 4)")
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="L",
        help="longest completion, in tokens (default: the 90th percentile of the run's)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of sampling and resampling (default: 0)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where results go (default: RUN_DIR/study)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, settings: Sequence[str]) -> int:
    for flag, value, least in (
        ("--lag", options.lag, 1),
        ("--problems", options.problems, 1),
        ("--attempts", options.attempts, 1),
        ("--max-tokens", options.max_tokens, 1),
        ("--seed", options.seed, 0),
    ):
        if value is not None and value < least:
            raise UserError(f"{flag} {value}: give a whole number of at least {least}")
    run_file = options.run_dir / "config.yaml"
    if not run_file.is_file():
        raise RunDirectoryError(f"{options.run_dir} is not a run directory (there is no {run_file})")
    config = load(run_file, settings)
    from pipelinerl.experiments.study.kv_cache import StudyOptions, study_kv_cache  # noqa: PLC0415 (loads torch)
    from pipelinerl.experiments.study.page import make_folder, study_table, write_study  # noqa: PLC0415 (matplotlib)

    chosen = StudyOptions(
        lag=options.lag,
        starts=[name.strip() for name in options.starts.split(",") if name.strip()],
        problems=options.problems,
        attempts=options.attempts,
        max_tokens=options.max_tokens,
        seed=options.seed,
    )
    out = options.out or options.run_dir / "study"
    make_folder(out)
    study = study_kv_cache(options.run_dir, config, chosen, _say)
    numbers, picture = write_study(study, out)
    return write(f"{study_table(study)}\n{numbers}\n{picture}\n")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
