"""The embedded engine against transformers' `generate` and continuous batching: same model, prompts, lengths, slots, thread.

    OMP_NUM_THREADS=1 python -m benchmarks.engine --model demo --slots 8 32 64 128
    OMP_NUM_THREADS=1 python -m benchmarks.engine --lengths --slots 1 8 64  # only a decode step beside its products

Every request asks for a given number of tokens; all systems ignore end-of-text tokens. Only requested tokens count: a
static batch of `generate` runs until its longest sequence is done, and the extra tokens of the others are useless. Times
are from the first request submitted to the last one finished, including the drain.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

from benchmarks import common
from benchmarks.common import Record
from benchmarks.systems import SYSTEMS, make_jobs, requests, timed
from pipelinerl.engine import LocalEngine
from pipelinerl.engine.attention import StepBatch
from pipelinerl.engine.flat import PACK_FROM, PackedLinear


def compare(options: argparse.Namespace, slots: int, lengths: str) -> list[Record]:
    """Measure all systems alternately on one scenario, each with its own copy of the model."""
    count = slots * (options.waves if lengths == "long_tailed" else options.equal_waves)
    if lengths == "long_tailed":
        wanted = common.long_tailed_lengths(count, options.longest, seed=slots)
    else:
        wanted = common.equal_lengths(count, options.longest)
    models = {
        name: common.fresh_model(options.model, device=options.device, dtype=options.dtype) for name in options.systems
    }
    vocabulary = next(iter(models.values())).config.vocab_size
    jobs = make_jobs(wanted, options.prompt_tokens, vocabulary)
    room = options.prompt_tokens + options.longest
    systems = {name: SYSTEMS[name](model, slots, room) for name, model in models.items()}
    try:
        calls = {name: (lambda system=system: timed(system, jobs)) for name, system in systems.items()}
        scenario = {"model": common.model_label(options.model), "slots": slots, "lengths": lengths}
        return common.take_turns(calls, options.repetitions, scenario=scenario)
    finally:
        for system in systems.values():
            system.close()


def own_share(options: argparse.Namespace, slots: int) -> list[Record]:
    """A decode step beside its matrix products alone, with all slots decoding and no requests starting or ending.

    `share` is the time outside ModelRunner.forward and LocalEngine._draw. `floor` is the time of a step over that of the
    products of its linear layers, of the same shapes and weights; rounds of steps and of products alternate.
    `attention_ms` is the time of attention, which reads all keys and values (`cache_MB` at the last step).
    """
    model = common.fresh_model(options.model, device=options.device, dtype=options.dtype)
    engine = LocalEngine(model, slots=slots, max_length=options.prompt_tokens + options.longest)
    inside = dict.fromkeys(("forward", "draw", "attention"), 0.0)
    runner: Any = engine._runner
    runner.forward = _timer(runner.forward, "forward", inside)
    engine._draw = _timer(engine._draw, "draw", inside)  # type: ignore[method-assign]
    with patch.object(StepBatch, "attend", _timer(StepBatch.attend, "attention", inside)):
        return _own_share(options, slots, model, engine, inside)


def _own_share(
    options: argparse.Namespace, slots: int, model: Any, engine: LocalEngine, inside: dict[str, float]
) -> list[Record]:
    for request in requests(make_jobs([options.longest] * slots, options.prompt_tokens, engine._runner.vocabulary)):
        engine.submit(request)
    while engine.queued or engine._prefills:
        engine.step()
    for _ in range(3):
        engine.step()
    records = []
    steps = min(options.most_steps, (options.longest - 8) // options.repetitions)
    for repetition in range(options.repetitions):
        floor_s = products_s(model, slots, steps)
        inside.update(dict.fromkeys(inside, 0.0))
        begin_s = time.perf_counter()
        for _ in range(steps):
            engine.step()
        wall_s = time.perf_counter() - begin_s
        records.append(
            {
                "model": common.model_label(options.model),
                "slots": slots,
                "lengths": "own_share",
                "system": "pipelinerl",
                "repetition": repetition,
                "step_ms": 1e3 * wall_s / steps,
                "products_ms": 1e3 * floor_s,
                "floor": wall_s / steps / floor_s,
                "share": 1 - (inside["forward"] + inside["draw"]) / wall_s,
                "cache_MB": _cache_bytes(engine, options.prompt_tokens + engine.progress().decode_steps) / 1e6,
                **{f"{part}_ms": 1e3 * part_s / steps for part, part_s in inside.items()},
            }
        )
    return records


@torch.inference_mode()
def products_s(model: Any, rows: int, times: int) -> float:
    """Seconds for the products of all linear layers with `rows` rows: plain, or packed as in the engine if faster."""
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    rows_of = {width: torch.randn(1, rows, width, dtype=model.dtype) for width in {layer.in_features for layer in layers}}
    plain = [(F.linear, rows_of[layer.in_features], layer.weight) for layer in layers]
    ways = [plain]
    if model.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        packed = {layer.weight: PackedLinear(layer.weight) for layer in layers if layer.weight.numel() >= PACK_FROM}
        ways.append([(packed.get(weight, multiply), x, weight) for multiply, x, weight in plain])
    seconds = []
    for way in ways:
        for repetition in range(times + 1):
            if repetition == 1:  # the first is a warm-up
                begin_s = time.perf_counter()
            for multiply, x, weight in way:
                multiply(x, weight)
        seconds.append((time.perf_counter() - begin_s) / times)
    return min(seconds)


def _cache_bytes(engine: LocalEngine, tokens: int) -> float:
    """Bytes of keys and values of all slots with so many tokens each."""
    return sum(part.nbytes for part in engine._runner.kv.parts(engine.max_length)) * tokens / engine.max_length


def _timer(call: Callable[..., Any], part: str, inside: dict[str, float]) -> Callable[..., Any]:
    def timed_call(*args: Any, **kwargs: Any) -> Any:
        begin_s = time.perf_counter()
        result = call(*args, **kwargs)
        inside[part] += time.perf_counter() - begin_s
        return result

    return timed_call


def table_of(records: Sequence[Record]) -> list[Record]:
    """A row for each scenario: tokens/s of each system (medians), and the engine's ratios to the others."""
    rows = []
    for slots, lengths in dict.fromkeys((r["slots"], r["lengths"]) for r in records):
        chosen = [r for r in records if (r["slots"], r["lengths"]) == (slots, lengths)]
        row: Record = {"model": chosen[0]["model"], "H": slots, "lengths": lengths}
        if lengths == "own_share":
            row |= {
                name: statistics.median(r[name] for r in chosen)
                for name in ("step_ms", "products_ms", "attention_ms", "draw_ms", "floor", "share", "cache_MB")
            }
        else:
            rates = common.medians(chosen, "tokens_per_s")
            row |= {f"{name} tok/s": rate for name, rate in rates.items()}
            row |= {f"vs {name}": rates["pipelinerl"] / rate for name, rate in rates.items() if name != "pipelinerl"}
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="`demo`, or a folder of a Hugging Face causal LM")
    parser.add_argument("--slots", type=int, nargs="+", default=[8, 32, 64, 128])
    parser.add_argument("--lengths", nargs="*", default=["equal", "long_tailed"], choices=["equal", "long_tailed"])
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS))
    parser.add_argument("--longest", type=int, default=219, help="tokens of the longest completion")
    parser.add_argument("--prompt-tokens", type=int, default=6)
    parser.add_argument("--waves", type=int, default=8, help="long-tailed requests per slot")
    parser.add_argument("--equal-waves", type=int, default=4, help="requests per slot with equal lengths")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--most-steps", type=int, default=1000, help="decode steps per repetition beside the products")
    parser.add_argument("--device", default="cpu", help="torch device of all systems, such as cuda")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    options = common.measuring_options(parser, "engine-MODEL")
    torch.manual_seed(0)
    machine_before = common.machine()
    records: list[Record] = []
    for slots in options.slots:
        for lengths in options.lengths:
            records += compare(options, slots, lengths)
            print(common.markdown(table_of(records)[-1:]), flush=True)
        if options.device == "cpu":  # GPU calls are asynchronous, so timing them shows no shares
            records += own_share(options, slots)
    common.write_results(
        options.name or f"engine-{common.model_label(options.model)}",
        settings=common.settings_of(options),
        machine_before=machine_before,
        records=records,
        table=table_of(records),
        directory=options.results,
    )


if __name__ == "__main__":
    main()
