"""Measures a machine for a run file: by a short run, and by decode steps of its engine alone.

    1. `pipelinerl train` takes some steps. Its records have the costs of optimizer steps, rollouts and weight updates while
       all processes compute, and the lengths of completions
    2. an engine in this process decodes at 1, 2, 4, ... H sequences: a run that keeps its engines full does not show these

Decode steps are timed with the KV cache as full as in a batch that is kept full: with random tokens, and the distribution of
ages at a random moment. `rollout_s` is what a rollout costs an engine of the run beyond its share of these steps.
"""

from __future__ import annotations

import datetime
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch

from pipelinerl.config.load import validate
from pipelinerl.config.schema import EvaluationConfig, RunConfig
from pipelinerl.engine import LocalEngine
from pipelinerl.errors import PipelineRLError, UserError
from pipelinerl.experiments.planner.calibration import (
    Calibration,
    LengthDistribution,
    Utilisation,
    prompt_tokens_mean,
)
from pipelinerl.experiments.runs import train_in_child
from pipelinerl.experiments.statistics import powers_of_two
from pipelinerl.launch.stages.generation import load_local_engine
from pipelinerl.metrics.reading import read_records
from pipelinerl.metrics.records import StepRecord
from pipelinerl.metrics.timeline import TimelineRecord
from pipelinerl.report.series import RecordedGroup, name_of, read_groups, read_timeline
from pipelinerl.resources.machine import load_average, this_machine, usable_cores
from pipelinerl.resources.roles import plan_threads
from pipelinerl.run_directory import RunDirectory
from pipelinerl.schedule import make_schedule
from pipelinerl.types import GenerationRequest, SamplingParams

FULL = 0.9
"""An engine is full between two records if it has at least this share of the largest number of sequences between any two."""
DECODE_SECONDS = 0.8
DECODE_STEPS = 16
"""Consecutive decode steps in a round: few, so that the fill of the cache hardly changes."""
MIN_ROUNDS = 2


def calibrate(config: RunConfig, report: Callable[[str], None] = lambda _: None, *, steps: int) -> Calibration:
    """Measure this machine with a run of `steps` optimizer steps; takes about a minute for the demo.

    `report` receives progress messages.

    Raises UserError for a mistake in the run file, what ends the run, and PipelineRLError if it gives no measurement.
    """
    date, load = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), load_average()
    with tempfile.TemporaryDirectory(prefix="pipelinerl-calibrate-") as name:
        run = RunDirectory(Path(name) / "run")
        short = short_run(config, run.root, steps)
        report(f"training for {short.trainer.steps} steps")
        train_in_child(short)
        records = read_records(run.metrics, StepRecord)
        timeline = read_timeline(run.root)
        groups = first_groups(read_groups(run.root))
    lengths = [rollout.tokens for group in groups for rollout in group.rollouts if rollout.tokens]
    if not lengths or len(records) < 2:
        raise PipelineRLError("the run that was to be measured finished no group of rollouts, or took less than two steps")
    prompt = prompt_tokens_mean(groups)
    report("measuring decode steps")
    decode_s = decode_times(config, LengthDistribution.of_lengths(lengths), max(1, round(prompt)), DECODE_SECONDS)
    in_progress, rate = full_rate(timeline)
    pauses_s = [step.engine.update_pause_s for step in records if step.engine and step.engine.update_pause_s is not None]
    return Calibration(
        machine=this_machine(config.engine.device),
        date=date,
        load_average=load,
        model=config.model.path,
        schedule=name_of(config),
        slots=config.engine.slots,
        processes=config.engine.processes,
        ranks=config.trainer.ranks,
        decode_s=decode_s,
        prompt_tokens_mean=prompt,
        rollout_s=rollout_overhead_s(decode_s, fmean(lengths), in_progress, rate),
        tokens_per_s=rate,
        update_pause_s=median(pauses_s) if pauses_s else 0.0,
        lengths=dict(sorted(Counter(lengths).items())),
        **training_costs(records),
    )


# ---- the run, and what its records say


def short_run(config: RunConfig, run_dir: Path, steps: int) -> RunConfig:
    """The run of `config` for `steps`, in whole rounds (at least two), in processes, without what only costs time."""
    rounds = config.schedule.steps_per_round if config.schedule.kind != "pipeline" else 1
    steps = max(2, -(-steps // rounds)) * rounds
    trainer = {"steps": steps, "checkpoint_every": 0, "weights_every": 0}
    changes: dict[str, Any] = {
        "run_dir": str(run_dir),
        "evaluation": EvaluationConfig(problems=0),
        "metrics": config.metrics.model_copy(update={"view": "none", "plot": False, "trackers": (), "callback": None}),
        "trainer": config.trainer.model_copy(update=trainer),
    }
    if config.launch.kind == "embedded":
        changes["launch"] = config.launch.model_copy(update={"kind": "processes"})
    return validate(config.model_copy(update=changes))


def first_groups(groups: Sequence[RecordedGroup]) -> list[RecordedGroup]:
    """The groups that started before any unfinished one, so that they are not biased to short completions."""
    by_index = {group.index: group for group in groups}
    first: list[RecordedGroup] = []
    while (following := by_index.get(len(first))) is not None:
        first.append(following)
    return first


def full_rate(timeline: Sequence[TimelineRecord]) -> tuple[float, float]:
    """Sequences in progress, and tokens per second, of one engine while it is as full as it gets.

    Raises PipelineRLError if no two consecutive records of an engine enclose tokens.
    """
    of_engine: defaultdict[int, list[TimelineRecord]] = defaultdict(list)
    for record in timeline:
        of_engine[record.worker].append(record)
    pairs = [
        (before, after)
        for records in of_engine.values()
        for before, after in pairwise(records)
        if after.tokens_generated > before.tokens_generated
    ]
    if not pairs:
        raise PipelineRLError("the run ended before its engines had generated for half a second; measure a longer run")
    fullest = max(min(before.in_progress, after.in_progress) for before, after in pairs)
    full = [pair for pair in pairs if min(one.in_progress for one in pair) >= FULL * fullest]
    tokens = sum(after.tokens_generated - before.tokens_generated for before, after in full)
    rate = tokens / sum(after.time_s - before.time_s for before, after in full)
    return fmean((before.in_progress + after.in_progress) / 2 for before, after in full), rate


def rollout_overhead_s(decode_s: Mapping[int, float], length: float, in_progress: float, rate: float) -> float:
    """The time of a rollout of mean `length` in a full engine, less its share of the decode steps. Not below 0."""
    table = Utilisation(tuple(map(float, decode_s)), tuple(decode_s.values()))
    return max(0.0, length * (1 / rate - float(table.step_time(in_progress)) / in_progress))


def training_costs(steps: Sequence[StepRecord]) -> dict[str, float]:
    """The costs of training in a `Calibration`, from the steps of a run; the first one warms up."""
    step_s, token_s = fit_steps([(step.tokens_trained + step.tokens_context, step.train_s) for step in steps[1:]])
    between_s = [
        max(0.0, after.time_s - before.time_s - after.train_s - after.wait_s - after.saving_s)
        for before, after in pairwise(steps)
    ]
    sampled = sum(step.samples * (step.completion_length_mean or 0.0) for step in steps)
    return {
        "train_step_s": step_s,
        "train_token_s": token_s,
        "prepare_s": median(between_s) / steps[0].samples,
        "used_share": sum(step.tokens_trained for step in steps) / sampled if sampled else 0.0,
    }


def fit_steps(steps: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(fixed seconds per step, seconds per token) of the line through the median small and the median large step.

    `steps`: of each, the tokens that went through the model, and its seconds. Medians are robust to short disturbances of
    the machine. Neither result is below 0. Raises UserError if no step used tokens.
    """
    tokens = np.array([count for count, _ in steps], dtype=np.float64)
    seconds = np.array([duration_s for _, duration_s in steps], dtype=np.float64)
    if not tokens.size or tokens.max() == 0:
        raise UserError("no step of the run had a gradient: its model solves no problem, or all of them")
    large = tokens > (tokens.min() + tokens.max()) / 2
    if not large.any() or large.all():
        return 0.0, float(median(seconds / np.maximum(tokens, 1)))
    (x0, y0), (x1, y1) = ((np.median(tokens[part]), np.median(seconds[part])) for part in (~large, large))
    slope = (y1 - y0) / (x1 - x0)
    if slope <= 0 or y1 - slope * x1 < 0:
        return 0.0, float(y1 / x1)
    return float(y1 - slope * x1), float(slope)


# ---- decode steps


def decode_times(config: RunConfig, lengths: LengthDistribution, prompt_tokens: int, seconds: float) -> dict[int, float]:
    """Median times of decode steps at 1, 2, 4, ... H sequences, for about `seconds` each (at least MIN_ROUNDS rounds)."""
    torch.set_num_threads(plan_threads(config, make_schedule(config), usable_cores()).generation)
    model, engine = load_local_engine(config)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    rng = np.random.default_rng(config.seed)
    found: dict[int, float] = {}
    for active in (*powers_of_two(engine.slots - 1), engine.slots):
        ages = rng.choice(lengths.longest, size=active, p=lengths.ages())
        times_s: list[float] = []
        begin_s, rounds = time.perf_counter(), 0
        while rounds < MIN_ROUNDS or time.perf_counter() - begin_s < seconds:
            contexts = (prompt_tokens + ages - DECODE_STEPS // 2).tolist()
            times_s += decode_round(engine, config, contexts, vocabulary, rng)
            rounds += 1
        found[active] = median(times_s)
    return found


def decode_round(
    engine: LocalEngine, config: RunConfig, contexts: Sequence[int], vocabulary: int, rng: np.random.Generator
) -> list[float]:
    """Seconds of each of DECODE_STEPS steps in which exactly the sequences with these context lengths decode."""
    # Prefill takes several steps. Sequences already in progress decode meanwhile, and must not reach their budget.
    budget = DECODE_STEPS + 4 + sum(contexts) // config.engine.prefill_tokens
    room = engine.max_length - budget
    if room < 1:
        raise UserError(
            f"engine.max_length {engine.max_length} leaves no room to measure decode steps; set it to {budget + 16} or more"
        )
    names = [f"measured-{number}" for number in range(len(contexts))]
    for name, context in zip(names, contexts, strict=True):
        ids = tuple(rng.integers(vocabulary, size=min(max(context, 1), room)).tolist())
        engine.submit(GenerationRequest(id=name, prompt_ids=ids, sampling=SamplingParams(max_tokens=budget)))
    before, sampled = engine.progress().tokens_generated, 0
    while sampled < len(contexts):
        engine.step()
        before, sampled = engine.progress().tokens_generated, engine.progress().tokens_generated - before
    engine.step()  # one untimed step, which compacts the rows
    times_s = []
    # On a CPU, the seconds that this thread computes: programs that share its core do not count.
    clock = time.thread_time if config.engine.device == "cpu" else time.perf_counter
    for _ in range(DECODE_STEPS):
        begin_s = clock()
        engine.step()
        times_s.append(clock() - begin_s)
    for name in names:
        engine.cancel(name)
    engine.step()
    return times_s
