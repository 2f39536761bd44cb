"""Results of `examples/smollm2_sums.yaml` with SmolLM2-135M-Instruct: the same held-out sums before and after, by seed.

python -m benchmarks.sums --keep RUN_DIR ...   # copy results of finished runs to results/smollm2-sums/
python -m benchmarks.sums                      # the table, as Markdown

`exact` is the share of answers that consist of the number only. `number` also counts answers that begin with the right
number and continue: it shows the gain beyond stopping in time. Intervals are 95%, over problems; `gain` is paired.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from pipelinerl.experiments.statistics import Interval, mean_intervals

FOLDER = common.RESULTS / "smollm2-sums"
MODEL = "models/smollm2-135m-instruct"
KEPT = (
    "metrics.jsonl",
    "evaluations.jsonl",
    "curves.png",
    "rollouts/evaluation-before.jsonl",
    "rollouts/evaluation-after.jsonl",
)
QUESTION = re.compile(r"(-?\d+) ([+-]) (-?\d+) =")
NUMBER = re.compile(r"\s*(-?\d+)(?!\.?\d)")


def keep(run: Path) -> Path:
    """Copy a run's results, with the model path replaced by that of the example."""
    summary = json.loads((run / "summary.json").read_text())
    target = FOLDER / f"seed-{summary['seed']}"
    target.mkdir(parents=True, exist_ok=True)
    path = summary["model"]
    summary["model"] = MODEL
    (target / "summary.json").write_text(json.dumps(summary | {"machine": common.machine()}, indent=2) + "\n")
    config = (run / "config.yaml").read_text().replace(path, MODEL)
    (target / "config.yaml").write_text(re.sub(r"(?m)^run_dir: .*$", "run_dir: null", config))
    for name in KEPT:
        shutil.copyfile(run / name, target / Path(name).name)
    return target


def answers(path: Path) -> dict[str, tuple[float, float, float]]:
    """Per problem: reward, 1 for an exact answer, 1 for an answer that begins with the right number."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return {record["problem_id"]: (record["reward"], float(record["reward"] >= 1), _number(record)) for record in records}


def _number(record: dict[str, Any]) -> float:
    asked, said = QUESTION.search(record.get("prompt") or ""), NUMBER.match(record.get("completion") or "")
    if asked is None or said is None:
        return 0.0
    first, second = int(asked[1]), int(asked[3])
    return float(int(said[1]) == (first + second if asked[2] == "+" else first - second))


def rows() -> list[dict[str, str]]:
    found = []
    for folder in sorted(FOLDER.glob("seed-*")):
        before, after = answers(folder / "evaluation-before.jsonl"), answers(folder / "evaluation-after.jsonl")
        if before.keys() != after.keys():
            raise SystemExit(f"{folder}: before and after are not of the same problems")
        pairs = np.array([[*before[problem], *after[problem]] for problem in before])
        gains = pairs[:, 3:] - pairs[:, :3]
        intervals = mean_intervals(np.hstack([pairs, gains]), resamples=10_000, seed=0, level=0.95)
        summary = json.loads((folder / "summary.json").read_text())
        row = {"seed": str(summary["seed"]), "problems": str(len(pairs)), "steps": str(summary["optimizer_steps"])}
        for place, name in enumerate(("reward", "exact", "number")):
            row |= {
                name: f"{intervals[place].mean:.3f} → {intervals[place + 3].mean:.3f}",
                f"gain in {name}": _shown(intervals[place + 6]),
            }
        minutes = summary["wall_s"] / 60
        found.append(
            row | {"minutes": f"{minutes:.0f}", "ESS mean / min": f"{summary['ess_mean']:.3f} / {summary['ess_min']:.3f}"}
        )
    return found


def _shown(interval: Interval) -> str:
    return f"{interval.mean:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, nargs="+", default=[], metavar="RUN_DIR")
    for run in parser.parse_args().keep:
        print(f"kept in {keep(run)}")
    table = rows()
    print(common.markdown(table) if table else f"there is nothing in {FOLDER}")


if __name__ == "__main__":
    main()
