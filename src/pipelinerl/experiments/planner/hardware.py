"""Shapes of models, data sheets of machines, and the time of collective operations between them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipelinerl.experiments.planner.analytic import BANDWIDTH_EFFICIENCY, COMPUTE_CEILING, H100, H200, Accelerator, Floats

WEIGHT_BYTES = 2
"""bfloat16: what engines hold, ranks gather and updates send."""


# ---- the model


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder. `ffn`: width of its MLP, or of one expert. `experts` 0: a dense model. Biases and norms are not counted."""

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


QWEN_1_5B = ModelShape(
    name="qwen2.5-1.5b", layers=28, hidden=1536, heads=12, kv_heads=2, head_dim=128, ffn=8960, vocabulary=151_936, tied=True
)
QWEN_7B = ModelShape(
    name="qwen2.5-7b", layers=28, hidden=3584, heads=28, kv_heads=4, head_dim=128, ffn=18_944, vocabulary=152_064
)
QWEN_32B = ModelShape(
    name="qwen2.5-32b", layers=64, hidden=5120, heads=40, kv_heads=8, head_dim=128, ffn=27_648, vocabulary=152_064
)
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
"""As in the models' config.json (technical reports: arXiv 2412.15115 and 2505.09388)."""


# ---- the machines


@dataclass(frozen=True)
class Link:
    """Bytes per second of one accelerator in one direction, and seconds of a hop: of large messages, and of small ones.

    For small messages there is a protocol with less latency and half of the bandwidth (NCCL's LL, instead of Simple).
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

    `link_efficiency`: share of a link's bandwidth that collective operations reach (assumed). `host_bandwidth`: bytes per
    second between an accelerator and its host (PCIe 5.0 x16 has 64 GB/s). The other two efficiencies are those of decoding,
    from the fit to the paper.
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


CLUSTERS = {"h100": Cluster(accelerator=H100, memory_bytes=80e9), "h200": Cluster(accelerator=H200, memory_bytes=141e9)}


def gather_s(cluster: Cluster, size: float, ranks: int) -> float:
    """All-gather (or reduce-scatter) of a tensor of `size` bytes in total, in rings over `ranks` accelerators.

    There are as many rings as a machine has network cards, each for an equal part of the tensor. Over every link of a ring
    goes all of its part except one rank's. The slower kind of link counts, and the latency of the n - 1 hops.
    """
    machines, cards = cluster.machines(ranks), min(ranks, cluster.per_machine)
    sent = size * (ranks - 1) / ranks
    inside_s, between_s = sent / cluster.inside.bandwidth, sent / (cards * cluster.between.bandwidth)
    transfer_s = (max(inside_s, between_s) if machines > 1 else inside_s) / cluster.link_efficiency
    hops_between = machines - 1
    hops_inside = ranks - 1 - hops_between
    large_s = hops_inside * cluster.inside.latency_s + hops_between * cluster.between.latency_s
    small_s = hops_inside * cluster.inside.small_latency_s + hops_between * cluster.between.small_latency_s
    return min(transfer_s + large_s, 2 * transfer_s + small_s)


def broadcast_s(cluster: Cluster, size: float, receivers: int, *, senders: int = 1) -> float:
    """`size` bytes from the trainer to each of `receivers` machines or accelerators, in a chain that forwards what arrives.

    With several `senders` each sends its part through a network card of its own, to as many cards of each receiver.
    """
    transfer_s = size / (senders * cluster.between.bandwidth * cluster.link_efficiency)
    return transfer_s + receivers * cluster.between.latency_s
