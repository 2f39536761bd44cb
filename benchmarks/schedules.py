"""The demo under each schedule, one run after another: the same samples, seed and machine.

    python -m benchmarks.schedules --steps 40 --repetitions 3

Conventional RL gets the whole machine in each phase (the schedule sees to it), with the engine on one thread and on all
cores: for a small model one can be faster than two, and its best counts. Every run is a run of `pipelinerl train`, with its
folder kept under --runs. Times are from when the trainer is ready (its first weights are out, nothing has been generated) to
the end of the last step: no start-up, no evaluation.

Compare runs of enough steps: the pipeline's first batches are the completions that ended first, so a few steps are on short
completions (`length_mean` shows it; `tokens_per_s` does not suffer from it).
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

import pipelinerl
from benchmarks import common
from benchmarks.common import Record
from pipelinerl.launch.resources import usable_cores
from pipelinerl.metrics.records import METRICS_FILE, StepRecord, read_records

WINDOW = 5
"""Steps over which the reward is averaged."""


class Method(NamedTuple):
    """A schedule with its settings. None: as the schedule (threads) or the demo's run file (slots, H) has it."""

    kind: str
    steps_per_round: int = 1
    engine_threads: int | None = None
    slots: int | None = None

    @property
    def label(self) -> str:
        rounds = "" if self.kind == "pipeline" else f" G={self.steps_per_round}"
        threads = "" if self.engine_threads is None else f", engine threads {self.engine_threads}"
        slots = "" if self.slots is None else f", H={self.slots}"
        return f"{self.kind}{rounds}{slots}{threads}"


def methods(options: argparse.Namespace) -> Iterator[Method]:
    yield Method("pipeline")
    settings = itertools.product(options.conventional, options.conventional_slots, sorted({1, usable_cores()}))
    for steps, slots, threads in settings:
        yield Method("conventional", steps, threads, slots)
    for steps in options.asynchronous:
        yield Method("async", steps)


def run(method: Method, options: argparse.Namespace, seed: int, run_dir: Path) -> Record:
    """One run of the demo under a schedule, and what its records say."""
    flags = [
        *("--run_dir", str(run_dir), "--seed", str(seed), "--metrics.view", "none", "--metrics.plot", "false"),
        *("--schedule.kind", method.kind, "--schedule.steps_per_round", str(method.steps_per_round)),
        *("--trainer.steps", str(options.steps), "--trainer.batch_size", str(options.batch_size)),
        *("--evaluation.problems", "0"),
    ]
    if method.engine_threads is not None:
        flags += ["--engine.threads", str(method.engine_threads)]
    if method.slots is not None:
        flags += ["--engine.slots", str(method.slots)]
    summary = pipelinerl.train(pipelinerl.load_config(None, [*flags, *options.set]))
    steps = read_records(run_dir / METRICS_FILE, StepRecord)
    return {**measured(steps, options.reward), **{key: summary[key] for key in _FROM_SUMMARY}, "run_dir": str(run_dir)}


_FROM_SUMMARY = (
    *("wall_s", "samples_trained", "tokens_generated", "ess_mean", "ess_min", "lag_mean", "lag_max", "reward_first"),
    *("reward_last", "engine_busy_fraction", "trainer_busy_fraction", "update_pause_s_p50", "update_pause_s_p99"),
    "peak_memory_bytes",
)


def measured(steps: Sequence[StepRecord], goal: float) -> Record:
    """Rates and times of one run. `samples_per_s_later` leaves the first fifth of the steps out: pipes fill in them."""
    start_s = steps[0].time_s - steps[0].train_s - steps[0].wait_s
    training_s = steps[-1].time_s - start_s
    samples = sum(step.samples for step in steps)
    tokens = sum(step.samples * (step.completion_length_mean or 0.0) for step in steps)
    fill = max(1, len(steps) // 5)
    later_s = steps[-1].time_s - steps[fill - 1].time_s
    reached = first_at(steps, goal)
    return {
        "training_s": training_s,
        "samples_per_s": samples / training_s,
        "tokens_per_s": tokens / training_s,
        "length_mean": tokens / samples,
        "samples_per_s_later": sum(step.samples for step in steps[fill:]) / later_s if later_s > 0 else None,
        "train_busy_s": sum(step.train_s for step in steps),
        "s_to_reward": reached.time_s - start_s if reached else None,
        "samples_to_reward": sum(s.samples for s in steps if s.version <= reached.version) if reached else None,
        "rewards": [step.reward_mean for step in steps],
        "times_s": [step.time_s - start_s for step in steps],
    }


def first_at(steps: Sequence[StepRecord], goal: float) -> StepRecord | None:
    """The first step at which the mean reward of the last WINDOW steps is at least `goal`."""
    for end in range(WINDOW, len(steps) + 1):
        rewards = [step.reward_mean for step in steps[end - WINDOW : end]]
        if statistics.fmean(reward or 0.0 for reward in rewards) >= goal:
            return steps[end - 1]
    return None


_SHOWN = (
    *("samples_per_s", "samples_per_s_later", "tokens_per_s", "length_mean", "s_to_reward", "samples_to_reward"),
    *("reward_last", "ess_mean", "lag_mean", "lag_max", "engine_busy_fraction", "trainer_busy_fraction"),
)


def table_of(records: Sequence[Record]) -> list[Record]:
    """A row for each method (medians over the repetitions), and rows that compare pipeline to the best of the others."""
    rows: list[Record] = []
    for system in dict.fromkeys(record["system"] for record in records):
        chosen = [record for record in records if record["system"] == system]
        rows.append({"schedule": system, "runs": len(chosen), **{key: _median(chosen, key) for key in _SHOWN}})
    pipeline = next((row for row in rows if row["schedule"] == "pipeline"), None)
    if pipeline is None:
        return rows
    ratios = []
    for kind in ("conventional", "async"):
        others = [row for row in rows if row["schedule"].startswith(kind)]
        if others:
            ratios.append({"schedule": f"pipeline / best {kind}", **_ratios(pipeline, others)})
    return rows + ratios


def _ratios(pipeline: Record, others: Sequence[Record]) -> Record:
    """How many times faster pipeline is than the best of the others, quantity by quantity."""
    found: Record = {}
    for key in ("samples_per_s", "samples_per_s_later", "tokens_per_s"):
        rates = [row[key] for row in others if row[key]]
        if rates and pipeline[key]:
            found[key] = pipeline[key] / max(rates)
    for key in ("s_to_reward", "samples_to_reward"):
        needed = [row[key] for row in others if row[key]]
        if needed and pipeline[key]:
            found[key] = min(needed) / pipeline[key]
    return found


def _median(records: Sequence[Record], key: str) -> float | None:
    """None unless every run has the number: a run that did not reach the reward must not be left out of the median."""
    values = [record[key] for record in records]
    return statistics.median(values) if all(value is not None for value in values) else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--conventional", type=int, nargs="*", default=[1, 2, 4, 8], metavar="G")
    parser.add_argument("--conventional-slots", type=int, nargs="+", default=[None], metavar="H", help="H to try for them")
    parser.add_argument("--asynchronous", type=int, nargs="*", default=[1, 2, 4], metavar="G")
    parser.add_argument("--reward", type=float, default=0.9, help="the reward to reach")
    parser.add_argument("--repetitions", type=int, default=1, help="each with a seed of its own")
    parser.add_argument("--seed", type=int, default=0, help="of the first repetition")
    parser.add_argument("--set", nargs="*", default=[], metavar="FLAG", help='more flags for all, as one: --set="--a.b" 1')
    parser.add_argument("--runs", type=Path, required=True, help="where the runs' folders go; must be new")
    parser.add_argument("--name", default="schedules", help="of the results' file")
    parser.add_argument("--results", type=Path, default=common.RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.runs.mkdir(parents=True)
    begun = common.machine()
    records: list[Record] = []
    for repetition in range(options.repetitions):
        for number, method in enumerate(methods(options)):
            seed = options.seed + repetition
            result = run(method, options, seed, options.runs / f"{repetition}-{number:02d}-{method.kind}")
            record = {"system": method.label, **method._asdict(), "seed": seed, "repetition": repetition, **result}
            records.append(record)
            print(f"{method.label}, seed {seed}: {record['samples_per_s']:.1f} samples/s", flush=True)
            # After every run, so that a long series that is cut short leaves what it had.
            common.write_results(
                options.name,
                settings=common.settings_of(options),
                begun=begun,
                records=records,
                table=table_of(records),
                directory=options.results,
            )


if __name__ == "__main__":
    main()
