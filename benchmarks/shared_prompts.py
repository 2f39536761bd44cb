"""One optimizer step on groups of attempts: prompts that go through the model once, compared with once for each attempt.

    OMP_NUM_THREADS=1 python -m benchmarks.shared_prompts --model demo
    OMP_NUM_THREADS=1 python -m benchmarks.shared_prompts --model demo --run RUN_DIR
    OMP_NUM_THREADS=1 python -m benchmarks.shared_prompts --model demo --sweep

Both systems take the same step on the same samples with a learning rate near 0, so their losses must agree to 1e-5. A
workload is `PROMPT:ANSWER` tokens; answers are random, with the same length or the demo's lengths (`tail`). Or it is the
latest rollouts of a run. `forwarded` is the tokens that went through the model, `unique` the tokens of the prefix tree of
all sequences of the step. `--sweep` finds the part of a sequence from which sharing pays: every prompt is shared.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import common
from benchmarks.common import Record
from benchmarks.weights import make_model
from pipelinerl.config.schema import TrainerConfig
from pipelinerl.trainer.step import Learner
from pipelinerl.types import Group, Segment, TrainingSample

LOSS_TOLERANCE = 1e-5
SHARED, SEPARATE = "shared", "separate"
WORKLOADS = {"demo": ["144:36", "36:36", "9:36", "7:tail"], "135m": ["128:32", "80:80", "32:128"]}
SWEEP = {"demo": ["4:36", "7:36", "9:36", "12:36", "18:36", "36:36"], "135m": ["4:64", "8:64", "16:64"]}


def make_samples(workload: str, samples: int, attempts: int, vocabulary: int) -> list[TrainingSample]:
    """Groups of `attempts` with a random prompt each, and random answers; all have an advantage."""
    rng = random.Random(workload)
    prompt_tokens, answer = workload.split(":")
    lengths = common.long_tailed_lengths(samples, 219, seed=1) if answer == "tail" else [int(answer)] * samples
    made: list[TrainingSample] = []
    prompt: tuple[int, ...] = ()
    for i, length in enumerate(lengths):
        if i % attempts == 0:
            prompt = tuple(rng.randrange(vocabulary) for _ in range(int(prompt_tokens)))
        ids = (*prompt, *(rng.randrange(vocabulary) for _ in range(length)))
        made.append(
            TrainingSample(
                id=f"{i}",
                group_index=i // attempts,
                segments=(Segment(token_ids=ids, sampled=((len(prompt), len(ids)),)),),
                behaviour_logprobs=tuple(rng.uniform(-6.0, -2.0) for _ in range(length)),
                versions=(0,) * length,
                advantage=rng.choice((0.25, 0.5, 0.75, 1.0)),
                reward=0.0,
            )
        )
    return made


def recorded_samples(run_dir: Path, count: int) -> list[TrainingSample]:
    """The latest rollouts of the run that have an advantage, in whole groups, at most `count`."""
    made: list[TrainingSample] = []
    for line in reversed((run_dir / "rollouts" / "rollouts.jsonl").read_bytes().splitlines()):
        group = msgspec.json.decode(line, type=Group)
        mean = statistics.fmean(rollout.reward for rollout in group.rollouts)
        for rollout in group.rollouts:
            (turn,) = rollout.turns
            ids = turn.prompt_ids + turn.completion.token_ids
            made.append(
                TrainingSample(
                    id=rollout.id,
                    group_index=group.index,
                    segments=(Segment(token_ids=ids, sampled=((len(turn.prompt_ids), len(ids)),)),),
                    behaviour_logprobs=turn.completion.logprobs,
                    versions=(0,) * len(turn.completion.logprobs),
                    advantage=rollout.reward - mean,
                    reward=rollout.reward,
                )
            )
        made = [sample for sample in made if sample.advantage]
        if len(made) + len(group.rollouts) > count:
            break
    return made


def unique_tokens(samples: Sequence[TrainingSample]) -> int:
    """The nodes of the prefix tree of all sequences, without what this package makes of it."""
    ids = sorted(segment.token_ids for sample in samples for segment in sample.segments)

    def common_tokens(a: tuple[int, ...], b: tuple[int, ...]) -> int:
        return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

    return sum(map(len, ids)) - sum(common_tokens(a, b) for a, b in pairwise(ids))


def system(
    model: Any, config: TrainerConfig, samples: Sequence[TrainingSample], least: float | None
) -> Callable[[], Record]:
    learner = Learner(model, config, temperature=1.0)
    if least is not None:
        learner._least_shared = least

    def measure() -> Record:
        begin_s = time.perf_counter()
        result = learner.step(samples, version=0)
        wall_s = time.perf_counter() - begin_s
        counts = {"forwarded": result.tokens_forwarded, "micro_batches": result.micro_batches}
        return {"wall_s": wall_s, "loss": result.loss, **counts}

    return measure


def table_of(records: Sequence[Record]) -> list[Record]:
    """A row for each workload."""
    rows = []
    for workload in dict.fromkeys(record["workload"] for record in records):
        here = [record for record in records if record["workload"] == workload]
        shared, separate = ([r for r in here if r["system"] == name] for name in (SHARED, SEPARATE))
        unique, step_s = here[0]["unique"], common.medians(here, "wall_s")
        pairs = list(zip(separate, shared, strict=True))
        rows.append(
            {
                "prompt:answer": workload,
                "shared part of a sequence": here[0]["part"],
                "tokens": separate[0]["forwarded"],
                "forwarded / unique, separate": separate[0]["forwarded"] / unique,
                "forwarded / unique, shared": shared[0]["forwarded"] / unique,
                "separate s": step_s[SEPARATE],
                "shared s": step_s[SHARED],
                "faster by": common.spread([a["wall_s"] / b["wall_s"] for a, b in pairs])["median"],
                "loss_error": max(abs(b["loss"] / a["loss"] - 1) for a, b in pairs),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="`demo`, `135m` (random weights), or a folder of a causal LM")
    parser.add_argument("--workloads", nargs="+", help="PROMPT:ANSWER, in tokens (default: by model)")
    parser.add_argument("--run", type=Path, help="take the rollouts of this run directory instead")
    parser.add_argument("--sweep", action="store_true", help="share every prompt")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--attempts", type=int, default=16, help="attempts of a group (K)")
    parser.add_argument("--micro-batch-tokens", type=int, default=2048)
    parser.add_argument("--repetitions", type=int, default=5)
    options = common.measuring_options(parser, "shared-prompts-MODEL")
    machine_before = common.machine()
    config = TrainerConfig(micro_batch_tokens=options.micro_batch_tokens, learning_rate=1e-12)
    model = make_model(options.model)
    records: list[Record] = []
    workloads = SWEEP if options.sweep else WORKLOADS
    chosen = ["rollouts"] if options.run else options.workloads or workloads["demo" if options.model == "demo" else "135m"]
    for workload in chosen:
        if options.run:
            samples = recorded_samples(options.run, options.samples)
        else:
            samples = make_samples(workload, options.samples, options.attempts, model.config.vocab_size)
        prompt = samples[0].segments[0].sampled[0][0]
        least = 0.99 * (prompt - 1) / max(sample.length for sample in samples)
        systems = {
            SEPARATE: system(model, config, samples, 1.0),
            SHARED: system(model, config, samples, least if options.sweep else None),
        }
        scenario = {"model": common.model_label(options.model), "workload": workload, "unique": unique_tokens(samples)}
        scenario["part"] = (prompt - 1) * len(samples) / sum(sample.length for sample in samples)
        records += common.take_turns(systems, options.repetitions, scenario=scenario)
    table = table_of(records)
    common.write_results(
        options.name or f"shared-prompts-{'sweep-' * options.sweep}{common.model_label(options.model)}",
        settings=common.settings_of(options) | {"run": options.run and options.run.name},
        machine_before=machine_before,
        records=records,
        table=table,
        directory=options.results,
    )
    if any(row["loss_error"] > LOSS_TOLERANCE for row in table):
        raise SystemExit("the losses differ: this compares different computations")


if __name__ == "__main__":
    main()
