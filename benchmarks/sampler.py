"""Time per call of the sampler and of its predecessor, which summed in float32.

    OMP_NUM_THREADS=1 python -m benchmarks.sampler

Both are measured alternately on the same logits (Gaussian with one likely token) and uniform numbers, at temperature 1. A
repetition is the mean of several calls; `ratio` is the ratio of medians, below 1 if the current sampler is faster.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks import common
from benchmarks.common import Record
from pipelinerl.engine.sampler import sample

SHAPES = ((64, 49_152), (64, 151_936), (64, 16), (64, 32), (64, 50), (1, 32), (1, 49_152), (1, 151_936))
"""Rows (sequences in progress) and vocabulary: SmolLM2, Qwen2.5, the demo; and a single row of each."""


def float32_sums(logits_nV: Tensor, uniforms_n: Tensor) -> tuple[Tensor, Tensor]:
    """The former `sample`: one running sum in float32."""
    probabilities_nV = logits_nV.float().softmax(-1)
    cumulative_nV = probabilities_nV.cumsum(-1)
    target_n1 = (uniforms_n * (1 - 2e-7)).to(cumulative_nV.dtype)[:, None] * cumulative_nV[:, -1:]
    ids_n1 = torch.searchsorted(cumulative_nV, target_n1, right=True)
    return ids_n1[:, 0], probabilities_nV.gather(1, ids_n1)[:, 0].log()


def now(logits_nV: Tensor, uniforms_n: Tensor) -> tuple[Tensor, Tensor]:
    return sample(logits_nV, None, uniforms_n)


def measure(options: argparse.Namespace, rows: int, vocabulary: int) -> list[Record]:
    generator = torch.Generator().manual_seed(0)
    logits_nV = torch.randn(rows, vocabulary, generator=generator) * 2.5
    logits_nV[:, 7] = 16.5 if vocabulary > 1000 else 3.0
    uniforms_n = torch.rand(rows, dtype=torch.float64, generator=generator)
    logits_nV, uniforms_n = logits_nV.to(options.device), uniforms_n.to(options.device)
    calls = max(3, min(2000, options.elements // logits_nV.numel()))

    def timed(draw: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Record:
        begin_s = time.perf_counter()
        for _ in range(calls):
            ids_n, _ = draw(logits_nV, uniforms_n)
        ids_n.tolist()  # waits for a GPU
        return {"call_us": 1e6 * (time.perf_counter() - begin_s) / calls}

    systems = {"now": lambda: timed(now), "float32_sums": lambda: timed(float32_sums)}
    with torch.inference_mode():
        return common.take_turns(systems, options.repetitions, scenario={"rows": rows, "vocabulary": vocabulary})


def table_of(records: list[Record]) -> list[Record]:
    table = []
    for rows, vocabulary in dict.fromkeys((r["rows"], r["vocabulary"]) for r in records):
        times = common.medians(records, "call_us", rows=rows, vocabulary=vocabulary)
        us = {f"{name} us": time_us for name, time_us in times.items()}
        table.append({"rows": rows, "V": vocabulary, **us, "ratio": times["now"] / times["float32_sums"]})
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--elements", type=int, default=3_000_000, help="approximate number of logits per repetition")
    parser.add_argument("--device", default="cpu", help="torch device, such as cuda")
    options = common.measuring_options(parser, "sampler")
    machine_before = common.machine()
    records = [record for shape in SHAPES for record in measure(options, *shape)]
    settings = common.settings_of(options)
    common.write_results(
        options.name or "sampler",
        settings=settings,
        machine_before=machine_before,
        records=records,
        table=table_of(records),
        directory=options.results,
    )


if __name__ == "__main__":
    main()
