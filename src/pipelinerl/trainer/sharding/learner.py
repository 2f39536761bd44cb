"""The learner of a sharded trainer: the same step as `Learner`, over several ranks.

    samples ──plan──▶ grid ──▶ gradient of each rank's column ──▶ sums of all, on rank 0 ──▶ ESS guard ──▶ update

All ranks call the same methods: rank 0 is used like a `Learner`, and the others repeat its calls (`follow`). The
result is the same as in one process: Z belongs to the step, and gradients are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

from pipelinerl.checkpoint import OPTIMIZER_FILE, Checkpoint
from pipelinerl.config.schema import ModelConfig, TrainerConfig
from pipelinerl.models.loading import DTYPES, load_model
from pipelinerl.models.packed import PackedRow
from pipelinerl.models.state import in_file_order, is_narrow, not_finite, write_safetensors
from pipelinerl.trainer.logprobs import FrozenModelScorer
from pipelinerl.trainer.micro_batch import MicroBatch, Ordered, cut, in_order, pack, padded_bins, segment_lengths
from pipelinerl.trainer.on_policy import COLUMNS, OnPolicyStats
from pipelinerl.trainer.optimizer import Optimizer, local
from pipelinerl.trainer.sharding.model import distribute, empty_model, fill, gather, reshard, shard
from pipelinerl.trainer.sharding.ranks import Team
from pipelinerl.trainer.step import Learner, OnMicroBatch, StepResult, Sums
from pipelinerl.types import Segment, TrainingSample

if TYPE_CHECKING:
    from pipelinerl.models.lora import LoraModel

IDLE = Segment(token_ids=(0, 0), sampled=((1, 2),))
"""What is computed in an empty place."""


class ShardedPolicy:
    """A model that is sharded over the ranks of `team`. Rank 0 has all weights as well, on its host, to publish them.

    With `config.lora`, the base weights are sharded and the adapters are not. Only rank 0 reads files of weights: those of
    `config.path`, and of `adapter`. The others need the configuration in `config.path`.
    """

    def __init__(
        self, config: ModelConfig, trainer: TrainerConfig, team: Team, *, seed: int = 0, adapter: Path | None = None
    ) -> None:
        """Raises the errors of `load_model` and `LoraModel`."""
        self.team, self.dtype = team, DTYPES[config.dtype]
        self.host: Any = load_model(config) if team.rank == 0 else None
        self.model = empty_model(config)
        self.host_lora: LoraModel | None = None
        self.lora: LoraModel | None = None
        adapters = set[nn.Parameter]()
        if config.lora is None:
            for parameter in self.model.parameters():
                parameter.data = parameter.data.float()  # a shard is the master copy that the optimizer updates
        else:
            from pipelinerl.models import lora  # noqa: PLC0415 - needs an extra, and takes seconds

            if team.rank == 0:
                self.host_lora = lora.LoraModel(self.host, config.lora, seed=seed)
                if adapter is not None:
                    self.host_lora.load_adapter(adapter)
            self.lora = lora.LoraModel(self.model, config.lora, seed=seed)
            adapters = {parameter for parameter in self.model.parameters() if parameter.requires_grad}
        _shard(self.model, self.host, self.dtype, trainer, team, replicated=adapters)


def _shard(model: Any, host: Any, dtype: Any, trainer: TrainerConfig, team: Team, **replicated: set[nn.Parameter]) -> None:
    shard(model, team.mesh, dtype=dtype, reshard_after_forward=trainer.reshard_after_forward, **replicated)
    team.meet()
    distribute(model, host, team.device)


class ShardedOptimizer(Optimizer):
    """AdamW over the rows that this rank holds. `narrow`: the model computes in a narrower type than these float32 rows."""

    def __init__(self, model: nn.Module, config: TrainerConfig, *, narrow: bool) -> None:
        super().__init__(model, betas=config.betas, weight_decay=config.weight_decay)
        if narrow:
            self._saved_masters = set(self._weights)

    def _not_finite(self) -> list[str]:
        """The names are the same on all ranks."""
        found = set(not_finite({name: local(weight.detach()) for name, weight in self._weights.items()}))
        flags = torch.tensor([name in found for name in self._weights], dtype=torch.int32)
        distributed.all_reduce(flags, distributed.ReduceOp.MAX)
        return [name for name, flag in zip(self._weights, flags.tolist(), strict=True) if flag]

    def _of_all(self, sums: Tensor) -> Tensor:
        distributed.all_reduce(sums)
        return sums

    def _fill(self, target: Tensor, saved: Tensor | None) -> None:
        fill(target, saved)  # only rank 0 has what was saved


class ShardedLearner(Learner):
    """A `Learner` on one rank of the team that has `policy`."""

    _several_ranks = True

    def __init__(
        self, policy: ShardedPolicy, config: TrainerConfig, *, reference: ModelConfig | None = None, **options: Any
    ) -> None:
        """`options`: of `Learner`. `reference`: the model of the KL term if it is computed here."""
        self._policy, self._team = policy, policy.team
        self._host_is_current = True  # with the weights that were loaded
        super().__init__(policy.model, config, lora=policy.lora, **options)
        self._reference: FrozenModelScorer | None = None
        if reference is not None:
            model, lora = self.model, None if config.teacher else self.lora
            if lora is None:
                model = empty_model(reference).requires_grad_(False)
                host = load_model(reference) if self._team.rank == 0 else None
                _shard(model, host, DTYPES[reference.dtype], config, self._team, replicated=set())
            sizes: Any = {"micro_batch_tokens": config.micro_batch_tokens, "head_chunk": config.head_chunk}
            sizes["temperature"] = options["temperature"]
            self._reference = FrozenModelScorer(model, several_ranks=True, lora=lora, **sizes)
        text = self.model.config.get_text_config()
        heads = getattr(text, "num_attention_heads", 1)
        width = getattr(text, "head_dim", None) or text.hidden_size // heads
        matrices = sum(p.numel() for p in self.model.parameters() if p.ndim > 1)
        # Of a token's attention to one other token, in units of one token's matrix products.
        self._attention_cost = float(text.num_hidden_layers * heads * width / matrices)
        if self._forward.padded or (self._reference is not None and self._reference.padded):
            # One forward for each micro-batch: the ranks' collective calls must be the same.
            self._least_shared = self._waste = 1.0

    def _new_optimizer(self, config: TrainerConfig) -> Optimizer:
        reshard(self.model)
        return ShardedOptimizer(self.model, config, narrow=self._policy.lora is None and is_narrow(self._policy.dtype))

    # ---- What rank 0 calls, and then all others

    def follow(self) -> None:
        """Make the calls of rank 0, until training has ended. Raises RankLostError if it is lost."""
        while (call := self._team.next_call()).method != "end":
            match call.method:
                case "step":
                    self.step(call.samples, call.version)
                case "logits":
                    self.logits(call.segments)
                case "gather":
                    self._whole()
                case "save_optimizer":
                    self.save_optimizer(None)
                case "reset_optimizer":
                    self.reset_optimizer()
                case "fill_optimizer":
                    self.optimizer.fill(dict.fromkeys(call.names))

    def step(
        self,
        samples: Sequence[TrainingSample],
        version: int,
        on_micro_batch: OnMicroBatch | None = None,
        rate: float | None = None,
    ) -> StepResult:
        """As of `Learner`. On ranks above 0 the result has the metrics of their own samples."""
        self._team.call("step", samples=tuple(samples), version=version)
        self._host_is_current = False
        return super().step(samples, version, on_micro_batch, rate)

    @torch.no_grad()
    def logits(self, segments: Sequence[Segment]) -> Tensor:
        """As of `Learner`, for the probe."""
        self._team.call("logits", segments=tuple(segments))
        logits_PV = super().logits(segments)
        reshard(self.model)
        return logits_PV

    def save_optimizer(self, folder: Path | None) -> None:
        """Rank 0 writes the state of all ranks, one tensor after the other."""
        self._team.call("save_optimizer")
        state = self.optimizer.state()
        if folder is not None:
            write_safetensors(state, folder / OPTIMIZER_FILE)
            return
        for tensor in in_file_order(state).values():
            if isinstance(tensor, DTensor):
                tensor.full_tensor()  # as rank 0 does when it writes it

    def reset_optimizer(self) -> None:
        self._team.call("reset_optimizer")
        super().reset_optimizer()

    def load_optimizer(self, checkpoint: Checkpoint) -> None:
        """Rank 0 reads the state of all ranks, one tensor after the other. Raises CheckpointError like `Learner`."""
        saved = checkpoint.optimizer_state()
        self.optimizer.require_fitting(saved)
        self._team.call("fill_optimizer", names=tuple(saved))
        self.optimizer.fill(saved)

    def _whole(self) -> tuple[Any, LoraModel | None]:
        """The model on rank 0's host, with all weights of the last step. They are valid until the next step."""
        if not self._host_is_current:
            self._team.call("gather")
            host = self._policy.host
            gather(self.model, None if host is None else dict(host.named_parameters()), self._policy.dtype)
            self._host_is_current = True
        return self._policy.host, self._policy.host_lora

    # ---- One step

    def _differentiate(
        self, used: Sequence[TrainingSample], version: int, normalizer: int, on_micro_batch: OnMicroBatch | None
    ) -> tuple[int, Sums]:
        """Each rank computes its column of the plan, which is the same on all ranks."""
        size, budget, lengths = self._team.size, self._config.micro_batch_tokens, segment_lengths(used)
        ordered = in_order([sample.segments for sample in used], self._least_shared, self._attention_cost)
        if self._forward.padded:
            grid = plan_padded(lengths, size, budget)
        elif any(shared for _, _, shared in ordered):
            grid = plan_shared(ordered, size, budget)
        else:
            grid = plan(lengths, self._attention_cost, size, budget)
        column = ([used[index] for index in row[self._team.rank]] for row in grid)
        sums = self._accumulate_all(column, len(grid), version, normalizer, on_micro_batch)
        if self.lora is not None:
            adapters = [p.grad for p in self.model.parameters() if p.grad is not None]
            for work in [distributed.all_reduce(gradient, async_op=True) for gradient in adapters]:
                work.wait()
        counts = [sum(used[index].sampled_count for row in grid for index in row[rank]) for rank in range(size)]
        return sum(bool(place) for row in grid for place in row), _of_all(sums, counts, self._team.rank)

    def _decide(self, stats: OnPolicyStats, loss: float, rate: float) -> tuple[dict[str, Any] | None, float, bool]:
        """Rank 0 decides for all."""
        metrics, rate, stepped = super()._decide(stats, loss, rate)
        decided = torch.tensor([rate, stepped], dtype=torch.float64)
        distributed.broadcast(decided, 0)
        return metrics, float(decided[0]), bool(decided[1])

    def _accumulate(self, samples: Sequence[TrainingSample], version: int, normalizer: int, sums: Sums) -> None:
        if samples:
            super()._accumulate(samples, version, normalizer, sums)
            return
        row = PackedRow.of([IDLE], self._device)
        if self._reference is not None:
            self._reference.row_logprobs(row)
        (self._forward(row).sum() * 0.0).backward()  # type: ignore[no-untyped-call]

    def _reference_logprobs(self, batch: MicroBatch) -> Tensor | None:
        if self._reference is None:
            return batch.reference_logprobs_N
        return batch.of_sampled(self._reference.row_logprobs(batch.row))


def _of_all(own: Sums, counts: Sequence[int], rank: int) -> Sums:
    """On rank 0, the sums of all ranks, which have `counts` tokens; on the others, their own."""
    sent = torch.zeros(COLUMNS, 1 + max(counts, default=0), dtype=torch.float64)
    sent[:3, 0] = torch.tensor([own.loss, own.forwarded, own.cells], dtype=torch.float64)
    sent[:, 1 : 1 + counts[rank]] = own.stats.tokens()
    found = [torch.empty_like(sent) for _ in counts] if rank == 0 else None
    distributed.gather(sent, found)
    if found is None:
        return own
    totals_R7 = torch.stack([of_one[:, 0] for of_one in found])
    loss, *counted = totals_R7.sum(0)[:3]
    sums = Sums(loss, OnPolicyStats(), *map(int, counted))
    for count, of_one in zip(counts, found, strict=True):
        sums.stats.add(*of_one[:, 1 : 1 + count].float())
    return sums


# ---- The plan of a step: which rank computes which samples in which micro-batch. Pure


Grid = list[list[list[int]]]
"""Row -> rank -> indices of samples. Only places in the last row may be empty.

              rank 0   rank 1   rank 2
    row 0      bin      bin      bin       the most expensive bins
    row 1      bin      bin      bin
    row 2      bin      bin     (empty)    the cheapest ones

A row is one micro-batch on every rank. Sharded weights are gathered layer by layer, so ranks wait for each other within a
row, not only at the end of the step: the bins of a *row* have to be even. Every rank has a place in every row, and an empty
place is computed as well (with a loss of 0). So all ranks make the same number of collective calls, for any samples.
"""


def plan(lengths: Sequence[Sequence[int]], attention: float, ranks: int, budget: int) -> Grid:
    """Distribute samples over ranks, in bins of at most `budget` tokens. `lengths`: those of each sample's sequences.

    There are as few rows as `pack` needs, or a few more if that many even bins don't exist. A sample longer than the budget
    gets a bin of its own. No samples: no rows. `attention`: the cost of a token's attention to one other token, in
    units of one token's matrix products. Raises ValueError like `pack`.
    """
    tokens = [sum(of_sample) for of_sample in lengths]
    costs = [sum(length + attention * length * length for length in of_sample) for of_sample in lengths]
    rows = -(-len(pack(tokens, budget)) // ranks)
    while (bins := _even_bins(tokens, costs, rows * ranks, budget)) is None:
        rows += 1
    bins.sort(key=lambda indices: (-sum(costs[i] for i in indices), indices))
    grid = [bins[start : start + ranks] for start in range(0, len(bins), ranks)]
    # Every other row is reversed, so that the first rank does not have the most expensive bin of each.
    return [row[::-1] if number % 2 else row for number, row in enumerate(grid)]


def plan_padded(lengths: Sequence[Sequence[int]], ranks: int, budget: int) -> Grid:
    """Like `plan`, for a model that computes a bin as one padded batch: a bin costs its tokens with padding.

    Neighbouring bins hold sequences of similar length.
    """
    return _smallest(lambda most: padded_bins(lengths, most), ranks, budget)


def plan_shared(ordered: Ordered, ranks: int, budget: int) -> Grid:
    """Like `plan`, for samples that share prefixes: the order is cut into bins that cost at most `budget`.

    A cost is at least the tokens that a row has for it, so these keep within the budget, too.
    """
    return _smallest(lambda most: [indices for indices, _ in cut(ordered, most)], ranks, budget)


def _smallest(bins_of: Callable[[int], list[list[int]]], ranks: int, budget: int) -> Grid:
    """The bins of the smallest budget that needs no more rows than `budget` does."""
    rows = -(-len(bins_of(budget)) // ranks)
    low, high = 0, budget  # the smallest sufficient budget is in low < b <= high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if len(bins_of(middle)) <= rows * ranks else (middle, high)
    bins = bins_of(high)
    return [bins[start : start + ranks] + [[]] * (start + ranks - len(bins)) for start in range(0, len(bins), ranks)]


def _even_bins(lengths: Sequence[int], costs: Sequence[float], count: int, budget: int) -> list[list[int]] | None:
    """`count` bins of similar cost: the most expensive sample first, each into the cheapest bin with room.

    None if a sample finds no room.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    cheapest = [(0.0, number, 0) for number in range(count)]  # a heap of (cost, bin, tokens)
    for index in sorted(range(len(lengths)), key=lambda i: (-costs[i], i)):
        full = []
        while cheapest:
            cost, number, tokens = heappop(cheapest)
            if not tokens or tokens + lengths[index] <= budget:
                bins[number].append(index)
                heappush(cheapest, (cost + costs[index], number, tokens + lengths[index]))
                break
            full.append((cost, number, tokens))
        else:
            return None
        for entry in full:
            heappush(cheapest, entry)
    return [sorted(indices) for indices in bins]
