"""What predictions start from: lengths, U(h), and the costs that `pipelinerl lab calibrate` measures and stores as JSON.

A decode step of h sequences takes `step_time(h)` and produces h tokens, so `U(h) = h / step_time(h)`: in seconds tokens per
second; in flashes (the time of one token's forward at peak FLOPs) a utilisation from 0 to 1.

`calibrate` measures a machine for a run file:

    1. `pipelinerl train` takes some steps. Its records have the costs of optimizer steps, rollouts and weight updates while
       all processes compute, and the lengths of completions
    2. an engine in this process decodes at 1, 2, 4, ... H sequences: a run that has full engines does not show these

Decode steps are timed with the KV cache as full as in a batch that stays full: with random tokens, and the distribution of
ages at a random moment. `rollout_s` is what a rollout costs an engine of the run beyond its share of these steps.
"""

from __future__ import annotations

import datetime
import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import INVALID_DATA, PipelineRLError, UserError
from pipelinerl.experiments.runs import bare, train_in_child
from pipelinerl.experiments.statistics import Floats, powers_of_two
from pipelinerl.metrics.reading import read_records
from pipelinerl.metrics.records import StepRecord, TimelineRecord
from pipelinerl.report import count, in_terminal, table
from pipelinerl.report.series import RecordedGroup, full_intervals, name_of, read_groups, read_timeline, sampled_tokens
from pipelinerl.resources.machine import Machine, load_average, this_machine, usable_cores
from pipelinerl.resources.roles import server_roles, shares_of, worker_roles
from pipelinerl.run_directory import RunDirectory
from pipelinerl.schedule import make_schedule
from pipelinerl.types import GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from pipelinerl.engine import LocalEngine

DECODE_SECONDS = 0.8
DECODE_STEPS = 16
"""Consecutive decode steps in a round: few, so that the fill of the cache hardly changes."""
MIN_ROUNDS = 2


class LengthDistribution:
    """`probabilities[l - 1]` is the share of completions with exactly l sampled tokens, l = 1..L. The last is not 0.

    longest     L, the number of tokens of the longest completion
    survival    [L]: entry l - 1 is the share of sequences that decode an l-th token, h(l) / S
    mean        Lbar, the mean number of tokens of a completion, the sum of `survival`
    """

    def __init__(self, weights: Mapping[int, float]) -> None:
        """From length -> count or share, in any scale. Raises ValueError for lengths below 1, weights below 0, or all 0."""
        used = {length: weight for length, weight in weights.items() if weight != 0}
        if not used:
            raise ValueError("a length distribution needs at least one completion")
        if min(used) < 1 or not all(weight > 0 and math.isfinite(weight) for weight in used.values()):
            raise ValueError("lengths must be at least 1, and counts must be finite and not below 0")
        self.longest = max(used)
        self.probabilities: Floats = np.zeros(self.longest)
        self.probabilities[np.array(list(used)) - 1] = list(used.values())
        self.probabilities /= self.probabilities.sum()
        self.survival: Floats = np.minimum(np.cumsum(self.probabilities[::-1])[::-1], 1.0)
        self.mean = float(self.survival.sum())


class Utilisation:
    """Time of a decode step at some numbers of sequences, with linear interpolation between them.

    Below the first number the step time is constant. Above the last one U is constant, as if the additional sequences took
    turns.
    """

    def __init__(self, step_times: Mapping[int, float] | Mapping[float, float]) -> None:
        """Raises ValueError if there are no step times, their numbers do not ascend, or a time is not above 0."""
        self._active, self._times = np.array(list(step_times)), np.array(list(step_times.values()))
        if not len(self._active) or (np.diff(self._active) <= 0).any() or self._active[0] < 0 or self._active[-1] <= 0:
            raise ValueError(f"numbers of sequences must ascend: {step_times}")
        if not (np.isfinite(self._times).all() and (self._times > 0).all()):
            raise ValueError(f"step times must be above 0: {step_times}")

    def step_time(self, active: npt.ArrayLike) -> Floats:
        """Time of a decode step with `active` sequences (any shape; may be fractional, as an average over accelerators)."""
        h = np.asarray(active, dtype=np.float64)
        within = np.interp(h, self._active, self._times)
        return np.asarray(within * np.maximum(h / self._active[-1], 1.0), dtype=np.float64)


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Costs for one machine and one run file, measured on `date` with `load_average` (1 minute, at the start).

    schedule            the run's, as `compare` names it: it decides whether generation and training share the machine
    decode_s            median time of a decode step by number of sequences, of an engine that has the machine to itself;
                        contexts are as long as in a batch that stays full
    prompt_tokens_mean  mean prompt length of the run's problems
    rollout_s           time of a generation process per rollout in the run beyond its share of decode steps: prefill,
                        admission, environment and reward code, records, and what other processes of the run take
    tokens_per_s        rate of a generation process in the run, with all slots in use
    update_pause_s      the engine's pause for new weights
    train_*_s           a step of `ranks` takes `train_step_s + train_token_s * tokens`; all these tokens go through the
                        model, prompts included
    prepare_s           to prepare a rollout for training: reading it from the stream, computing advantages, joining turns
    used_share          share of the sampled tokens that have a gradient, in the first steps of a run. It is 0 if its model
                        solves no problem or every problem; a prediction then underestimates the cost of training
    lengths             sampled tokens -> number of rollouts, in the first steps of the run (training changes lengths)
    """

    machine: Machine
    date: str
    load_average: float | None = None
    model: str
    schedule: str
    slots: int
    processes: int
    ranks: int = 1
    decode_s: dict[int, float]
    prompt_tokens_mean: float
    rollout_s: float
    tokens_per_s: float
    update_pause_s: float
    train_step_s: float
    train_token_s: float
    prepare_s: float
    used_share: float
    lengths: dict[int, int]

    def doubts(self, config: RunConfig | None = None) -> list[str]:
        """Reasons why it may not fit the machine or the run `config`, one sentence each."""
        found: list[str] = []
        if config is not None:
            pairs = {"model": (self.model, config.model.path), "trainer.ranks": (self.ranks, config.trainer.ranks)}
            if self.slots < config.engine.slots:
                pairs["engine.slots"] = (self.slots, config.engine.slots)
            if config.engine.device == "cpu":  # processes that share cores slow each other down
                pairs["engine.processes"] = (self.processes, config.engine.processes)
            if "pipeline" in (self.schedule, name_of(config.schedule)):
                pairs["schedule"] = (self.schedule, name_of(config.schedule))
            found += [
                f"it was made with {what} {then}, the run has {now}" for what, (then, now) in pairs.items() if then != now
            ]
        if self.load_average is not None and self.load_average > self.machine.cores / 2:
            load = f"load average {self.load_average:g}, {self.machine.cores} cores"
            found.append(f"the machine was busy when it was made ({load})")
        return found

    def __str__(self) -> str:
        """The measured costs as a table, with a warning if other programs occupied the machine."""
        names = ("rollout_s", "tokens_per_s", "update_pause_s", "train_step_s", "train_token_s", "prepare_s", "used_share")
        costs = {f"decode_s, {count(active, 'sequence')}": step_s for active, step_s in self.decode_s.items()}
        costs |= {name: getattr(self, name) for name in names} | {"lengths, mean": LengthDistribution(self.lengths).mean}
        rows = [{"cost": name, "measured": f"{value:.3g}"} for name, value in costs.items()]
        shown = table(f"{self.machine.cpu}, {count(self.machine.cores, 'core')}, model {self.model}", rows)
        return in_terminal(shown) + "".join(f"{doubt}: measure again when it is not\n" for doubt in self.doubts())


def read_calibration(path: Path) -> Calibration:
    """Raises UserError for a file that can't be read or is not a calibration of this version."""
    try:
        calibration = msgspec.json.decode(path.read_bytes(), type=Calibration)
        Utilisation(calibration.decode_s)
        LengthDistribution(calibration.lengths)
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror}; `pipelinerl lab calibrate` writes such a file") from error
    except (*INVALID_DATA, ValueError) as error:
        raise UserError(f"{path} is not a calibration ({error}); write one with `pipelinerl lab calibrate`") from error
    return calibration


def prompt_tokens_mean(groups: Iterable[RecordedGroup]) -> float:
    """Mean tokens of a rollout's context that were not sampled: the last turn's prompt less all earlier completions."""
    return fmean(
        len(rollout.turns[-1].prompt_ids) - sum(turn.completion.tokens for turn in rollout.turns[:-1])
        for group in groups
        for rollout in group.rollouts
        if rollout.turns
    )


# ---- measuring: the run, and what its records say


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
    lengths = Counter(rollout.tokens for group in groups for rollout in group.rollouts if rollout.tokens)
    if not lengths or len(records) < 2:
        raise PipelineRLError("the run that was to be measured finished no group of rollouts, or took less than two steps")
    prompt, distribution = prompt_tokens_mean(groups), LengthDistribution(lengths)
    report("measuring decode steps")
    decode_s = decode_times(config, distribution, max(1, round(prompt)), DECODE_SECONDS)
    in_progress, rate = full_rate(timeline)
    decoding_s = float(Utilisation(decode_s).step_time(in_progress)) / in_progress  # a token's share of a decode step
    pauses_s = [step.engine.update_pause_s for step in records if step.engine and step.engine.update_pause_s is not None]
    return Calibration(
        machine=this_machine(config.engine.device),
        date=date,
        load_average=load,
        model=config.model.path,
        schedule=name_of(config.schedule),
        slots=config.engine.slots,
        processes=config.engine.processes,
        ranks=config.trainer.ranks,
        decode_s=decode_s,
        prompt_tokens_mean=prompt,
        rollout_s=max(0.0, distribution.mean * (1 / rate - decoding_s)),
        tokens_per_s=rate,
        update_pause_s=median(pauses_s) if pauses_s else 0.0,
        lengths=dict(sorted(lengths.items())),
        **training_costs(records),
    )


def short_run(config: RunConfig, run_dir: Path, steps: int) -> RunConfig:
    """The run of `config` for `steps`, in whole rounds (at least two), in processes, without what only costs time."""
    rounds = config.schedule.steps_per_round if config.schedule.kind != "pipeline" else 1
    steps = max(2, -(-steps // rounds)) * rounds
    kind = "processes" if config.launch.kind == "embedded" else config.launch.kind
    launch = config.launch.model_copy(update={"kind": kind})
    return bare(config, trainer={"steps": steps}, run_dir=str(run_dir), launch=launch)


def first_groups(groups: Sequence[RecordedGroup]) -> list[RecordedGroup]:
    """The groups that started before any unfinished one, so that they are not biased to short completions."""
    ordered = sorted(groups, key=lambda group: group.index)
    return [group for place, group in enumerate(ordered) if group.index == place]


def full_rate(timeline: Sequence[TimelineRecord]) -> tuple[float, float]:
    """Sequences in progress, and tokens per second, of one engine while it is as full as it gets. `timeline` is by time.

    Raises PipelineRLError if no two consecutive records of an engine enclose tokens.
    """
    full = full_intervals(timeline)
    if not full:
        raise PipelineRLError("the run ended before its engines had generated for half a second; measure a longer run")
    tokens = sum(after.tokens_generated - before.tokens_generated for before, after in full)
    rate = tokens / sum(after.time_s - before.time_s for before, after in full)
    return fmean((before.in_progress + after.in_progress) / 2 for before, after in full), rate


def training_costs(steps: Sequence[StepRecord]) -> dict[str, float]:
    """The costs of training in a `Calibration`, from the steps of a run; the first one warms up."""
    step_s, token_s = fit_steps([(step.tokens_trained + step.tokens_context, step.train_s) for step in steps[1:]])
    between_s = [
        max(0.0, after.time_s - before.time_s - after.train_s - after.wait_s - after.saving_s)
        for before, after in pairwise(steps)
    ]
    sampled = sampled_tokens(steps)
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


# ---- measuring: decode steps


def decode_times(config: RunConfig, lengths: LengthDistribution, prompt_tokens: int, seconds: float) -> dict[int, float]:
    """Median times of decode steps at 1, 2, 4, ... H sequences, for about `seconds` each (at least MIN_ROUNDS rounds)."""
    import torch  # noqa: PLC0415 - a prediction reads a calibration without torch

    from pipelinerl.launch.stages.generation import load_local_engine  # noqa: PLC0415 - as above

    planned = config
    if config.engine.urls:  # servers that run elsewhere: what is measured here generates in this process
        planned = config.model_copy(update={"engine": config.engine.model_copy(update={"kind": "local", "urls": ()})})
    roles = [*server_roles(planned), *worker_roles(planned)]  # the first one generates
    torch.set_num_threads(shares_of(planned, make_schedule(config), roles, usable_cores())[roles[0]].threads)
    model, engine = load_local_engine(config)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    rng = np.random.default_rng(config.seed)
    found: dict[int, float] = {}
    for active in (*powers_of_two(engine.slots - 1), engine.slots):
        # Tokens so far of each sequence, at a random moment in a batch that stays full.
        ages = rng.choice(lengths.longest, size=active, p=lengths.survival / lengths.mean)
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
