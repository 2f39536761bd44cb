"""Print the tables of all results as Markdown: what was aimed at, then each measurement.

python -m benchmarks.summarize > benchmarks/results/tables.md
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import NamedTuple

from benchmarks import common
from benchmarks.common import Record


def section(path: Path) -> str:
    """The table of one result under its name, with its machine."""
    result = json.loads(path.read_text())
    if "settings" not in result:  # it has no table
        return ""
    machine, settings = result["machine"], result["settings"]
    repetitions = settings.get("repetitions", "?")
    tunables = f"{machine['glibc_tunables']}; " if machine.get("glibc_tunables") else ""
    where = (
        f"{machine['date']}, {machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}, transformers "
        f"{machine['transformers']}; {repetitions} repetitions, medians; {tunables}load average "
        f"{machine['load_average'][0]} at the start, {result['ended']['load_average'][0]} at the end."
    )
    return f"## {result['name']}\n\n{common.markdown(result['table'])}\n\n{where}\n"


class Goal(NamedTuple):
    """`rows`: what the rows of the result's table have in common that are meant; the goal is that of `column`."""

    what: str
    result: str
    rows: Record
    column: str
    goal: float
    at_most: bool = False


_EQUAL = {"lengths": "equal"}
_CB, _STEP = "vs continuous_batching", "a decode step, over its matrix products"
_UPDATE = {"model": "135m", "transport": "shared memory", "engines": 1}
GOALS = (
    Goal("against continuous batching, tiny model", "servers-demo", _EQUAL | {"H": 64}, _CB, 4.0),
    Goal("against continuous batching, SmolLM2-135M", "servers-smollm2", _EQUAL | {"H": 64}, _CB, 2.0),
    Goal("against vLLM's CPU build, SmolLM2-135M", "servers-smollm2", _EQUAL | {"H": 64}, "vs vllm", 1.3),
    Goal(f"{_STEP}, tiny model", "steps-demo", {"lengths": "own_share"}, "floor", 5.0, at_most=True),
    Goal(f"{_STEP}, SmolLM2-135M", "steps-smollm2", {"lengths": "own_share"}, "floor", 1.2, at_most=True),
    Goal(
        "the wait for an update over one copy of the weights, SmolLM2's sizes",
        "weights",
        _UPDATE,
        "copies",
        2.0,
        at_most=True,
    ),
    Goal("training, share of the processor's matmul peak", "trainer-smollm2", {"logits": "all logits"}, "matmul", 0.85),
    Goal("the same with compiled layers", "trainer-smollm2", {"logits": "all logits, compiled layers"}, "matmul", 0.85),
)


def goals(directory: Path) -> list[Record]:
    """What was aimed at, and what was measured; a goal without a result is left out."""
    lines: list[Record] = []
    for goal in GOALS:
        path = directory / f"{goal.result}.json"
        rows = json.loads(path.read_text())["table"] if path.exists() else []
        for row in rows:
            if goal.rows.items() <= row.items():
                value, where = row[goal.column], f", H = {row['H']}" if "H" in row else ""
                met = value <= goal.goal if goal.at_most else value >= goal.goal
                aim = f"at {'most' if goal.at_most else 'least'} {goal.goal:g}"
                lines.append({"what": goal.what + where, "goal": aim, "measured": value, "met": "yes" if met else "no"})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=common.RESULTS)
    options = parser.parse_args()
    print(f"# Results\n\n## Goals\n\n{common.markdown(goals(options.results))}\n")
    with_tables = [path for path in sorted(options.results.glob("*.json")) if '"table"' in path.read_text()]
    print("\n".join(map(section, with_tables)))


if __name__ == "__main__":
    main()
