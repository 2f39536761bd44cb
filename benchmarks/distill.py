"""A teacher against a reward: how soon the demo's base model has learned, by either.

python -m benchmarks.distill                # trains the teacher and six students: ten minutes on two quiet cores

The teacher is the demo. Students are trained with `examples/distill.yaml`, and with the demo's own run file, seeds 0 to 2.
Rewards are of the training rollouts (means of `WINDOW` steps). Writes `distill.json` and `distill.png`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from benchmarks import common
from benchmarks.common import Record
from pipelinerl import load_config
from pipelinerl.launch.run import train
from pipelinerl.metrics.reading import read_records
from pipelinerl.metrics.records import StepRecord

EXAMPLE = Path(__file__).parents[1] / "examples/distill.yaml"
TARGET, WINDOW = 0.9, 4
STEPS = 60
"""Of a student of the reward: enough for the target."""


def run(folder: Path, file: Path | None, *flags: str) -> list[StepRecord]:
    train(load_config(file, [f"--run_dir={folder}", "--metrics.view=none", "--metrics.plot=false", *flags]))
    return read_records(folder / "metrics.jsonl", StepRecord)


def learned(way: str, seed: int, steps: Sequence[StepRecord]) -> Record:
    """Seconds since the trainer was ready and samples, by step, and when the reward first was `TARGET`."""
    ready_s = steps[0].time_s - steps[0].train_s
    rewards = [step.reward_mean or 0.0 for step in steps]
    means = [fmean(rewards[max(0, at - WINDOW + 1) : at + 1]) for at in range(len(rewards))]
    times_s, samples = [step.time_s - ready_s for step in steps], 0
    counts = [samples := samples + step.samples for step in steps]
    at = next((at for at, mean in enumerate(means) if mean >= TARGET), None)
    return {
        "way": way,
        "seed": seed,
        "seconds to target": None if at is None else round(times_s[at], 1),
        "samples to target": None if at is None else counts[at],
        "curve": {"time_s": times_s, "samples": counts, "reward": means},
    }


def draw(records: Sequence[Record], file: Path) -> None:
    import matplotlib as mpl  # noqa: PLC0415 - after the runs

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 - as above

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
    for axis, (key, label) in zip(axes, {"samples": "rollouts", "time_s": "seconds of training"}.items(), strict=True):
        for record in records:
            color = "C0" if record["way"] == "teacher" else "C1"
            named = {"label": record["way"]} if record["seed"] == 0 else {}
            axis.plot(record["curve"][key], record["curve"]["reward"], color=color, **named)
        axis.axhline(TARGET, color="0.7", linewidth=0.8)
        axis.set_xlabel(label)
    axes[0].set_ylabel("training reward")
    axes[0].legend()
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    options = parser.parse_args()
    before, records = common.machine(), list[Record]()
    with tempfile.TemporaryDirectory(prefix="distill-") as folder:
        run(Path(folder) / "teacher", None)
        (teacher,) = (Path(folder) / "teacher/checkpoints").glob("step_*140")
        for seed in range(options.seeds):
            taught = run(Path(folder) / f"t{seed}", EXAMPLE, f"--trainer.teacher={teacher}", f"--seed={seed}")
            records.append(learned("teacher", seed, taught))
            rewarded = run(Path(folder) / f"r{seed}", None, f"--seed={seed}", f"--trainer.steps={STEPS}")
            records.append(learned("reward", seed, rewarded))
    shown = [{key: value for key, value in record.items() if key != "curve"} for record in records]
    common.write_results(
        "distill",
        settings=common.settings_of(options),
        machine_before=before,
        records=records,
        table=shown,
        directory=options.out,
    )
    draw(records, options.out / "distill.png")


if __name__ == "__main__":
    main()
