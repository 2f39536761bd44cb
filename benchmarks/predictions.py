"""Predicted and measured rates of short demo runs with 1 to 3 trainer ranks and 1 to 4 generation processes on this machine.

    python -m benchmarks.predictions            # about 25 minutes on two idle cores, at the default priority

Every repetition calibrates the machine for each case and then makes one run of it. The calibration predicts the run:
nothing is fitted to runs. Each prediction replays the lengths that its run sampled (`pipelinerl lab simulate --compare`), so
it is of the machine, not of what the model learns.

`others` is the share of the machine that other programs used during the run: the calibration does not see them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from benchmarks import common
from benchmarks.common import Record

CASES = ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (3, 1))
"""(ranks, generation processes)."""
_COMMAND = "import sys; from pipelinerl.cli import main; sys.exit(main())"


def command(*arguments: str) -> None:
    """Run `pipelinerl` with these arguments. Its output is shown only if it fails."""
    done = subprocess.run([sys.executable, "-c", _COMMAND, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"pipelinerl {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")


def flags(settings: Mapping[str, object]) -> list[str]:
    return [text for key, value in settings.items() for text in (f"--{key}", str(value))]


def busy_s() -> tuple[float, float]:
    """Seconds of CPU time so far: of the whole machine, and of the ended processes that this one started."""
    first = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    idle = int(first[3]) + int(first[4])
    ours = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (sum(map(int, first[:8])) - idle) / os.sysconf("SC_CLK_TCK"), ours.ru_utime + ours.ru_stime


def case_of(folder: Path, ranks: int, processes: int, repetition: int, options: argparse.Namespace) -> Record:
    """One run and its prediction."""
    run, prediction = folder / f"{repetition}-{ranks}-{processes}", folder / "prediction.json"
    calibration = folder / "calibration.json"
    shape = {
        "trainer.ranks": ranks,
        "trainer.threads": 1,
        "engine.processes": processes,
        "engine.threads": 1,
        "engine.slots": options.slots // processes,
    }
    command("lab", "calibrate", *flags(shape), "--out", str(calibration))
    settings = shape | {
        "run_dir": run,
        "seed": repetition,
        "trainer.steps": options.steps,
        "trainer.checkpoint_every": 0,
        "evaluation.problems": 0,
        "metrics.view": "none",
        "metrics.plot": "false",
    }
    begin_s, (all_before, ours_before) = time.monotonic(), busy_s()
    command("train", *flags(settings))
    wall_s, (all_after, ours_after) = time.monotonic() - begin_s, busy_s()
    others_s = (all_after - all_before) - (ours_after - ours_before)
    command("lab", "simulate", "--compare", str(run), "--calibration", str(calibration), "--json", str(prediction))
    found = json.loads(prediction.read_text())
    keys = ("samples_per_s_later", "samples_per_s", "trainer_busy_fraction", "lag_mean", "lag_max")
    pairs = {key: (found["prediction"][key], found["measured"][key]) for key in keys}
    predicted, measured = pairs["samples_per_s_later"]
    return {
        "ranks": ranks,
        "processes": processes,
        "repetition": repetition,
        "predicted": predicted,
        "measured": measured,
        "ratio": predicted / measured,
        "others": others_s / wall_s / len(os.sched_getaffinity(0)),
        "cpu_s": ours_after - ours_before,
        "all": pairs,
    }


def table_of(records: list[Record]) -> list[Record]:
    rows = []
    for ranks, processes in dict.fromkeys((record["ranks"], record["processes"]) for record in records):
        of_case = [record for record in records if (record["ranks"], record["processes"]) == (ranks, processes)]
        rows.append(
            {
                "ranks": ranks,
                "generation processes": processes,
                "predicted samples/s": median(record["predicted"] for record in of_case),
                "measured samples/s": median(record["measured"] for record in of_case),
                "predicted / measured": median(record["ratio"] for record in of_case),
                "all ratios": ", ".join(f"{record['ratio']:.2f}" for record in of_case),
                "others": ", ".join(f"{record['others']:.0%}" for record in of_case),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--slots", type=int, default=128, help="sequences in progress, over all processes (128)")
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    options = parser.parse_args()
    before, records = common.machine(), list[Record]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for repetition in range(options.repetitions):
            for ranks, processes in CASES:
                record = case_of(folder, ranks, processes, repetition, options)
                records.append(record)
                print(
                    f"{ranks} ranks, {processes} processes: {record['ratio']:.2f} of {record['measured']:.0f}/s", flush=True
                )
    table = table_of(records)
    common.write_results(
        "predictions",
        settings=common.settings_of(options),
        machine_before=before,
        records=records,
        table=table,
        directory=options.out,
    )


if __name__ == "__main__":
    main()
