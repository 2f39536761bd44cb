"""Objectives and corrections on stale data: each recipe at measured lags of about 1, 4 and 16 optimizer steps.

python -m benchmarks.corrections --out FILE                 # all runs missing from FILE, one core
python -m benchmarks.corrections --out FILE --part 1/2      # half of them; run 2/2 at the same time for the rest
python -m benchmarks.corrections --out FILE --table         # the results in FILE as Markdown
python -m benchmarks.corrections --out FILE --recipes teacher --tasks gcd --teacher RUN/checkpoints/step_00000140

A run trains the demo's model with the real pipeline in one process and one thread (`launch.kind: embedded`), which is
deterministic. Lag is produced as in the paper: with H sequences in progress and B rollouts per step, a rollout is in
progress over about H / B steps, and its tokens come from as many versions. H is 64, 256 or 1024, and B is 64. Every
record contains the measured lag. All runs have the same problems, number of steps and learning rate. The learning rate is
high, so that lag does harm. Two tasks: `gcd`, one long answer, and `gcd_turns`, one subtraction per turn
(`benchmarks/gcd_turns.py`).

`collapsed`: the run ended with an error of divergence, or its training reward over the last `WINDOW` steps is below half of
its best over `WINDOW` steps, or its held-out reward is lower than before training.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks import common
from benchmarks.common import Record
from pipelinerl import load_config
from pipelinerl.errors import TrainingDivergedError
from pipelinerl.launch.run import train
from pipelinerl.metrics.reading import read_records
from pipelinerl.metrics.records import StepRecord

STEPS, WINDOW = 66, 11
SLOTS = {1: "64", 4: "256", 16: "1024"}
"""H, by the lag that is aimed at."""

COMMON = {
    "launch.kind": "embedded",
    "stream.kind": "memory",
    "engine.threads": "1",
    "trainer.threads": "1",
    "metrics.view": "none",
    "metrics.plot": "false",
    "trainer.steps": str(STEPS),
    "trainer.batch_size": "64",
    "trainer.lr_schedule": "constant",
    "trainer.warmup_steps": "0",
    "trainer.learning_rate": "4e-4",
    "actor.group_size": "8",
    "evaluation.problems": "256",
    "trainer.gradient_cosine": "true",
}
TASKS: dict[str, dict[str, str]] = {
    "gcd": {"actor.max_tokens": "96"},
    "gcd_turns": {"environment.kind": f"{Path(__file__).with_name('gcd_turns.py')}:GcdTurns", "actor.max_tokens": "6"},
}
TV = {"correction.token": "tv"}
DRIFT = {"correction.drift": "1e-3", "preprocess.zero_advantage": "keep"}
ESS_LR = {"trainer.ess_lr": "sqrt"}
SMALLEST_VARIANCE = {"preprocess.advantage": "pipelinerl.preprocess.advantages:minimum_variance"}
TEACHER = {"trainer.kl_coefficient": "1", "trainer.kl_estimator": "k1", "preprocess.zero_advantage": "keep"}
RECIPES: dict[str, dict[str, str]] = {
    "paper (truncate 5)": {},
    "no correction": {"correction.token": "none"},
    "mask": {"correction.token": "mask"},
    "band": {"correction.token": "band"},
    "tv": TV,
    "tv, drift": TV | DRIFT,
    "tv, drift, ess_lr": TV | DRIFT | ESS_LR,
    "paper, ess_lr": ESS_LR,
    "sequence truncate": {"correction.sequence": "truncate"},
    "geo_truncate": {"correction.sequence": "geo_truncate"},
    "geo_mask": {"correction.sequence": "geo_mask"},
    "ppo": {"trainer.loss": "ppo"},
    "ppo, no dual clip": {"trainer.loss": "ppo", "trainer.dual_clip": "null"},
    "decoupled": {"trainer.loss": "decoupled"},
    "decoupled, geo_truncate": {"trainer.loss": "decoupled", "correction.sequence": "geo_truncate"},
    "cispo": {"trainer.loss": "cispo"},
    "gspo": {"trainer.loss": "gspo"},
    "minimum variance": SMALLEST_VARIANCE,
    "minimum variance, ess_lr": SMALLEST_VARIANCE | ESS_LR,
}
TAUGHT: dict[str, dict[str, str]] = {
    "teacher": TEACHER | {"preprocess.advantage": "none"},
    "teacher, tv": TEACHER | TV | {"preprocess.advantage": "none"},
    "teacher and reward": TEACHER,
}
"""Recipes that need `--teacher`, for the task `gcd`."""


def measure(task: str, recipe: str, lag: int, seed: int, teacher: str | None = None) -> Record:
    """One complete run in this process. Its files are deleted."""
    own = TAUGHT[recipe] | {"trainer.teacher": str(teacher)} if recipe in TAUGHT else RECIPES[recipe]
    settings = COMMON | TASKS[task] | {"engine.slots": SLOTS[lag]} | own | {"seed": str(seed)}
    begun_s, cpu_s = time.monotonic(), time.process_time()
    summary, error = {}, None
    with tempfile.TemporaryDirectory(prefix="corrections-") as folder:
        run_dir = Path(folder) / "run"
        flags = [f"--{key}={value}" for key, value in settings.items()]
        try:
            summary = train(load_config(None, [*flags, f"--run_dir={run_dir}"]))
        except TrainingDivergedError as diverged:
            error = str(diverged)
        steps = read_records(run_dir / "metrics.jsonl", StepRecord)
    measured: Record = {
        "task": task,
        "recipe": recipe,
        "lag": lag,
        "seed": seed,
        "settings": {key: value for key, value in own.items() if key != "trainer.teacher"},
        "eval_before": summary.get("eval_reward_before"),
        "eval_after": summary.get("eval_reward_after"),
        "error": error,
        "cpu_s": round(time.process_time() - cpu_s, 1),
        "wall_s": round(time.monotonic() - begun_s, 1),
    }
    measured |= of_steps(steps)
    return measured | {"collapsed": collapsed(measured)}


def of_steps(steps: Sequence[StepRecord]) -> Record:
    """Training reward by window, and means of the staleness metrics over steps with a gradient."""
    rewards = [step.reward_mean or 0.0 for step in steps]
    stale = [step for step in steps if step.ess is not None]
    numbers = [step.numbers() for step in stale]

    def mean(name: str) -> float | None:
        return fmean(number[name] for number in numbers if name in number) if numbers else None

    fractions = ("masked_fraction", "truncated_fraction")
    names = ("lag_mean", "ess", "kl_behaviour_policy_k3", *fractions, "learning_rate", "gradient_cosine")
    return {
        "steps": len(steps),
        "steps_with_gradient": len(stale),
        "rewards": [round(fmean(rewards[at : at + WINDOW]), 4) for at in range(0, len(rewards), WINDOW)],
        **{name: mean(name) for name in names},
        "ess_min": min((step.ess for step in stale if step.ess is not None), default=None),
        "kl_max": max((number["kl_behaviour_policy_k3"] for number in numbers), default=None),
        "lag_max": max((step.lag_max for step in stale if step.lag_max is not None), default=None),
        "grad_norm_max": max((step.grad_norm for step in stale if step.grad_norm is not None), default=None),
        "entropy_last": stale[-1].entropy_mean if stale else None,
    }


def collapsed(measured: Record) -> bool:
    rewards = measured["rewards"]
    if measured["error"] is not None or not rewards or rewards[-1] < max(rewards) / 2:
        return True
    return bool(measured["eval_after"] < measured["eval_before"])


def wanted(options: argparse.Namespace) -> Iterator[tuple[str, str, int, int]]:
    """All requested runs, with seeds in the outer loop, so that an unfinished table has all recipes."""
    for seed in range(options.seeds):
        for task in options.tasks:
            for lag in options.lags:
                for recipe in options.recipes:
                    yield task, recipe, lag, seed


def read(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(records: Sequence[Record], task: str) -> list[Record]:
    """A row for each recipe: at each lag the held-out reward (mean and range over seeds), then means of ESS and KL."""
    rows = []
    for recipe in [*RECIPES, *TAUGHT]:
        if not any((r["task"], r["recipe"]) == (task, recipe) for r in records):
            continue
        row, collapses = {"recipe": recipe}, 0
        by_lag = {lag: [r for r in records if (r["task"], r["recipe"], r["lag"]) == (task, recipe, lag)] for lag in SLOTS}
        for lag, runs in by_lag.items():
            after = [run["eval_after"] or 0.0 for run in runs] or [float("nan")]  # missing if the run diverged
            row[f"held-out, lag {lag}"] = f"{fmean(after):.2f} ({min(after):.2f} to {max(after):.2f})"
            collapses += sum(run["collapsed"] for run in runs)
        row["collapsed"] = f"{collapses} of {sum(map(len, by_lag.values()))}"
        row["ESS"] = " / ".join(f"{_mean(runs, 'ess'):.2f}" for runs in by_lag.values())
        row["KL"] = " / ".join(f"{_mean(runs, 'kl_behaviour_policy_k3'):.3f}" for runs in by_lag.values())
        row["masked or truncated"] = " / ".join(
            f"{_mean(runs, 'masked_fraction') + _mean(runs, 'truncated_fraction'):.1%}" for runs in by_lag.values()
        )
        row["cosine"] = " / ".join(f"{_mean(runs, 'gradient_cosine'):.2f}" for runs in by_lag.values())
        rows.append(row)
    return rows


def _mean(runs: Sequence[Mapping[str, float]], name: str) -> float:
    found = [run[name] for run in runs if run.get(name) is not None]
    return fmean(found) if found else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=common.RESULTS / "corrections.jsonl")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--lags", nargs="+", type=int, choices=SLOTS, default=list(SLOTS))
    parser.add_argument("--recipes", nargs="+", choices=[*RECIPES, *TAUGHT], default=list(RECIPES))
    parser.add_argument("--teacher", help="a model that was trained on gcd, for the recipes with a teacher")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="only every N-th run, starting with the I-th")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        records = read(options.out)
        for task in TASKS:
            reached = (
                f"{_mean([r for r in records if (r['task'], r['lag']) == (task, lag)], 'lag_mean'):.1f}" for lag in SLOTS
            )
            print(f"\n{task}, reached lags (means) {', '.join(reached)}:\n\n{common.markdown(table(records, task))}")
        return
    part, parts = map(int, options.part.split("/"))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    done = {(r["task"], r["recipe"], r["lag"], r["seed"]) for r in read(options.out)}
    runs = [run for run in list(wanted(options))[part - 1 :: parts] if run not in done]
    for number, run in enumerate(runs, 1):
        record = measure(*run, options.teacher) | {"machine": common.machine()}
        with options.out.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(
            f"{number}/{len(runs)} {run}: {record['eval_before']} -> {record['eval_after']}, {record['cpu_s']} s", flush=True
        )


if __name__ == "__main__":
    main()
