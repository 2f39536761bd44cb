"""Predicted and measured rates of short demo runs with 1 to 3 trainer ranks and 1 to 4 generation processes on this machine.

    python -m benchmarks.predictions            # about 9 minutes on two idle cores

Every repetition calibrates the machine with one rank and one generation process, and then makes one run of each case. The
calibration of a repetition predicts its runs: nothing is fitted to them. Each prediction replays the lengths that its run
sampled (`pipelinerl simulate --compare`), so it is of the machine, not of what the model learns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
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


def case_of(folder: Path, ranks: int, processes: int, repetition: int, options: argparse.Namespace) -> Record:
    """One run and its prediction."""
    run, prediction = folder / f"{repetition}-{ranks}-{processes}", folder / "prediction.json"
    settings = {
        "run_dir": run,
        "seed": repetition,
        "trainer.ranks": ranks,
        "trainer.threads": 1,
        "trainer.steps": options.steps,
        "trainer.checkpoint_every": 0,
        "engine.processes": processes,
        "engine.threads": 1,
        "engine.slots": options.slots // processes,
        "evaluation.problems": 0,
        "metrics.view": "none",
        "metrics.plot": "false",
    }
    load = os.getloadavg()[0]
    command("train", *(text for key, value in settings.items() for text in (f"--{key}", str(value))))
    command("simulate", "--compare", str(run), "--calibration", str(folder / "calibration.json"), "--json", str(prediction))
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
        "load_average": load,
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
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--slots", type=int, default=128, help="sequences in progress, over all processes (128)")
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    options = parser.parse_args()
    before, records = common.machine(), list[Record]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for repetition in range(options.repetitions):
            threads = ("--engine.threads", "1", "--trainer.threads", "1", "--engine.slots", str(options.slots))
            command("calibrate", *threads, "--out", str(folder / "calibration.json"))
            for ranks, processes in CASES:
                record = case_of(folder, ranks, processes, repetition, options)
                records.append(record)
                print(f"{ranks} ranks, {processes} processes: {record['ratio']:.2f} of {record['measured']:.0f}/s", flush=True)
    settings = common.settings_of(options)
    table = table_of(records)
    common.write_results(
        "predictions", settings=settings, machine_before=before, records=records, table=table, directory=options.out
    )


if __name__ == "__main__":
    main()
