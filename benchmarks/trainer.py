"""One optimizer step: packed rows (this package) compared with padded batches, with and without sorting by length.

    OMP_NUM_THREADS=1 python -m benchmarks.trainer --model demo

All three take the same step on the same samples: same loss, same optimizer, same token budget per micro-batch, which in a
padded batch includes the padding. The padded ones call the unmodified model (`sdpa`, an attention mask). The losses must
agree to 1e-5; `loss_error` is the largest relative difference to the packed one.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import common
from benchmarks.common import Record
from pipelinerl.config.schema import TrainerConfig
from pipelinerl.trainer.logprobs import token_logprobs
from pipelinerl.trainer.losses import LossInputs, make_loss
from pipelinerl.trainer.optimizer import Optimizer
from pipelinerl.trainer.step import Learner
from pipelinerl.types import Segment, TrainingSample

LOSS_TOLERANCE = 1e-5


class PaddedLearner:
    """The straightforward step: pad to the longest sequence of the micro-batch, mask, forward, backward."""

    def __init__(self, model: Any, config: TrainerConfig, *, by_length: bool) -> None:
        self._model, self._config, self._by_length = model, config, by_length
        self._loss = make_loss(config)
        self._optimizer = Optimizer(model, betas=config.betas, weight_decay=config.weight_decay)
        self.cells = 0

    def step(self, samples: Sequence[TrainingSample]) -> float:
        """One optimizer step. Returns the loss and sets `cells` to the number of computed tokens, including padding."""
        normalizer = sum(sample.sampled_count for sample in samples)
        ordered = sorted(samples, key=lambda s: s.length) if self._by_length else list(samples)
        self._optimizer.zero_grad()
        self.cells = 0
        loss = 0.0
        for batch in _padded_batches(ordered, self._config.micro_batch_tokens):
            part = self._loss_sum(batch) / normalizer
            part.backward()
            self._optimizer.accumulate()
            loss += float(part.detach())
        self._optimizer.step(learning_rate=self._config.learning_rate, max_grad_norm=self._config.max_grad_norm)
        return loss

    def _loss_sum(self, batch: Sequence[TrainingSample]) -> torch.Tensor:
        segments = [sample.segments[0] for sample in batch]
        longest = max(len(segment.token_ids) for segment in segments)
        self.cells += longest * len(batch)
        ids_BL = torch.zeros((len(batch), longest), dtype=torch.long)
        seen_BL = torch.zeros((len(batch), longest), dtype=torch.long)
        predicts_BL = torch.zeros((len(batch), longest), dtype=torch.bool)
        for row, segment in enumerate(segments):
            ids_BL[row, : len(segment.token_ids)] = torch.tensor(segment.token_ids)
            seen_BL[row, : len(segment.token_ids)] = 1
            predicts_BL[row, torch.tensor(segment.sampled_positions) - 1] = True
        logits_BLV = self._model(input_ids=ids_BL, attention_mask=seen_BL, use_cache=False).logits
        logprobs_P, _ = token_logprobs(logits_BLV[predicts_BL], ids_BL.roll(-1, dims=1)[predicts_BL], 1.0)
        counts_B = torch.tensor([sample.sampled_count for sample in batch])
        inputs = LossInputs(
            logprobs_N=logprobs_P,
            behaviour_logprobs_N=torch.tensor([lp for sample in batch for lp in sample.behaviour_logprobs]),
            lags_N=torch.zeros(len(logprobs_P), dtype=torch.long),
            advantages_N=torch.tensor([sample.advantage for sample in batch]).repeat_interleave(counts_B),
            sequence_N=torch.arange(len(batch)).repeat_interleave(counts_B),
            sequence_count=len(batch),
            reference_logprobs_N=None,
        )
        return self._loss(inputs).loss_N.sum()


def _padded_batches(samples: Sequence[TrainingSample], budget: int) -> list[list[TrainingSample]]:
    """Batches of consecutive samples that fit the budget when padded to the longest of them."""
    batches: list[list[TrainingSample]] = []
    longest = 0
    for sample in samples:
        longest = max(longest, sample.length)
        if not batches or longest * (len(batches[-1]) + 1) > budget:
            batches.append([])
            longest = sample.length
        batches[-1].append(sample)
    return batches


def make_samples(count: int, longest: int, prompt_tokens: int, vocabulary: int) -> list[TrainingSample]:
    """Rollouts of random tokens with lengths like the demo's, all with an advantage."""
    rng = random.Random("samples")
    samples = []
    for i, length in enumerate(common.long_tailed_lengths(count, longest, seed=1)):
        end = prompt_tokens + length
        segment = Segment(token_ids=tuple(rng.randrange(vocabulary) for _ in range(end)), sampled=((prompt_tokens, end),))
        samples.append(
            TrainingSample(
                id=f"{i}",
                group_index=i,
                segments=(segment,),
                behaviour_logprobs=tuple(rng.uniform(-6.0, -2.0) for _ in range(length)),
                versions=(0,) * length,
                advantage=rng.choice((-1.0, -0.5, 0.5, 1.0)),
                reward=0.0,
            )
        )
    return samples


def packed(model: Any, config: TrainerConfig, samples: Sequence[TrainingSample]) -> Callable[[], Record]:
    learner = Learner(model, config, temperature=1.0)

    def measure() -> Record:
        begin_s = time.perf_counter()
        result = learner.step(samples, version=0)
        wall_s = time.perf_counter() - begin_s
        return {"wall_s": wall_s, "loss": result.loss, "padding_free": result.packing_efficiency}

    return measure


def padded(model: Any, config: TrainerConfig, samples: Sequence[TrainingSample], *, by_length: bool) -> Callable[[], Record]:
    learner = PaddedLearner(model, config, by_length=by_length)
    tokens = sum(sample.length for sample in samples)

    def measure() -> Record:
        begin_s = time.perf_counter()
        loss = learner.step(samples)
        wall_s = time.perf_counter() - begin_s
        return {"wall_s": wall_s, "loss": loss, "padding_free": tokens / learner.cells}

    return measure


def table_of(records: Sequence[Record], tokens: int) -> list[Record]:
    """A row for each system: time of a step (median), tokens/s, and how much faster packing is."""
    steps_s = common.medians(records, "wall_s")
    packed_loss = {r["repetition"]: r["loss"] for r in records if r["system"] == "packed"}
    rows = []
    for system, step_s in steps_s.items():
        chosen = [r for r in records if r["system"] == system]
        rows.append(
            {
                "system": system,
                "step_s": step_s,
                "tokens/s": tokens / step_s,
                "packed is faster by": step_s / steps_s["packed"],
                "padding_free": statistics.median(r["padding_free"] for r in chosen),
                "loss_error": max(abs(r["loss"] / packed_loss[r["repetition"]] - 1) for r in chosen),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="`demo`, or a folder of a Hugging Face causal LM")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--longest", type=int, default=219, help="tokens of the longest completion")
    parser.add_argument("--prompt-tokens", type=int, default=6)
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--repetitions", type=int, default=7)
    options = common.measuring_options(parser, "trainer-MODEL")
    machine_before = common.machine()
    config = TrainerConfig(micro_batch_tokens=options.micro_batch_tokens)
    models = [common.fresh_model(options.model) for _ in range(3)]
    samples = make_samples(options.samples, options.longest, options.prompt_tokens, models[0].config.vocab_size)
    systems = {
        "packed": packed(models[0], config, samples),
        "padded": padded(models[1], config, samples, by_length=False),
        "padded, sorted by length": padded(models[2], config, samples, by_length=True),
    }
    scenario = {"model": common.model_label(options.model)}
    records = common.take_turns(systems, options.repetitions, scenario=scenario)
    table = table_of(records, tokens=sum(sample.length for sample in samples))
    common.write_results(
        options.name or f"trainer-{common.model_label(options.model)}",
        settings=common.settings_of(options),
        machine_before=machine_before,
        records=records,
        table=table,
        directory=options.results,
    )
    if any(row["loss_error"] > LOSS_TOLERANCE for row in table):
        raise SystemExit("the losses differ: this compares different computations")


if __name__ == "__main__":
    main()
