"""The reference model of a KL penalty, sharded over the ranks of a trainer like the policy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, distributed

from pipelinerl.config.schema import ModelConfig, TrainerConfig
from pipelinerl.models.loading import DTYPES
from pipelinerl.models.sharded import load_for_sharding, load_rows, reshard, shard
from pipelinerl.trainer.logprobs import FrozenModelScorer
from pipelinerl.trainer.micro_batch import Packer
from pipelinerl.trainer.sharding import ranks
from pipelinerl.trainer.sharding.learner import IDLE, ShardedPolicy
from pipelinerl.trainer.sharding.plan import attention_cost, plan, plan_padded, token_cost
from pipelinerl.types import Segment


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
        team: ranks.Team,
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
