"""What some requests need beyond sampled tokens: alternatives, log-probs of the prompt, changed or constrained logits.

    ServerEngine, before each token of a request with extras      Rule.apply      changes its row of logits
                  after it                                        Rule.sampled, Extras.tops
                  while its prompt is processed                   Extras.prompt

Other requests are computed exactly as by `LocalEngine`, at the same cost. Extras are written in the engine's thread; the
event loop reads the entries of the tokens that were delivered to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from pipelinerl.engine import LocalEngine
from pipelinerl.engine.attention import Chunk
from pipelinerl.engine.rows import Ints, Prefill
from pipelinerl.engine.sampler import SamplingRows
from pipelinerl.engine.truncation import distribution
from pipelinerl.types import GenerationRequest

if TYPE_CHECKING:
    from pipelinerl.serving.server.openai.bodies import Adjustments

_SCORED_TOKENS = 512
"""Largest number of prompt tokens scored in one step: each needs a row of logits."""

Likeliest = list[tuple[int, float]]
"""Token ids with their log-probs, likeliest first."""


class Rule(Protocol):
    """Changes the logits of one request."""

    def apply(self, logits_V: Tensor) -> None:
        """Change the logits in place. Raises ValueError if the rule can't be followed any longer."""

    def sampled(self, token_id: int) -> None: ...


class PromptToken(NamedTuple):
    """The log-prob of a prompt token after those before it, at temperature 1, by the weights of `version`."""

    token_id: int
    logprob: float
    likeliest: Likeliest
    version: int


class Extras:
    """The extras of one request.

    `top`: how many likeliest tokens to record; `tops[i]`: those of sampled token i, under the distribution that it was drawn
    from. `prompt`: the prompt's tokens but the first, if `scores_prompt`. `error`: why the request was cancelled.
    """

    def __init__(self, *, top: int = 0, scores_prompt: bool = False, rules: Sequence[Rule] = ()) -> None:
        self.top, self.scores_prompt, self.rules = top, scores_prompt, rules
        self.tops: list[Likeliest] = []
        self.prompt: list[PromptToken] = []
        self.error: str | None = None

    def change(self, logits_V: Tensor) -> None:
        """Apply all rules. Raises ValueError, with the logits unchanged, if a rule fails or allows no token."""
        changed_V = logits_V.clone()
        for rule in self.rules:
            rule.apply(changed_V)
        if not bool(torch.isfinite(changed_V.max())) and bool(torch.isfinite(logits_V.max())):
            raise ValueError("the parameters of this request allow no token")
        logits_V.copy_(changed_V)


class ExtendedRequest(GenerationRequest, frozen=True, kw_only=True):
    """A request with extras. It must be a stream, so that each of its tokens is looked at."""

    extras: Extras


class Penalties:
    """Applies adjustments in vLLM's order. `temperature`: that of the request."""

    def __init__(self, prompt_ids: Sequence[int], adjustments: Adjustments, temperature: float) -> None:
        self._change = adjustments
        self._gap = (temperature or 1.0) * math.log(adjustments.min_p) if adjustments.min_p else -math.inf
        self._counts: dict[int, int] = {}
        self._seen = set(prompt_ids)

    def apply(self, logits_V: Tensor) -> None:
        def values(numbers: Sequence[float]) -> Tensor:
            return torch.tensor(numbers, dtype=logits_V.dtype, device=logits_V.device)

        bias, presence, frequency, repetition, min_p = self._change
        if bias:
            logits_V[list(bias)] += values(list(bias.values()))
        if repetition != 1:
            seen = list(self._seen)
            seen_M = logits_V[seen]
            logits_V[seen] = torch.where(seen_M > 0, seen_M / repetition, seen_M * repetition)
        if self._counts and (presence or frequency):
            costs = [presence + frequency * count for count in self._counts.values()]
            logits_V[list(self._counts)] -= values(costs)
        if min_p:
            logits_V.masked_fill_(logits_V < logits_V.max() + self._gap, -math.inf)

    def sampled(self, token_id: int) -> None:
        self._counts[token_id] = self._counts.get(token_id, 0) + 1
        self._seen.add(token_id)


class _Scored(NamedTuple):
    """Part of a prompt in this step's packed batch: the tokens after `offset`, from the logits at `begin` on."""

    prefill: Prefill
    begin: int
    offset: int
    length: int


class ServerEngine(LocalEngine):
    """The embedded engine, which also serves requests with extras."""

    _scored: tuple[_Scored, ...] = ()
    _kept: Sequence[int] = ()
    _needed: Sequence[int] = ()

    def _next_chunks(self) -> list[tuple[Prefill, int]]:
        chunks, room = [], _SCORED_TOKENS
        for prefill, count in super()._next_chunks():
            allowed = count
            if self._streaming and _scorers(prefill):
                allowed = min(count, room)
                room -= allowed
            if allowed:
                chunks.append((prefill, allowed))
        return chunks

    def _packed_inputs(self, chunks: Sequence[tuple[Prefill, int]]) -> tuple[Tensor, Tensor, list[int], tuple[Chunk, ...]]:
        ids_T, positions_T, keep, packed = super()._packed_inputs(chunks)
        if self._streaming:
            self._scored = tuple(
                # The logits at the last token of a prompt are those of the first sampled token.
                _Scored(prefill, chunk.begin, chunk.offset, min(chunk.count, len(prefill.prompt_ids) - 1 - chunk.offset))
                for (prefill, _), chunk in zip(chunks, packed, strict=True)
                if _scorers(prefill)
            )
        if self._scored:
            scored = {part.begin + i for part in self._scored for i in range(part.length)}
            self._needed, keep = keep, sorted(scored.union(keep))
            self._kept = keep
        return ids_T, positions_T, keep, packed

    def _run(self, chunks: Sequence[tuple[Prefill, int]]) -> Tensor:
        logits_PV = super()._run(chunks)
        if not self._scored:
            return logits_PV
        scored, self._scored = self._scored, ()
        place = {index: number for number, index in enumerate(self._kept)}
        for prefill, begin, offset, count in scored:
            if count <= 0:
                continue
            logprobs_TV = logits_PV[place[begin] : place[begin] + count].float().log_softmax(-1)
            ids = prefill.prompt_ids[offset + 1 : offset + 1 + count]
            ids_T1 = torch.tensor(ids, device=logprobs_TV.device)[:, None]
            scorers = _scorers(prefill)
            likeliest = _likeliest(logprobs_TV, max(extras.top for extras in scorers))
            of_ids = logprobs_TV.gather(1, ids_T1)[:, 0].tolist()
            tokens = [PromptToken(*token, self._version) for token in zip(ids, of_ids, likeliest, strict=True)]
            for extras in scorers:
                extras.prompt += tokens
        return logits_PV[[place[index] for index in self._needed]]

    def _draw(self, logits_nV: Tensor, rows_n: Ints | slice, uniforms_n: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(rows_n, slice) or not self._streaming:
            return super()._draw(logits_nV, rows_n, uniforms_n)
        requests = [self._table.owner(row).request for row in rows_n.tolist()]
        extended = [(i, request) for i, request in enumerate(requests) if isinstance(request, ExtendedRequest)]
        if not extended:
            return super()._draw(logits_nV, rows_n, uniforms_n)
        logits_nV = logits_nV.float()
        for i, request in extended:
            if request.extras.rules and request.extras.error is None:
                try:
                    request.extras.change(logits_nV[i])
                except ValueError as error:
                    request.extras.error = str(error)
                    self.cancel(request.id)
        ids_n, logprobs_n = super()._draw(logits_nV, rows_n, uniforms_n)
        asking = [i for i, request in extended if request.extras.top]
        if asking:
            most = max(request.extras.top for _, request in extended)
            likeliest = dict(zip(asking, self._likeliest(logits_nV[asking], rows_n[asking], most), strict=True))
        for i, request in extended:
            if request.extras.top:
                request.extras.tops.append(likeliest[i][: request.extras.top])
            for rule in request.extras.rules:
                rule.sampled(int(ids_n[i]))
        return ids_n, logprobs_n

    def _likeliest(self, logits_mV: Tensor, rows_m: Ints, count: int) -> list[Likeliest]:
        """The likeliest tokens of each row, under the distribution that its token is drawn from."""
        table, device = self._table, logits_mV.device
        greedy_m = table.temperature[rows_m] <= 0  # drawn without truncation
        rows = SamplingRows(
            temperature_n=torch.from_numpy(table.temperature[rows_m]).to(device),
            top_p_n=torch.from_numpy(np.where(greedy_m, np.float32(1), table.top_p[rows_m])).to(device),
            top_k_n=torch.from_numpy(np.where(greedy_m, 0, table.top_k[rows_m])).to(device),
        )
        return _likeliest(distribution(logits_mV - logits_mV.max(-1, keepdim=True).values, rows), count)


def _scorers(prefill: Prefill) -> list[Extras]:
    requests = [member.request for member in prefill.members]
    return [r.extras for r in requests if isinstance(r, ExtendedRequest) and r.extras.scores_prompt]


def _likeliest(logprobs_nV: Tensor, count: int) -> list[Likeliest]:
    found = logprobs_nV.topk(min(count, logprobs_nV.shape[1]))
    pairs = zip(found.indices.tolist(), found.values.tolist(), strict=True)
    return [list(zip(ids, values, strict=True)) for ids, values in pairs]
