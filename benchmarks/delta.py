"""How many weights one optimizer step changes, and the bytes of the delta (`weights.encoding: delta`) against all weights.

    OMP_NUM_THREADS=1 python -m benchmarks.delta --models demo ~/models/smollm2-135m-instruct

Each case trains for a few steps at one learning rate, all weights or LoRA, on rollouts that the embedded engine sampled
from the initial weights, with random rewards: AdamW makes the size of a change depend on the learning rate much more than on
the reward. The weights after each step are compared bit for bit with those before it, as they would be published:

    float32             as trained
    bfloat16            rounded to bfloat16 (what `model.dtype: bfloat16` publishes of its float32 master weights)
    bfloat16, settled   the same, with master weights moved by a random part of a rounding interval, as long training does.
                        The weights of a released file are not spread evenly over their intervals (in a bfloat16 file they
                        are in the middle, after quantization often at an edge), so its first steps are not typical
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from benchmarks import common
from benchmarks.common import Record
from pipelinerl.config.schema import LoraConfig, ModelConfig, TrainerConfig
from pipelinerl.engine import LocalEngine
from pipelinerl.environments.tasks import gcd
from pipelinerl.models.loading import load_tokenizer
from pipelinerl.models.lora import LoraModel
from pipelinerl.models.state import first_names
from pipelinerl.trainer.step import Learner
from pipelinerl.types import GenerationRequest, SamplingParams, Segment, TrainingSample
from pipelinerl.weights.delta import apply, encode
from pipelinerl.weights.layout import layout_of

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "bfloat16, settled": torch.bfloat16}
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def prompts(path: str, count: int) -> list[tuple[int, ...]]:
    """The demo's problems, or for other models a sum as a chat."""
    tokenizer = load_tokenizer(ModelConfig(path=path))
    if path == "demo":
        problems = [gcd.problem_at(index, seed=0, held_out=False) for index in range(count)]
        return [tuple(tokenizer.encode(gcd.prompt_text(problem))) for problem in problems]
    rng = random.Random("sums")
    asked = [f"What is {rng.randrange(100)} + {rng.randrange(100)}? Think step by step." for _ in range(count)]
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False)
        for text in asked
    ]
    return [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts]


def rollouts(path: str, problems: int, group: int, max_tokens: int) -> list[TrainingSample]:
    """`group` answers to each problem, with rewards drawn from 0 and 1."""
    rng = random.Random("rewards")
    engine = LocalEngine(common.fresh_model(path), slots=group, max_length=512)
    samples = []
    for index, prompt in enumerate(prompts(path, problems)):
        requests = [
            GenerationRequest(id=f"{index}-{k}", prompt_ids=prompt, sampling=SamplingParams(max_tokens=max_tokens, seed=k))
            for k in range(group)
        ]
        rewards = [float(k < rng.randrange(1, group)) for k in range(group)]
        for answer, reward in zip(engine.generate(requests), rewards, strict=True):
            end = len(prompt) + len(answer.token_ids)
            samples.append(
                TrainingSample(
                    id=answer.request_id,
                    group_index=index,
                    segments=(Segment(token_ids=(*prompt, *answer.token_ids), sampled=((len(prompt), end),)),),
                    behaviour_logprobs=answer.logprobs,
                    versions=(0,) * len(answer.token_ids),
                    advantage=reward - statistics.fmean(rewards),
                    reward=reward,
                )
            )
    return samples


def moved(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """For each weight, a random number between minus and plus half of the interval that bfloat16 rounds to one value."""
    generator = torch.Generator().manual_seed(0)
    offsets = {}
    for name, first in first_names(weights).items():
        if name == first:
            weight = weights[name]
            spacing = torch.ldexp(torch.ones_like(weight), torch.frexp(weight).exponent - 8)
            offsets[name] = (torch.rand(weight.shape, generator=generator) - 0.5) * spacing * (weight != 0)
    return offsets


class Published:
    """The weights in a flat buffer, as a sender holds them, and their deltas (`delta_bytes` None: not shorter)."""

    def __init__(self, weights: Mapping[str, Tensor], dtype: torch.dtype, offsets: Mapping[str, Tensor] | None) -> None:
        self._dtype, self._offsets = dtype, offsets
        converted = {name: weights[name].to(dtype) for name in first_names(weights).values()}
        self._layout = layout_of({name: converted[first] for name, first in first_names(weights).items()})
        self._held_U8 = torch.zeros(self._layout.buffer_bytes, dtype=torch.uint8)
        self._fill(self._held_U8, weights)

    def update(self, weights: Mapping[str, Tensor]) -> Record:
        """Publish new weights. Checks that a delta restores them exactly."""
        new_U8 = torch.zeros_like(self._held_U8)
        self._fill(new_U8, weights)
        bits = BITS[self._dtype]
        changed = int((new_U8.view(bits) != self._held_U8.view(bits)).sum())
        begin_s = time.perf_counter()
        delta_U8 = encode(new_U8, self._held_U8, below=new_U8.numel())
        encoded_s = time.perf_counter()
        if delta_U8 is not None:
            apply(delta_U8, self._held_U8)
            if not torch.equal(self._held_U8, new_U8):
                raise SystemExit("the delta did not restore the weights")
        self._held_U8 = new_U8
        return {
            "elements": new_U8.view(bits).numel(),
            "changed": changed,
            "full_bytes": new_U8.numel(),
            "delta_bytes": delta_U8.numel() if delta_U8 is not None else None,
            "encode_s": encoded_s - begin_s,
        }

    def _fill(self, buffer_U8: Tensor, weights: Mapping[str, Tensor]) -> None:
        views = self._layout.views(buffer_U8)
        for name, first in first_names(weights).items():
            if name == first:
                offset = self._offsets[name] if self._offsets is not None else 0.0
                views[name].copy_(weights[name] + offset)


def measure(path: str, samples: Sequence[TrainingSample], lora: bool, learning_rate: float, steps: int) -> Iterator[Record]:
    """Train with one setting; a record for each step and type."""
    model = common.fresh_model(path)
    adapters = LoraModel(model, LoraConfig(), seed=0) if lora else None
    config = TrainerConfig(learning_rate=learning_rate, micro_batch_tokens=2048, steps=steps)
    learner = Learner(model, config, temperature=1.0, lora=adapters)
    first = learner.weights()
    published = {name: Published(first, dtype, moved(first) if "," in name else None) for name, dtype in TYPES.items()}
    share = len(samples) // steps
    for step in range(steps):
        result = learner.step(samples[step * share : (step + 1) * share], step)
        weights = learner.weights()
        case = {"model": common.model_label(path), "trained": "LoRA" if lora else "all", "learning_rate": learning_rate}
        for name, buffer in published.items():
            yield {**case, "type": name, "step": step + 1, "grad_norm": result.grad_norm, **buffer.update(weights)}


def table_of(records: Sequence[Record]) -> list[Record]:
    """A row for each model, kind of training and learning rate: medians over the steps. Delta 100%: all weights are sent."""
    rows = []
    for case in dict.fromkeys((r["model"], r["trained"], r["learning_rate"]) for r in records):
        row: Record = dict(zip(("model", "trained", "learning rate"), (case[0], case[1], f"{case[2]:g}"), strict=True))
        for name in TYPES:
            chosen = [r for r in records if (r["model"], r["trained"], r["learning_rate"]) == case and r["type"] == name]
            row[f"{name}: changed %"] = 100 * statistics.median(r["changed"] / r["elements"] for r in chosen)
            row[f"{name}: delta %"] = 100 * statistics.median(
                (r["delta_bytes"] if r["delta_bytes"] is not None else r["full_bytes"]) / r["full_bytes"] for r in chosen
            )
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["demo"], help="`demo`, or folders of Hugging Face causal LMs")
    parser.add_argument("--learning-rates", nargs="+", type=float, default=[1e-3, 1e-4, 1e-5, 1e-6])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=32, help="longest answer")
    options = common.measuring_options(parser, "delta")
    machine_before = common.machine()
    records: list[Record] = []
    for path in options.models:
        samples = rollouts(path, options.steps * options.batch_size // 4, 4, options.max_tokens)
        for lora in (False, True):
            for rate in options.learning_rates:
                for record in measure(path, samples, lora, rate, options.steps):
                    records.append(record)
                    print(record, flush=True)
    common.write_results(
        options.name or "delta",
        settings={**common.settings_of(options), "models": [common.model_label(path) for path in options.models]},
        machine_before=machine_before,
        records=records,
        table=table_of(records),
        directory=options.results,
    )


if __name__ == "__main__":
    main()
