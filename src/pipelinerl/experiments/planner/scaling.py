"""Costs of a run on many accelerators: decode steps, optimizer steps of n ranks, weight updates. In seconds. Pure.

    Question ─▶ decode_step_s, step_cost, update_cost ─▶ best_pipeline, best_conventional, bounds; costs for the simulation

`analytic.py` has the paper's formulas, in which training is parallel without loss and updates are free. Here an optimizer
step gathers sharded weights over links and waits for its slowest rank, a weight update takes time, and memory limits the
slots. Everything follows from shapes and data sheets (`hardware.py`) and from the assumptions named below.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from statistics import NormalDist
from typing import Literal

import numpy as np
import numpy.typing as npt

from pipelinerl.experiments.planner.analytic import Floats, LengthDistribution
from pipelinerl.experiments.planner.hardware import WEIGHT_BYTES, Cluster, ModelShape, broadcast_s, gather_s
from pipelinerl.experiments.planner.simulation.scenario import Costs, Stragglers

GRADIENT_BYTES = 4
"""Gradients are summed in float32 (docs/sharding.md)."""
STATE_BYTES = 16
"""For each parameter: float32 master copy and gradient, and two moments of Adam."""


# ---- the work


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """B = `batch_size` rollouts an optimizer step, K = `group_size` of a prompt."""

    lengths: LengthDistribution
    batch_size: int
    group_size: int = 8
    prompt_tokens: float = 256.0

    @cached_property
    def mean(self) -> float:
        return self.lengths.mean

    @cached_property
    def context_tokens(self) -> float:
        """Mean tokens in the cache of a sequence in progress."""
        ages = self.lengths.ages()
        return self.prompt_tokens + float(ages @ np.arange(len(ages)))

    @cached_property
    def attended_tokens(self) -> float:
        """Mean number of tokens that a token attends to in training."""
        lengths = np.arange(1, self.lengths.longest + 1) + self.prompt_tokens
        p = self.lengths.probabilities
        return float(p @ (lengths * lengths) / (2 * (p @ lengths)))

    @cached_property
    def longest_of_a_step(self) -> float:
        """Expected number of tokens of the longest of B sequences: sum over l of 1 - F(l)^B."""
        shorter = np.concatenate(([0.0], np.cumsum(self.lengths.probabilities)[:-1]))
        return self.prompt_tokens + float((1 - np.minimum(shorter, 1.0) ** self.batch_size).sum())

    @property
    def step_tokens(self) -> float:
        """Tokens of an optimizer step, prompts included."""
        return self.batch_size * (self.mean + self.prompt_tokens)


@dataclass(frozen=True, kw_only=True)
class Training:
    """`mfu`: model FLOPs utilisation of one rank while it computes. `straggler_cv`: coefficient of variation of the time
    that ranks need for equal work in a step, and of the speeds of engines. The others are as in the run file.
    """

    mfu: float = 0.4
    micro_batch_tokens: int = 16_384
    reshard_after_forward: bool = True
    straggler_cv: float = 0.03


@dataclass(frozen=True, kw_only=True)
class Updates:
    """`encoding` as in the run file (`weights.encoding`); `changed` is the share of bfloat16 words that a step changes.

    `sharded`: every rank sends its own part of the weights to every engine. The trainer can't do this yet: rank 0 sends all.
    """

    encoding: Literal["full", "delta"] = "full"
    changed: float = 0.01
    full_every: int = 100
    sharded: bool = False


@dataclass(frozen=True, kw_only=True)
class Question:
    """What to plan for. A pipeline's lag is at most `max_lag`, and a conventional round has `max_lag` + 1 steps."""

    shape: ModelShape
    cluster: Cluster
    rollouts: Rollouts
    accelerators: int
    max_lag: int
    training: Training = Training()
    updates: Updates = Updates()


# ---- costs


def decode_step_s(
    shape: ModelShape, cluster: Cluster, devices: int, context_tokens: npt.ArrayLike, active: npt.ArrayLike
) -> Floats:
    """A decode step of `active` sequences (any shape) on an engine of `devices` accelerators (tensor parallel).

    The longer of reading (weights and caches) and computing, both split evenly over the devices, and two all-reduces of the
    activations in each layer.
    """
    h, context = np.asarray(active, dtype=np.float64), np.asarray(context_tokens, dtype=np.float64)
    accelerator = cluster.accelerator
    read = shape.bytes_read(h) + h * context * shape.kv_bytes_per_token
    read_s = read / (devices * accelerator.bandwidth * cluster.bandwidth_efficiency)
    flops = h * (2 * shape.active_parameters + shape.attention_flops * context)
    compute_s = flops / (devices * accelerator.peak_flops * cluster.compute_efficiency)
    time_s = np.maximum(read_s, compute_s)
    if devices > 1:
        one, many = (2 * gather_s(cluster, n * shape.hidden * WEIGHT_BYTES, devices) for n in (1, 1024))
        time_s = time_s + 2 * shape.layers * (one + (many - one) * np.maximum(h - 1, 0) / 1023)
    return np.asarray(time_s, dtype=np.float64)


def prefill_s(shape: ModelShape, cluster: Cluster, devices: int, tokens: float) -> float:
    """A prompt of `tokens`, limited by arithmetic."""
    flops = tokens * (2 * shape.active_parameters + shape.attention_flops * tokens / 2)
    return flops / (devices * cluster.accelerator.peak_flops * cluster.compute_efficiency)


MEMORY_SHARE = 0.9
"""Of an engine's memory: weights, buffers for updates, caches."""
STATE_SHARE = 0.7
"""Of a rank's memory: its shard of the training state. The rest is for gathered layers and activations."""


def staged_on_device(shape: ModelShape, cluster: Cluster, devices: int) -> bool:
    """Whether an engine has room for a second copy of the weights, into which updates arrive. Otherwise its host has it."""
    return 2 * shape.weight_bytes <= 0.6 * devices * cluster.memory_bytes


def most_slots(shape: ModelShape, cluster: Cluster, devices: int, context_tokens: float) -> int:
    """How many sequences of average length fit into an engine's memory (0: the weights do not)."""
    copies = 2 if staged_on_device(shape, cluster, devices) else 1
    free = MEMORY_SHARE * devices * cluster.memory_bytes - copies * shape.weight_bytes
    return max(0, int(free / (shape.kv_bytes_per_token * context_tokens)))


def least_ranks(shape: ModelShape, cluster: Cluster) -> int:
    """The lowest number of ranks whose memory holds the training state."""
    return math.ceil(STATE_BYTES * shape.parameters / (STATE_SHARE * cluster.memory_bytes))


@cache
def expected_maximum(count: int) -> float:
    """The expected maximum of `count` standard normal numbers: the integral over z of (z > 0) - Phi(z)^count."""
    z = np.linspace(-9, 9, 7200)  # an even number: the jump at 0 is in the middle between two points
    normal = NormalDist()
    phi = np.array([normal.cdf(value) for value in z])
    return float(np.trapezoid((z > 0) - phi**count, z))


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """One optimizer step on n ranks. `exposed_s`: communication that computing does not hide. `idle_s`: waiting of the
    average rank, because places are uneven. `straggler_s`: waiting for the slowest rank.
    """

    compute_s: float
    idle_s: float
    exposed_s: float
    straggler_s: float
    rows: int

    @property
    def s(self) -> float:
        return self.compute_s + self.idle_s + self.exposed_s + self.straggler_s


def step_cost(shape: ModelShape, cluster: Cluster, rollouts: Rollouts, training: Training, ranks: int) -> StepCost:
    """A step of a sharded trainer (docs/sharding.md), with rows of micro-batches as `trainer/plan.py` makes them.

    A rank computes `rows` places of equal cost; the first row lasts as long as the longest sequence if that is longer. In
    each place a rank gathers every unit (layer) twice, once if it keeps gathered weights, and sums its gradients once.

    Assumed: the next unit is gathered while the last one computes (FSDP's prefetching), so that only the first unit of each
    row, and what takes longer than computing, adds time. Waiting for the slowest rank counts once a step.
    """
    per_rank = rollouts.step_tokens / ranks
    rows = max(1, math.ceil(per_rank / training.micro_batch_tokens))
    place = per_rank / rows
    slowest = max(place, rollouts.longest_of_a_step)
    flops = 6 * shape.active_parameters + 3 * shape.attention_flops * rollouts.attended_tokens
    token_s = flops / (cluster.accelerator.peak_flops * training.mfu)
    exposed_s = 0.0
    if ranks > 1:
        units = shape.layers + (1 if shape.tied else 3)
        unit = shape.parameters / units
        gathered_s = gather_s(cluster, WEIGHT_BYTES * unit, ranks)
        summed_s = gather_s(cluster, GRADIENT_BYTES * unit, ranks)
        row_s = units * ((2 if training.reshard_after_forward else 1) * gathered_s + summed_s)
        first_s, other_s = (max(0.0, row_s - tokens * token_s) for tokens in (slowest, place))
        exposed_s = first_s + (rows - 1) * other_s + rows * (gathered_s + summed_s)
    compute_s, busiest_s = per_rank * token_s, (slowest + (rows - 1) * place) * token_s
    return StepCost(
        compute_s=compute_s,
        idle_s=busiest_s - compute_s,
        exposed_s=exposed_s,
        straggler_s=training.straggler_cv * expected_maximum(ranks) * busiest_s if ranks > 1 else 0.0,
        rows=rows,
    )


@dataclass(frozen=True, kw_only=True)
class UpdateCost:
    """One weight update. `gather_s`: ranks stand still while rank 0 collects all weights. `send_s`: from then on until all
    engines have them, while ranks and engines compute. `pause_s`: an engine copies them into its parameters.
    """

    bytes: float
    gather_s: float
    send_s: float
    pause_s: float

    @property
    def s(self) -> float:
        """From the end of an optimizer step to the first token of the new weights."""
        return self.gather_s + self.send_s + self.pause_s


ENCODE_PASSES = 6
"""Reads and writes of all weights to find and pack those that changed."""


def update_cost(
    shape: ModelShape, cluster: Cluster, updates: Updates, *, ranks: int, engines: int, devices: int
) -> UpdateCost:
    """Rank 0 gathers all weights in its host's memory, copies them back, and broadcasts them (docs/sharding.md).

    A delta has four bytes for each changed bfloat16 word, two of them its place (`weights/delta.py`).
    """
    size = float(shape.weight_bytes)
    memory_s = size / (cluster.accelerator.bandwidth * cluster.bandwidth_efficiency)
    sent = size
    if updates.encoding == "delta":
        sent = min(size, 2 * updates.changed * size) * (1 - 1 / updates.full_every) + size / updates.full_every
    collect_s, senders = 2 * size / cluster.host_bandwidth, 1
    if updates.sharded:
        collect_s, senders = 0.0, min(ranks, devices)
        memory_s /= ranks
    elif ranks > 1:
        collect_s += gather_s(cluster, size, ranks)
    send_s = broadcast_s(cluster, sent, engines, senders=senders)
    if updates.encoding == "delta":
        send_s += ENCODE_PASSES * memory_s
    share = size / devices
    on_device = staged_on_device(shape, cluster, devices)
    rate = cluster.accelerator.bandwidth * cluster.bandwidth_efficiency / 3 if on_device else cluster.host_bandwidth
    return UpdateCost(bytes=sent, gather_s=collect_s, send_s=send_s, pause_s=share / rate)


# ---- both methods


@dataclass(frozen=True, kw_only=True)
class ScaledPipeline:
    """`engines` engines of `devices` accelerators with H = `slots`, and `ranks` ranks. Rates are in rollouts per second."""

    devices: int
    engines: int
    slots: int
    ranks: int
    generation_rate: float
    training_rate: float
    step: StepCost
    update: UpdateCost
    max_lag: int

    @property
    def rate(self) -> float:
        return min(self.generation_rate, self.training_rate)

    @property
    def generating(self) -> int:
        """I."""
        return self.devices * self.engines


@dataclass(frozen=True, kw_only=True)
class ScaledConventional:
    """All accelerators generate B*G rollouts, then all train G steps, then the engines get the weights. Rollouts per second.

    The change from one phase to the other takes no time, and each phase has the whole memory: both favour this method.
    """

    devices: int
    engines: int
    steps_per_round: int
    rate: float
    generation_s: float
    step: StepCost
    update: UpdateCost


MOST_SLOTS = 1024
"""For each accelerator of an engine."""
DEVICES = (1, 2, 4, 8, 16)
SPLITS = 96
"""How many numbers of generating accelerators are tried for each size of engine."""


def pipeline_at(question: Question, *, devices: int, engines: int, slots: int | None = None) -> ScaledPipeline | None:
    """The pipeline of these engines, with as few slots as keep the trainer busy (None: chosen within memory and lag).

    g_max is that of the paper, plus the steps that pass while an update is on its way. None if it does not fit or no slot is
    within the lag.
    """
    shape, cluster, rollouts = question.shape, question.cluster, question.rollouts
    ranks = question.accelerators - devices * engines
    room = min(MOST_SLOTS * devices, most_slots(shape, cluster, devices, rollouts.context_tokens))
    if ranks < least_ranks(shape, cluster) or engines < 1 or room < 1:
        return None
    step = step_cost(shape, cluster, rollouts, question.training, ranks)
    update = update_cost(shape, cluster, question.updates, ranks=ranks, engines=engines, devices=devices)
    period_s = max(step.s + update.gather_s, update.send_s + update.pause_s)
    late = math.ceil(update.send_s / period_s) - 1
    h = np.arange(1, room + 1) if slots is None else np.array([slots])
    lags = np.ceil(h * engines * rollouts.lengths.tail / rollouts.batch_size * (1 - 1e-12)) + late
    per_rollout_s = decode_step_s(shape, cluster, devices, rollouts.context_tokens, h) / h * rollouts.mean
    per_rollout_s += prefill_s(shape, cluster, devices, rollouts.prompt_tokens) / rollouts.group_size
    rates = engines / per_rollout_s * max(0.0, 1 - update.pause_s / period_s)
    training_rate = rollouts.batch_size / period_s
    allowed = np.flatnonzero(lags <= question.max_lag) if slots is None else np.array([0])
    if not len(allowed):
        return None
    enough = allowed[rates[allowed] >= training_rate]
    at = enough[0] if len(enough) else allowed[np.argmax(rates[allowed])]
    return ScaledPipeline(
        devices=devices,
        engines=engines,
        slots=int(h[at]),
        ranks=ranks,
        generation_rate=float(rates[at]),
        training_rate=training_rate,
        step=step,
        update=update,
        max_lag=int(lags[at]),
    )


def best_pipeline(question: Question) -> ScaledPipeline | None:
    """The fastest of about SPLITS splits for each size of engine. None if none fits."""
    found = [
        pipeline
        for devices in DEVICES
        for engines in _splits(question.accelerators // devices)
        if (pipeline := pipeline_at(question, devices=devices, engines=engines))
    ]
    return max(found, key=lambda pipeline: pipeline.rate, default=None)


def _splits(most: int) -> Iterator[int]:
    stride = max(1, most // SPLITS)
    yield from range(stride, most, stride)


def conventional_at(question: Question, *, devices: int, steps_per_round: int) -> ScaledConventional | None:
    """A round: its rollouts drain from all engines, each with its share; G steps; one update. None if it does not fit."""
    shape, cluster, rollouts, N = question.shape, question.cluster, question.rollouts, question.accelerators
    engines, training = N // devices, question.training
    room = most_slots(shape, cluster, devices, rollouts.context_tokens)
    if engines < 1 or room < 1 or least_ranks(shape, cluster) > N:
        return None
    sequences = rollouts.batch_size * steps_per_round
    running = rollouts.lengths.survival() * (sequences / engines)
    # An engine with more sequences than its memory has room for decodes them in turns.
    turns = np.maximum(running / room, 1.0)
    context = rollouts.prompt_tokens + np.arange(len(running))
    decode_s = decode_step_s(shape, cluster, devices, context, running / turns) * turns
    prompts = sequences / rollouts.group_size / engines
    generation_s = float(decode_s.sum()) + prompts * prefill_s(shape, cluster, devices, rollouts.prompt_tokens)
    generation_s *= 1 + training.straggler_cv * expected_maximum(engines)
    step = step_cost(shape, cluster, rollouts, training, N)
    update = update_cost(shape, cluster, question.updates, ranks=N, engines=engines, devices=devices)
    return ScaledConventional(
        devices=devices,
        engines=engines,
        steps_per_round=steps_per_round,
        rate=sequences / (generation_s + steps_per_round * step.s + update.s),
        generation_s=generation_s,
        step=step,
        update=update,
    )


def best_conventional(question: Question) -> ScaledConventional | None:
    """The fastest size of engine, with rounds of `max_lag` + 1 steps. None if none fits."""
    steps = question.max_lag + 1
    found = [conventional_at(question, devices=devices, steps_per_round=steps) for devices in DEVICES]
    return max((one for one in found if one), key=lambda one: one.rate, default=None)


# ---- what bounds it


def improvements(question: Question, factor: float = 1.1) -> dict[str, Question]:
    """The same question with one input better by `factor`, for each input."""
    cluster, training, rollouts = question.cluster, question.training, question.rollouts
    accelerator, links = cluster.accelerator, {"inside": cluster.inside, "between": cluster.between}

    def with_cluster(**changes: object) -> Question:
        return replace(question, cluster=replace(cluster, **changes))  # type: ignore[arg-type]

    def with_training(**changes: float) -> Question:
        return replace(question, training=replace(training, **changes))  # type: ignore[arg-type]

    faster = {name: replace(link, bandwidth=link.bandwidth * factor) for name, link in links.items()}
    sooner = {
        name: replace(link, latency_s=link.latency_s / factor, small_latency_s=link.small_latency_s / factor)
        for name, link in links.items()
    }
    return {
        "training arithmetic": with_training(mfu=training.mfu * factor),
        "reading in decode steps": with_cluster(accelerator=replace(accelerator, bandwidth=accelerator.bandwidth * factor)),
        "arithmetic in decode steps": with_cluster(compute_efficiency=cluster.compute_efficiency * factor),
        "bandwidth of links": with_cluster(**faster),
        "latency of links": with_cluster(**sooner),
        "copies to and from hosts": with_cluster(host_bandwidth=cluster.host_bandwidth * factor),
        "memory": with_cluster(memory_bytes=cluster.memory_bytes * factor),
        "stragglers": with_training(straggler_cv=training.straggler_cv / factor),
        "lag": replace(question, max_lag=math.ceil(question.max_lag * factor)),
        "B": replace(question, rollouts=replace(rollouts, batch_size=round(rollouts.batch_size * factor))),
    }


def bounds(question: Question, *, factor: float = 1.1) -> dict[str, float]:
    """For each input: the best pipeline's gain in rate, over the gain in the input. 1: the rate is proportional to it."""
    best = best_pipeline(question)
    if best is None:
        return {}
    gains = {}
    for name, better in improvements(question, factor).items():
        found = best_pipeline(better)
        gains[name] = ((found.rate / best.rate if found else 1.0) - 1) / (factor - 1)
    return dict(sorted(gains.items(), key=lambda item: -item[1]))


# ---- the same costs for the simulation


def simulated_costs(question: Question, *, devices: int, engines: int, ranks: int, slots: int) -> tuple[Costs, Stragglers]:
    """Costs of `engines` engines of `devices` with up to `slots` sequences, and of a trainer of `ranks`; its stragglers."""
    shape, cluster, rollouts = question.shape, question.cluster, question.rollouts
    decode_s = decode_step_s(shape, cluster, devices, rollouts.context_tokens, np.arange(slots + 1))
    step = step_cost(shape, cluster, rollouts, question.training, ranks)
    update = update_cost(shape, cluster, question.updates, ranks=ranks, engines=engines, devices=devices)
    costs = Costs(
        decode_step_s=tuple(decode_s.tolist()),
        prompt_s=prefill_s(shape, cluster, devices, rollouts.prompt_tokens),
        update_pause_s=update.pause_s,
        transfer_s=update.send_s,
        train_step_s=step.idle_s + step.exposed_s,
        train_token_s=step.compute_s / rollouts.step_tokens,
        publish_s=update.gather_s,
    )
    return costs, Stragglers(cv=question.training.straggler_cv if ranks > 1 else 0.0, ranks=ranks)
