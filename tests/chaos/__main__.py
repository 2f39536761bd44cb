"""`python -m tests.chaos`: real runs of the demo with faults from seeds, and what their records say."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pipelinerl.process import counted_interrupts
from pipelinerl.report import write_json
from tests.chaos.plan import KINDS, LAYOUTS
from tests.chaos.run import Request, Result, line_of, run_chaos


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: 1 if a run broke an invariant; the output has the command that runs its seed again."""
    parser = argparse.ArgumentParser("python -m tests.chaos", description=f"{__doc__} See docs/reliability.md.")
    flag = parser.add_argument
    flag("--runs", type=int, default=1, metavar="N", help="runs per layout, with seeds S, S+1, ... (default: 1)")
    flag("--seed", type=int, default=0, metavar="S", help="the first seed (default: 0)")
    flag("--count", type=int, default=8, metavar="N", help="faults per run (default: 8)")
    flag("--faults", nargs="+", choices=KINDS, default=KINDS, metavar="KIND", help="default: all that the run allows")
    flag("--layouts", nargs="+", choices=LAYOUTS, default=[*LAYOUTS], metavar="NAME", help="where the parts of a run are")
    flag("--replay", action="store_true", help="also repeat the training of each run, and compare its weights to the bit")
    flag("--out", type=Path, metavar="DIR", help="folder for the results (default: runs/chaos-DATE)")
    options = parser.parse_args(arguments)
    out: Path = options.out or Path("runs") / f"chaos-{time.strftime('%Y%m%d-%H%M%S')}"
    out.mkdir(parents=True, exist_ok=True)
    request = Request(out=out, count=options.count, kinds=options.faults, replay=options.replay)
    results: list[Result] = []
    with counted_interrupts(raises_at=2) as interrupts:
        for layout in options.layouts:
            for seed in range(options.seed, options.seed + options.runs):
                results.append(run_chaos(request, layout, seed, lambda: interrupts.count > 0))
                print(line_of(results[-1]), flush=True)
                write_json(out / "chaos.json", results)
    broken = [result for result in results if result.violations]
    faults = sum(one.effect != "not injected" for result in results for one in result.faults)
    print(f"{faults} faults in {len(results)} runs, {len(broken)} of them broken: {out / 'chaos.json'}")
    for result in broken:
        print(f"again: {result.command}")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
