"""One optimizer step with all logits in memory and in chunks: time, memory, and the share of the processor's matmul peak.

    OMP_NUM_THREADS=1 python -m benchmarks.head --model PATH/TO/SmolLM2-135M-Instruct
    OMP_NUM_THREADS=1 python -m benchmarks.head --model ... --head-chunks 0 --compile --samples 96 --name trainer-compiled

Each takes the same step on the same samples, with `--compile` also with compiled layers. `peak_MB` is what the step
allocates at most beyond weights, gradients and the optimizer's state. `matmul` is the share of the peak: the operations in
matrix products of a step with all logits, over the time and over the best speed of a product of the model's sizes. The
losses must agree to 1e-5.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import common
from benchmarks.common import Record
from benchmarks.trainer import LOSS_TOLERANCE, make_samples
from pipelinerl.config.schema import LoraConfig, TrainerConfig
from pipelinerl.models.lora import LoraModel
from pipelinerl.trainer.step import Learner
from pipelinerl.types import TrainingSample


def learner_of(path: str, config: TrainerConfig, lora: LoraConfig | None) -> Learner:
    model = common.fresh_model(path)
    adapters = None if lora is None else LoraModel(model, lora, seed=0)
    return Learner(model, config, temperature=1.0, lora=adapters)


def step(learner: Learner, samples: Sequence[TrainingSample]) -> Callable[[], Record]:
    def measure() -> Record:
        begin_s = time.perf_counter()
        result = learner.step(samples, version=0)
        return {"wall_s": time.perf_counter() - begin_s, "loss": result.loss}

    return measure


def matmul_peak(tokens: int, hidden: int, width: int) -> float:
    """FLOP/s of the best of several products of a micro-batch and a matrix."""
    a, b = torch.randn(tokens, hidden), torch.randn(hidden, width)
    best_s = float("inf")
    for _ in range(20):
        begin_s = time.perf_counter()
        torch.mm(a, b)
        best_s = min(best_s, time.perf_counter() - begin_s)
    return 2 * tokens * hidden * width / best_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder of a Hugging Face causal LM")
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--longest", type=int, default=219, help="tokens of the longest completion")
    parser.add_argument("--prompt-tokens", type=int, default=6)
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--head-chunks", type=int, nargs="+", default=[0, 128])
    parser.add_argument("--compile", action="store_true", help="also with compiled layers (trainer.compile)")
    parser.add_argument("--lora", action="store_true", help="adapters, so that the head is frozen")
    parser.add_argument("--repetitions", type=int, default=3)
    options = common.measuring_options(parser, "head-MODEL")
    machine_before = common.machine()
    lora = LoraConfig() if options.lora else None

    def learner_with(chunk: int, *, compiled: bool) -> Learner:
        config = TrainerConfig(micro_batch_tokens=options.micro_batch_tokens, head_chunk=chunk, compile=compiled)
        return learner_of(options.model, config, lora)

    counted = learner_with(0, compiled=False)  # not one of those that are measured: all of them must stay at the same step
    model = counted.model.config
    samples = make_samples(options.samples, options.longest, options.prompt_tokens, model.vocab_size)
    with FlopCounterMode(display=False) as counter:
        counted.step(samples, version=0)
    del counted
    learners = {}
    for chunk in options.head_chunks:
        for compiled in (False, True) if options.compile else (False,):
            name = f"{chunk} tokens at a time" if chunk else "all logits"
            learners[name + (", compiled layers" if compiled else "")] = learner_with(chunk, compiled=compiled)
    peaks_bytes = {}
    for name, learner in learners.items():
        learner.step(samples, version=0)  # makes the optimizer's state
        peaks_bytes[name] = common.peak_allocated(lambda learner=learner: learner.step(samples, version=0))
    measured = {name: step(learner, samples) for name, learner in learners.items()}
    scenario = {"model": common.model_label(options.model)}
    records = common.take_turns(measured, options.repetitions, scenario=scenario, warm_up=False)
    peak = matmul_peak(min(2048, options.micro_batch_tokens), model.hidden_size, model.intermediate_size)
    steps_s = common.medians(records, "wall_s")
    fastest_first = next(iter(steps_s.values()))
    table: list[Record] = [
        {
            "logits": name,
            "step_s": step_s,
            "time": step_s / fastest_first,
            "peak_MB": peaks_bytes[name] / 1e6,
            "matmul": counter.get_total_flops() / step_s / peak,
        }
        for name, step_s in steps_s.items()
    ]
    common.write_results(
        options.name or f"head-{common.model_label(options.model)}{'-lora' if lora else ''}",
        settings=common.settings_of(options),
        machine_before=machine_before,
        records=records,
        table=table,
        directory=options.results,
    )
    if options.compile and not any("compiled" in learner.runner for learner in learners.values()):
        raise SystemExit("the layers can't be compiled here; the warning above says why")
    for repetition in {record["repetition"] for record in records}:
        losses = [record["loss"] for record in records if record["repetition"] == repetition]
        if max(losses) - min(losses) > LOSS_TOLERANCE * max(1.0, abs(losses[0])):
            raise SystemExit("the losses differ: this compares different computations")


if __name__ == "__main__":
    main()
