"""Costs of a run on many accelerators: decode steps, optimizer steps of n ranks, weight updates. In seconds. Pure.

    ModelShape, Cluster, Rollouts, Training, Updates  ─▶  decode_step_s, step_cost, update_cost  ─▶  best_pipeline, ...

`analytic.py` has the paper's formulas, in which training is parallel without loss and updates are free. Here an optimizer step
gathers sharded weights over links and waits for its slowest rank, a weight update takes time, and memory limits the slots. All
of it follows from data sheets and the assumptions named below. `cluster_costs` gives the same costs to the simulation.
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

from pipelinerl.experiments.planner.analytic import (
    BANDWIDTH_EFFICIENCY,
    COMPUTE_CEILING,
    H100,
    H200,
    Accelerator,
    Floats,
    LengthDistribution,
)
from pipelinerl.experiments.planner.simulation.scenario import Costs, Stragglers

WEIGHT_BYTES = 2
"""bfloat16: what engines hold, ranks gather and updates send."""
GRADIENT_BYTES = 4
"""Gradients are summed in float32 (docs/sharding.md)."""
STATE_BYTES = 16
"""For each parameter: float32 master copy and gradient, and two moments of Adam."""


# ---- the model


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder: `ffn` is the width of its MLP, or of one expert. `experts` 0: a dense model. Biases and norms are not counted."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    tied: bool = False
    experts: int = 0
    experts_per_token: int = 0

    @property
    def mlp_parameters(self) -> int:
        """Of one MLP, or of one expert."""
        return 3 * self.hidden * self.ffn

    @property
    def parameters(self) -> int:
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        layer = attention + self.hidden * self.experts + self.mlp_parameters * max(1, self.experts)
        return self.layers * layer + self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def active_parameters(self) -> int:
        """Those that one token goes through, embedding included."""
        return self.parameters - self.layers * self.mlp_parameters * max(0, self.experts - self.experts_per_token)

    @property
    def weight_bytes(self) -> int:
        return WEIGHT_BYTES * self.parameters

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * WEIGHT_BYTES * self.layers * self.kv_heads * self.head_dim

    @property
    def attention_flops(self) -> int:
        """Forward, for a token that attends to one other token."""
        return 4 * self.layers * self.heads * self.head_dim

    def bytes_read(self, active: npt.ArrayLike) -> Floats:
        """Bytes of weights that a decode step of `active` sequences reads (any shape).

        An embedding that is not the head too is looked up, not read. Of the experts only those are read that a token of the
        batch goes to: E (1 - (1 - k / E)^h) of each layer's E, if tokens choose k independently.
        """
        h = np.asarray(active, dtype=np.float64)
        lookup = 0 if self.tied else self.vocabulary * self.hidden
        always = self.parameters - lookup - self.layers * self.mlp_parameters * self.experts
        share = 1 - self.experts_per_token / self.experts if self.experts else 0.0
        touched = self.experts * (1 - share**h)
        return np.asarray(WEIGHT_BYTES * (always + self.layers * self.mlp_parameters * touched), dtype=np.float64)


def _qwen25(name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocabulary: int) -> ModelShape:
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=128,
        ffn=ffn,
        vocabulary=vocabulary,
        tied=hidden < 3584,
    )


QWEN_1_5B = _qwen25("qwen2.5-1.5b", 28, 1536, 12, 2, 8960, 151_936)
QWEN_7B = _qwen25("qwen2.5-7b", 28, 3584, 28, 4, 18_944, 152_064)
QWEN_32B = _qwen25("qwen2.5-32b", 64, 5120, 40, 8, 27_648, 152_064)
QWEN_235B = ModelShape(
    name="qwen3-235b-a22b",
    layers=94,
    hidden=4096,
    heads=64,
    kv_heads=4,
    head_dim=128,
    ffn=1536,
    vocabulary=151_936,
    experts=128,
    experts_per_token=8,
)
SHAPES = {shape.name: shape for shape in (QWEN_1_5B, QWEN_7B, QWEN_32B, QWEN_235B)}
"""From the models' config.json; the technical reports are arXiv 2412.15115 and 2505.09388."""


# ---- the machines


@dataclass(frozen=True)
class Link:
    """Bytes per second of one accelerator in one direction, and the latency of a hop: of large messages, and of small ones.

    Small messages take a protocol with less latency and half of the bandwidth (NCCL's Simple and LL).
    """

    bandwidth: float
    latency_s: float
    small_latency_s: float


NVLINK4 = Link(450e9, 3.4e-6, 0.6e-6)
"""H100's data sheet: 900 GB/s in both directions. Latencies: NCCL's own cost model (`src/graph/tuning.cc`), ring."""
NDR400 = Link(50e9, 14e-6, 2.7e-6)
"""DGX H100's data sheet: a network card of 400 Gb/s for each accelerator. Latencies as above."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal machines of `per_machine` accelerators.

    `link_efficiency`: share of a link's bandwidth that collective operations reach. `host_bandwidth`: bytes per second between
    an accelerator and its host (PCIe 5.0 x16: 64 GB/s). The `*_efficiency` of decoding are those of the fit to the paper.
    """

    accelerator: Accelerator
    memory_bytes: float
    per_machine: int = 8
    inside: Link = NVLINK4
    between: Link = NDR400
    host_bandwidth: float = 50e9
    link_efficiency: float = 0.8
    bandwidth_efficiency: float = BANDWIDTH_EFFICIENCY
    compute_efficiency: float = COMPUTE_CEILING

    def machines(self, accelerators: int) -> int:
        return -(-accelerators // self.per_machine)


CLUSTERS = {
    "h100": Cluster(accelerator=H100, memory_bytes=80e9),
    "h200": Cluster(accelerator=H200, memory_bytes=141e9),
}


def gather_s(cluster: Cluster, size: float, ranks: int) -> float:
    """All-gather (or reduce-scatter) of a tensor of `size` bytes in total, in rings over `ranks` accelerators.

    Every accelerator receives all but its own part over the links in its machine. Every machine receives what it lacks through
    all of its network cards. The slower of the two counts, and the latency of every hop of a ring.
    """
    machines = cluster.machines(ranks)
    cards = min(ranks, cluster.per_machine)
    inside = size * (ranks - 1) / ranks / cluster.inside.bandwidth
    between = size * (machines - 1) / machines / (cards * cluster.between.bandwidth)
    transfer_s = max(inside, between) / cluster.link_efficiency
    hops_between = machines if machines > 1 else 0
    hops_inside = max(0, ranks - 1 - hops_between)
    large_s = hops_inside * cluster.inside.latency_s + hops_between * cluster.between.latency_s
    small_s = hops_inside * cluster.inside.small_latency_s + hops_between * cluster.between.small_latency_s
    return min(transfer_s + large_s, 2 * transfer_s + small_s)


def broadcast_s(cluster: Cluster, size: float, receivers: int, *, senders: int = 1) -> float:
    """`size` bytes from the trainer to each of `receivers` machines or accelerators, in a chain that forwards what arrives.

    With several `senders` each sends its part through a network card of its own, to as many cards of each receiver.
    """
    transfer_s = size / (senders * cluster.between.bandwidth * cluster.link_efficiency)
    return transfer_s + receivers * cluster.between.latency_s


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
    """`mfu`: model FLOPs utilisation of one rank while it computes. `straggler_cv`: coefficient of variation of the time that
    ranks need for equal work in a step, and of the speeds of engines. `micro_batch_tokens` and `reshard_after_forward` as in the
    run file.
    """

    mfu: float = 0.4
    micro_batch_tokens: int = 16_384
    reshard_after_forward: bool = True
    straggler_cv: float = 0.03


@dataclass(frozen=True, kw_only=True)
class Updates:
    """`encoding` as in the run file (`weights.encoding`); `changed` is the share of bfloat16 words that a step changes.

    `sharded`: every rank sends its own part of the weights to every engine, instead of rank 0 all of them (which the trainer
    does not do yet).
    """

    encoding: Literal["full", "delta"] = "full"
    changed: float = 0.01
    full_every: int = 100
    sharded: bool = False


@dataclass(frozen=True, kw_only=True)
class Question:
    """What to plan for: N = `accelerators`. The pipeline's largest lag is `max_lag`; conventional RL has rounds of
    `max_lag` + 1 steps.
    """

    shape: ModelShape
    cluster: Cluster
    rollouts: Rollouts
    accelerators: int
    max_lag: int
    training: Training = Training()
    updates: Updates = Updates()


# ---- costs


def decode_step_s(shape: ModelShape, cluster: Cluster, devices: int, context_tokens: float, active: npt.ArrayLike) -> Floats:
    """A decode step of `active` sequences (any shape) on an engine of `devices` accelerators (tensor parallel).

    The longer of reading (weights and caches) and computing, both split evenly over the devices, and two all-reduces of the
    activations in each layer.
    """
    h = np.asarray(active, dtype=np.float64)
    accelerator = cluster.accelerator
    read = shape.bytes_read(h) + h * context_tokens * shape.kv_bytes_per_token
    read_s = read / (devices * accelerator.bandwidth * cluster.bandwidth_efficiency)
    flops = h * (2 * shape.active_parameters + shape.attention_flops * context_tokens)
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
    z = np.linspace(-9, 9, 7201)
    normal = NormalDist()
    phi = np.array([normal.cdf(value) for value in z])
    return float(np.trapezoid((z > 0) - phi**count, z))


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """One optimizer step on n ranks. `exposed_s`: communication that computing does not hide. `idle_s`: waiting of the average
    rank, because places are uneven. `straggler_s`: waiting for the slowest rank.
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

    A rank computes `rows` places of equal cost; the first row lasts as long as the longest sequence if that is longer. In each
    place a rank gathers every unit (layer) twice, once if it keeps gathered weights, and sums its gradients once.

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
    """`engines` engines of `devices` accelerators and H = `slots` each, and `ranks` ranks. Rates are in rollouts per second."""

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
    room = min(MOST_SLOTS, most_slots(shape, cluster, devices, rollouts.context_tokens))
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
    """A round: its rollouts drain from all engines, each with its share; G optimizer steps; one update. None if it does not fit."""
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
    decode_s = _decode_at(shape, cluster, devices, context, running / turns) * turns
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


def _decode_at(shape: ModelShape, cluster: Cluster, devices: int, contexts: Floats, active: Floats) -> Floats:
    """Decode steps of `active[l]` sequences that all have `contexts[l]` tokens in the cache (which is linear in it)."""
    empty = decode_step_s(shape, cluster, devices, 0.0, active)
    accelerator = cluster.accelerator
    read = shape.bytes_read(active) + active * contexts * shape.kv_bytes_per_token
    flops = active * (2 * shape.active_parameters + shape.attention_flops * contexts)
    compute = flops / (devices * accelerator.peak_flops * cluster.compute_efficiency)
    without = np.maximum(
        shape.bytes_read(active) / (devices * accelerator.bandwidth * cluster.bandwidth_efficiency),
        active * 2 * shape.active_parameters / (devices * accelerator.peak_flops * cluster.compute_efficiency),
    )
    return np.asarray(
        empty - without + np.maximum(read / (devices * accelerator.bandwidth * cluster.bandwidth_efficiency), compute)
    )
