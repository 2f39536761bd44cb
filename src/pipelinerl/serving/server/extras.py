"""What some requests need beyond sampled tokens: alternatives, and changed or constrained logits.

    ServerEngine, before each token of a request with extras      Rule.apply      changes its row of logits
                  after it                                        Rule.sampled, Extras.tops

Other requests are computed exactly as by `LocalEngine`, at the same cost. Extras are written in the engine's thread; the
event loop reads the entries of the tokens that were delivered to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from pipelinerl.engine import LocalEngine
from pipelinerl.engine.rows import Ints
from pipelinerl.engine.sampler import SamplingRows, distribution
from pipelinerl.types import GenerationRequest

if TYPE_CHECKING:
    from pipelinerl.serving.server.openai.bodies import Adjustments

Likeliest = list[tuple[int, float]]
"""Token ids with their log-probs, likeliest first."""


class Rule(Protocol):
    """Changes the logits of one request."""

    def apply(self, logits_V: Tensor) -> None:
        """Change the logits in place. Raises ValueError if the rule can't be followed any longer."""

    def sampled(self, token_id: int) -> None: ...


class Extras:
    """The extras of one request.

    `top`: how many likeliest tokens to record; `tops[i]`: those of sampled token i, under the distribution that it was drawn
    from. `error`: why the request was cancelled.
    """

    def __init__(self, *, top: int = 0, rules: Sequence[Rule] = ()) -> None:
        self.top, self.rules = top, rules
        self.tops: list[Likeliest] = []
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


class ServerEngine(LocalEngine):
    """The embedded engine, which also serves requests with extras."""

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


def _likeliest(logprobs_nV: Tensor, count: int) -> list[Likeliest]:
    found = logprobs_nV.topk(min(count, logprobs_nV.shape[1]))
    pairs = zip(found.indices.tolist(), found.values.tolist(), strict=True)
    return [list(zip(ids, values, strict=True)) for ids, values in pairs]
