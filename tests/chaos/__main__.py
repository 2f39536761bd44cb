"""`python -m tests.chaos`: real runs with faults from seeds, and what their records say."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pipelinerl.cli.parser import SETTINGS_HELP, Commands, at_least, say, write
from pipelinerl.config.load import load_config
from pipelinerl.errors import PipelineRLError, UserError
from pipelinerl.process import counted_interrupts
from pipelinerl.report import write_json, writing_to
from tests.chaos.plan import KINDS, LAYOUTS
from tests.chaos.results import Result, line_of, table_of, total_of
from tests.chaos.run import Request, run_chaos

_EPILOG = (
    "A run is started as a command, hurt at the points of its seed's schedule, resumed whenever it ends, and checked by its "
    "records: docs/reliability.md. Exit status 1 if an invariant does not hold, with the command that runs this seed again. "
)


class ChaosError(PipelineRLError):
    """A run that was hurt broke an invariant; the message has the command that runs its seed again."""


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: 1 if a run broke an invariant, 2 for a mistake in the arguments."""
    commands = Commands()
    try:
        add_to(commands)
        own, settings = commands.split(["chaos", *arguments])
        return run_command(commands.root.parse_args(own), settings)
    except PipelineRLError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status


def add_to(commands: Commands) -> None:
    text = (
        "Hurt real runs with seeded faults, and check that nothing is lost, doubled or hangs. Without a run file: the demo."
    )
    parser = commands.add("chaos", text, _EPILOG + SETTINGS_HELP, run=run_command)
    parser.prog = "python -m tests.chaos"
    flag = parser.add_argument
    flag("run_file", nargs="?", type=Path, metavar="RUN.yaml", help="the run file")
    flag("--runs", type=at_least(1), default=1, metavar="N", help="runs per layout, with seeds S, S+1, ... (default: 1)")
    flag("--seed", type=at_least(0), default=0, metavar="S", help="the first seed (default: 0)")
    flag("--count", type=at_least(0), default=8, metavar="N", help="faults per run (default: 8)")
    flag("--faults", metavar="LIST", help="kinds of faults, like kill,stop (default: all that the run allows)")
    text = "where the parts of the run are, like processes,engines; `all`, or `as-is` (default): as the run file says"
    flag("--layouts", default="as-is", metavar="LIST", help=text)
    flag("--replay", action="store_true", help="also repeat the training of each run, and compare its weights to the bit")
    flag("--keep", action="store_true", help="keep the directories of runs without a violation too")
    flag("-o", "--out", type=Path, metavar="DIR", help="folder for the results (default: runs/chaos-DATE)")


def run_command(options: argparse.Namespace, settings: Sequence[str]) -> int:
    """Raises UserError, and ChaosError if a run broke an invariant."""
    load_config(options.run_file, settings)
    layouts = [*LAYOUTS][1:] if options.layouts == "all" else options.layouts.split(",")
    kinds = KINDS if options.faults is None else tuple(options.faults.split(","))
    for flag, given, known in (("--layouts", layouts, tuple(LAYOUTS)), ("--faults", kinds, KINDS)):
        if wrong := [name for name in given if name not in known]:
            raise UserError(f"{flag} {wrong[0]}: it is one of {', '.join(known)}")
    out: Path = options.out or Path("runs") / f"chaos-{time.strftime('%Y%m%d-%H%M%S')}"
    request = Request(
        run_file=options.run_file,
        out=out,
        count=options.count,
        kinds=kinds,
        settings=settings,
        replay=options.replay,
        keep=options.keep,
    )
    with writing_to(out):
        out.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    with counted_interrupts(raises_at=2) as interrupts:
        for layout in layouts:
            for seed in range(options.seed, options.seed + options.runs):
                results.append(run_chaos(request, layout, seed, lambda: interrupts.count > 0))
                say(line_of(results[-1]))
                write_json(out / "chaos.json", results)
    write(f"{table_of(results)}\n{total_of(results)}\n{out / 'chaos.json'}\n")
    if broken := [result for result in results if result.violations]:
        text = f"{len(broken)} of {len(results)} runs broke an invariant; to run the first again: {broken[0].command}"
        raise ChaosError(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
