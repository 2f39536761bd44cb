"""Shared parts of the benchmarks: machine description, alternating measurement, workloads, result files."""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch.profiler import profile

from pipelinerl.config.schema import ModelConfig
from pipelinerl.models.loading import load_model

RESULTS = Path(__file__).parent / "results"

Record = dict[str, Any]


def machine() -> Record:
    """Where and when a measurement was made; the load average shows whether the machine was idle."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "torch_threads": torch.get_num_threads(),
        "glibc_tunables": os.environ.get("GLIBC_TUNABLES"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def take_turns(
    systems: Mapping[str, Callable[[], Record]], repetitions: int, *, scenario: Record, warm_up: bool = True
) -> list[Record]:
    """Measure the systems alternately, A B C A B C ..., so that disturbances of the machine affect all of them equally.

    Each call does the whole work once and returns its measurements. The first round is discarded unless `warm_up` is off.
    """
    records: list[Record] = []
    for repetition in range(-1 if warm_up else 0, repetitions):
        for name, measure in systems.items():
            measured = measure()
            if repetition >= 0:
                records.append({**scenario, "system": name, "repetition": repetition, **measured})
    return records


def peak_allocated(work: Callable[[], object]) -> int:
    """The most bytes that `work` has allocated for tensors on the CPU at any time, beyond those that were there before."""
    with profile(profile_memory=True) as profiled:
        work()
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    changes = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(
        itertools.accumulate(event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns())), default=0
    )


def spread(values: Sequence[float]) -> Record:
    """Median, extremes and count of a few repetitions."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}


def medians(records: Iterable[Record], quantity: str, **scenario: Any) -> dict[str, float]:
    """The median of `quantity` for each system, over the records of one scenario."""
    by_system: dict[str, list[float]] = {}
    for record in records:
        if all(record.get(key) == value for key, value in scenario.items()):
            by_system.setdefault(record["system"], []).append(record[quantity])
    return {system: statistics.median(values) for system, values in by_system.items()}


def write_results(
    name: str,
    *,
    settings: Record,
    machine_before: Record,
    records: Sequence[Record],
    table: Sequence[Record],
    directory: Path,
) -> None:
    """Write `directory/name.json`: settings, the machine before and after, all repetitions, table. Prints it."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    result = {
        "name": name,
        "settings": settings,
        "machine": machine_before,
        "ended": {key: machine()[key] for key in ("date", "load_average")},
        "table": list(table),
        "repetitions": list(records),
    }
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(markdown(table))
    print(f"\n{path}")


def markdown(rows: Sequence[Record]) -> str:
    """Rows as a Markdown table with the union of their columns, in order of appearance."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(row.get(column)) for column in columns) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def measuring_options(parser: argparse.ArgumentParser, name: str) -> argparse.Namespace:
    """The options of a benchmark in this process, which gets the threads. `name`: of its result file, if not given."""
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--name", help=f"name of the result file (default: {name})")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    return options


def settings_of(options: argparse.Namespace) -> Record:
    """Command-line options, in the form stored in results."""
    return {key: _shown(value) if isinstance(value, Path) else value for key, value in vars(options).items()}


def _shown(path: Path) -> str:
    """Relative to the repository root if inside it, so that results do not contain local paths."""
    root = RESULTS.parent.parent
    return str(path.relative_to(root) if path.is_relative_to(root) else path)


def fresh_model(path: str, *, device: str = "cpu", dtype: Literal["float32", "bfloat16"] = "float32") -> Any:
    """A separate copy of the model for one system, with PyTorch's fused attention (`sdpa`)."""
    model = load_model(ModelConfig(path=path, dtype=dtype), device)
    model.set_attn_implementation("sdpa")
    return model


def model_label(path: str) -> str:
    """A short name of the model, for files and tables."""
    return Path(path).name


def equal_lengths(count: int, longest: int) -> list[int]:
    """`count` completions of the mean length of `long_tailed_lengths`, so that both workloads have equally many tokens."""
    mean = statistics.fmean(long_tailed_lengths(4096, longest, seed=0))
    return [round(mean)] * count


def long_tailed_lengths(count: int, longest: int, seed: int) -> list[int]:
    """Lengths of full answers to the demo's problems, scaled to at most `longest` tokens.

    An answer has s = min(36, 1 + floor(Exp(mean 5))) steps of six tokens and three tokens for the result: the median is
    an eighth of the maximum.
    """
    rng = random.Random(f"lengths/{seed}")
    steps = [min(36, 1 + int(rng.expovariate(1 / 5))) for _ in range(count)]
    return [max(1, round((6 * s + 3) * longest / 219)) for s in steps]
