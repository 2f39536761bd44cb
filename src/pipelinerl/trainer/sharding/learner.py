"""The learner of a sharded trainer: the same step as `Learner`, over several ranks, and its KL penalty's reference model.

    rank 0   samples ──plan──▶ grid ──order──▶ gradient of its column ──▶ sums of all ──▶ ESS guard ──order──▶ update
    others             follow:   order ──────▶ gradient of its column ──▶ its sums           order ──────────▶ update

Rank 0 is the trainer. It gives each order before it carries it out itself, so all ranks make the same collective calls in
the same order. The result is that of one process: Z belongs to the step, and gradients are summed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

from pipelinerl.checkpoint import Checkpoint, save_optimizer
from pipelinerl.checkpoint_folders import FileRecord, Folders
from pipelinerl.config.schema import CorrectionConfig, LoraConfig, ModelConfig, TrainerConfig
from pipelinerl.errors import CheckpointError
from pipelinerl.models.loading import DTYPES, load_model
from pipelinerl.models.lora import LoraModel
from pipelinerl.models.packed import PackedRow
from pipelinerl.models.sharded import gather, host_model, load_for_sharding, load_rows, reshard, rows_of, shard
from pipelinerl.models.state import is_narrow, named_weights, not_finite
from pipelinerl.trainer.logprobs import FrozenModelScorer
from pipelinerl.trainer.losses import DEFAULT_CORRECTION
from pipelinerl.trainer.micro_batch import Packer, segment_lengths
from pipelinerl.trainer.on_policy import PACKED_COLUMNS
from pipelinerl.trainer.optimizer import Optimizer, local
from pipelinerl.trainer.sharding import ranks
from pipelinerl.trainer.sharding.plan import attention_cost, plan, plan_padded, token_cost
from pipelinerl.trainer.sharding.ranks import Team
from pipelinerl.trainer.step import Learner, OnMicroBatch, Sums
from pipelinerl.types import Segment, TrainingSample

IDLE = Segment(token_ids=(0, 0), sampled=((1, 2),))
"""What is computed in an empty place."""


class ShardedPolicy:
    """A model that is sharded over the ranks of `team`. `host` is the whole model on the CPU of rank 0, for its weights."""

    def __init__(
        self, config: ModelConfig, trainer: TrainerConfig, team: Team, *, seed: int = 0, adapter: Path | None = None
    ) -> None:
        """With `config.lora`, the base weights are sharded and the adapters (those of `adapter`, if given) are not.

        Raises the errors of `load_model` and `LoraModel`.
        """
        self.dtype = DTYPES[config.dtype]
        self.lora: LoraModel | None = None
        self.model, files = (load_model(config), {}) if config.lora else load_for_sharding(config)
        self.host: Any = host_model(self.model, self.dtype) if team.rank == 0 else None
        replicated = self._add_adapters(config.lora, seed, adapter, team.device) if config.lora else set[nn.Parameter]()
        shard(
            self.model,
            team.mesh,
            dtype=self.dtype,
            reshard_after_forward=trainer.reshard_after_forward,
            replicated=replicated,
        )
        if files:
            load_rows(self.model, files, dtype=self.dtype, device=team.device)

    def _add_adapters(self, config: LoraConfig, seed: int, adapter: Path | None, device: torch.device) -> set[nn.Parameter]:
        self.lora = LoraModel(self.model, config, seed=seed)
        if adapter is not None:
            self.lora.load_adapter(adapter)
        adapters = {parameter for parameter in self.model.parameters() if parameter.requires_grad}
        for parameter in adapters:  # FSDP moves the others
            parameter.data = parameter.data.to(device)
        return adapters


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

    def _placed(self, value: Tensor, master: nn.Parameter) -> Tensor:
        if not isinstance(master, DTensor) or not value.ndim:
            return value
        return DTensor.from_local(
            value, master.device_mesh, master.placements, run_check=False, shape=master.shape, stride=master.stride()
        )


class ShardedLearner(Learner):
    """A `Learner` on one rank of `team`. Rank 0 is used like a `Learner`; the others call `follow`."""

    _several_ranks = True

    def __init__(
        self,
        policy: ShardedPolicy,
        config: TrainerConfig,
        team: Team,
        *,
        temperature: float,
        pack: Packer,
        correction: CorrectionConfig = DEFAULT_CORRECTION,
        skip_zero_advantage: bool = True,
    ) -> None:
        self._team = team
        self._policy = policy
        self._host_is_current = False
        super().__init__(
            policy.model,
            config,
            temperature=temperature,
            pack=pack,
            correction=correction,
            skip_zero_advantage=skip_zero_advantage,
            lora=policy.lora,
        )
        self._attention_cost = attention_cost(self.model)
        if self._forward.padded:
            self._waste = 1.0  # one forward for each micro-batch: the ranks' collective calls must be the same

    def _new_optimizer(self, config: TrainerConfig) -> Optimizer:
        """Raises RuntimeError if a parameter to train is not sharded: the optimizer would train a gathered copy."""
        reshard(self.model)
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        whole = [name for name, parameter in trained.items() if not isinstance(parameter, DTensor)]
        if whole and self._policy.lora is None:
            raise RuntimeError(f"{len(whole)} parameters of the model are not sharded, for example {whole[0]}")
        narrow = self._policy.lora is None and is_narrow(self._policy.dtype)
        return ShardedOptimizer(self.model, config, narrow=narrow)

    # ---- Rank 0

    def _order(self, order: ranks.Order) -> None:
        if self._team.rank == 0:
            self._team.peers.send(order)

    def _differentiate(
        self, used: Sequence[TrainingSample], version: int, normalizer: int, on_micro_batch: OnMicroBatch | None
    ) -> tuple[int, Sums]:
        size, budget, lengths = self._team.size, self._config.micro_batch_tokens, segment_lengths(used)
        if self._forward.padded:
            grid = plan_padded(lengths, size, budget)
        else:
            costs = [token_cost(of_sample, self._attention_cost) for of_sample in lengths]
            grid = plan([sample.length for sample in used], costs, size, budget, self._pack)
        peers = self._team.peers
        peers.send(ranks.Differentiate(version, normalizer, len(grid)))
        for row in grid:
            for rank in range(1, self._team.size):
                peers.send(ranks.Place(tuple(used[index] for index in row[rank])), rank)
        column = ([used[index] for index in row[0]] for row in grid)
        sums = self._accumulate_all(column, len(grid), version, normalizer, on_micro_batch)
        for rank in range(1, self._team.size):
            tokens = sum(used[index].sampled_count for row in grid for index in row[rank])
            _add_received(sums, rank, tokens)
        return sum(bool(place) for row in grid for place in row), sums

    def _update(self, rate: float) -> float:
        self._order(ranks.Update(rate))
        self._host_is_current = False
        return super()._update(rate)

    @torch.no_grad()
    def logits(self, segments: Sequence[Segment]) -> Tensor:
        self._order(ranks.Forward(tuple(segments)))
        logits_PV = super().logits(segments)
        reshard(self.model)
        return logits_PV

    def weights(self) -> Mapping[str, Tensor]:
        """All weights, on the CPU. They are valid until the next call after a step."""
        self._gather()
        return named_weights(self._policy.host)

    def save_pretrained(self, folder: Path) -> None:
        self._gather()
        self._policy.host.save_pretrained(folder)
        if self.lora is not None:
            self.lora.save_adapter(folder)

    def save_optimizer(self, folder: Path) -> Mapping[str, FileRecord]:
        """Raises CheckpointError if a rank can't write its file."""
        if self.lora is not None:  # every rank has the whole state of adapters
            return super().save_optimizer(folder)
        peers = self._team.peers
        peers.send(ranks.SaveOptimizer(str(folder.absolute())))
        save_optimizer(folder, self.optimizer.state(), 0, self._team.size)
        files, errors = {}, []
        for rank in range(1, self._team.size):
            while not ((saved := peers.receive(ranks.Saved, rank)).error or saved.record):
                self.on_sent(saved.sent_bytes)
            if saved.record:
                files[saved.name] = saved.record
            else:
                errors.append(f"rank {rank} can't write its part of the optimizer's state: {saved.error}")
        if errors:
            raise CheckpointError(errors[0])
        return files

    def load_optimizer(self, checkpoint: Checkpoint) -> None:
        """Every rank reads its own rows. Raises CheckpointError like `Learner`."""
        if self.lora is not None:
            super().load_optimizer(checkpoint)
        else:
            rows = partial(rows_of, rank=self._team.rank, ranks=self._team.size)
            self.optimizer.load_state(checkpoint.optimizer_state(rows))

    # ---- All ranks

    def _accumulate_all(self, *arguments: Any, **options: Any) -> Sums:
        sums = super()._accumulate_all(*arguments, **options)
        if self.lora is not None:
            adapters = [p.grad for p in self.model.parameters() if p.requires_grad and p.grad is not None]
            flat = torch.cat([gradient.flatten() for gradient in adapters])
            distributed.all_reduce(flat)
            for gradient, summed in zip(adapters, torch.split(flat, [g.numel() for g in adapters]), strict=True):
                gradient.copy_(summed.view_as(gradient))
        return sums

    def _accumulate(self, samples: Sequence[TrainingSample], version: int, normalizer: int, sums: Sums) -> None:
        if samples:
            super()._accumulate(samples, version, normalizer, sums)
            return
        logits_PV = self._forward(PackedRow.of([IDLE], self._device))
        (logits_PV.sum() * 0.0).backward()  # type: ignore[no-untyped-call]

    def _gather(self) -> None:
        """Copy all weights to the model on rank 0, unless no step was taken since the last time."""
        if self._host_is_current:
            return
        self._order(ranks.Gather())
        host, lora = self._policy.host, self.lora
        modules = dict(host.named_modules()) if host is not None else {}

        def take(path: str, parameters: Mapping[str, Tensor]) -> None:
            if ".lora_" in path:
                return
            path = path.removesuffix(".base_layer")
            for name, value in parameters.items():
                adapted = lora.layers.get(path) if lora is not None and name == "weight" else None
                modules[path].get_parameter(name).copy_(value if adapted is None else adapted.merged_weight())

        gather(self.model, take if host is not None else None)
        self._host_is_current = host is not None

    # ---- Ranks above 0

    def follow(self, reference: ShardedReference | None = None, folders: Folders = Folders()) -> None:  # noqa: B008
        """Carry out the orders of rank 0, until it says that training has ended. Raises RankLostError if it is lost.

        `reference`: this rank's part of the reference model, if there is one. `folders`: where it writes checkpoints.
        """
        peers = self._team.peers
        while True:
            match peers.next():
                case ranks.Differentiate(version, normalizer, rows):
                    places = self._places(rows)
                    _send(self._accumulate_all(places, rows, version, normalizer))
                case ranks.Update(rate):
                    self._update(rate)
                case ranks.Forward(segments):
                    self.logits(segments)
                case ranks.Gather():
                    self._gather()
                case ranks.SaveOptimizer(folder):
                    peers.send(self._save_rows(folder, folders))
                case ranks.Score(rows) if reference is not None:
                    reference.follow(rows)
                case ranks.Close():
                    return
                case other:
                    raise RuntimeError(f"rank 0 gave an order that does not exist: {type(other).__name__}")

    def _places(self, rows: int) -> Iterator[Sequence[TrainingSample]]:
        for _ in range(rows):
            yield self._team.peers.receive(ranks.Place).samples

    def _save_rows(self, folder: str, folders: Folders) -> ranks.Saved:
        told = 0

        def on_sent(sent_bytes: int) -> None:
            nonlocal told
            if sent_bytes > told:
                told = sent_bytes
                self._team.peers.send(ranks.Saved(sent_bytes=told))

        folders.on_sent = on_sent
        try:
            file = save_optimizer(folders.mine(folder), self.optimizer.state(), self._team.rank, self._team.size)
            return ranks.Saved("", file.name, folders.finished(file))
        except (OSError, SafetensorError, CheckpointError) as error:
            return ranks.Saved(str(error))


# ---- The sums of a rank as tensors: per token in float32, which is exact for lags and lengths up to 2^24


def _send(sums: Sums) -> None:
    totals = torch.tensor([float(sums.loss), float(sums.cells)], dtype=torch.float64)
    distributed.send(totals, 0)
    tokens_7N = sums.stats.packed()
    if tokens_7N.numel():
        distributed.send(tokens_7N, 0)


def _add_received(sums: Sums, rank: int, tokens: int) -> None:
    totals = torch.empty(2, dtype=torch.float64)
    distributed.recv(totals, rank)
    tokens_7N = torch.empty(PACKED_COLUMNS, tokens)
    if tokens:
        distributed.recv(tokens_7N, rank)
    sums.loss += totals[0].to(sums.loss.device)
    sums.cells += int(totals[1])
    sums.stats.add_packed(tokens_7N)


# ---- the reference model of a KL penalty


class ShardedReference(FrozenModelScorer):
    """A `FrozenModelScorer` on one rank of `team`: rank 0 calls `score`, and the others `follow` its order.

    It is the base model under the adapters of `policy`; without adapters, `config` is loaded. All ranks must create it at
    the same point. Raises the errors of `load_model`, and UnsupportedModelError like `training_forward`.
    """

    _several_ranks = True

    def __init__(
        self,
        policy: ShardedPolicy,
        config: ModelConfig,
        trainer: TrainerConfig,
        team: Team,
        *,
        temperature: float,
        pack: Packer,
    ) -> None:
        model = policy.model
        if policy.lora is None:
            dtype = DTYPES[config.dtype]
            model, files = load_for_sharding(config, frozen=True)
            kept = trainer.reshard_after_forward
            shard(model, team.mesh, dtype=dtype, reshard_after_forward=kept, replicated=set())
            if files:
                load_rows(model, files, dtype=dtype, device=team.device)
        self._team = team
        self._attention_cost = attention_cost(model)
        super().__init__(
            model,
            temperature=temperature,
            micro_batch_tokens=trainer.micro_batch_tokens,
            pack=pack,
            lora=policy.lora,
            head_chunk=trainer.head_chunk,
        )
        if self._forward.padded:
            self._waste = 1.0  # as in `ShardedLearner`
        reshard(model)

    def score(self, segments: Sequence[Segment]) -> list[list[float]]:
        lengths = [len(segment.token_ids) for segment in segments]
        if self._forward.padded:
            grid = plan_padded([[length] for length in lengths], self._team.size, self._budget)
        else:
            costs = [token_cost([length], self._attention_cost) for length in lengths]
            grid = plan(lengths, costs, self._team.size, self._budget, self._pack)
        peers = self._team.peers
        peers.send(ranks.Score(len(grid)))
        for row in grid:
            for rank in range(1, self._team.size):
                peers.send(ranks.Unscored(tuple(segments[index] for index in row[rank])), rank)
        own_N = self._score_all([segments[index] for index in row[0]] for row in grid)
        scores: list[list[float]] = [[] for _ in segments]
        for rank in range(self._team.size):
            indices = [index for row in grid for index in row[rank]]
            counts = [len(segments[index].sampled_positions) for index in indices]
            found_N = own_N if rank == 0 else torch.empty(sum(counts))
            if rank and found_N.numel():
                distributed.recv(found_N, rank)
            for index, found_n in zip(indices, torch.split(found_N, counts), strict=True):
                scores[index] = found_n.tolist()
        return scores

    def follow(self, rows: int) -> None:
        """Carry out an order to score: compute the places of this rank and send the results to rank 0."""
        found_N = self._score_all(self._team.peers.receive(ranks.Unscored).segments for _ in range(rows))
        if found_N.numel():
            distributed.send(found_N, 0)

    def _score_all(self, places: Iterable[Sequence[Segment]]) -> Tensor:
        """The log-probabilities of this rank's places, one after the other, on the CPU. Computes empty places as well."""
        found = [torch.empty(0)]
        for segments in places:
            logprobs_P = self.logprobs(segments or [IDLE])
            if segments:
                found.append(logprobs_P.float().cpu())
        reshard(self._model)
        return torch.cat(found)
