"""Behaviour policies: sampling from them with the engine, and their divergence from a target policy at every token.

A policy is the version of the weights that samples each token of a completion. Weights change at exact tokens of sequences
that start together. Then the sampled sequences are fed to two models again, for both policies' full distributions at every
sampled token (`recompute.py`): the behaviour model has the weights that sampled each token, the target model those of C+g.

Shapes: N tokens, V vocabulary, U problems.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipelinerl.engine import LocalEngine
from pipelinerl.experiments.recompute import KV, Recompute, Sampled, Tensors, values_of
from pipelinerl.experiments.statistics import Floats
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.models.state import checksum
from pipelinerl.types import Completion, GenerationRequest, VersionSpan, versions_from_spans

# ---- which weights sample which token


def mixed_policy(first: int, lag: int, length: int) -> list[int]:
    """The version of each token of a mixed policy: C + max(0, floor(t g / L) - 1).

    A sequence of up to L = `length` tokens is sampled while the trainer takes g = `lag` optimizer steps, from C = `first`
    to C+g. One step takes as long as an interval of L/g tokens. The first weight update arrives after two intervals, and
    one more at the end of each further interval:

        token       0 ... 2L/g ... 3L/g ...      (g-1)L/g ... L
        weights     |   C   |  C+1  |  C+2  ...      |  C+g-2 |      trained on by C+g: lags g, g-1, ..., 2

    So there are g - 2 switches, and the lowest lag is 2. If L/g is not an integer, a switch takes place at the first token
    at or after its point. Source: PipelineRL, arXiv 2509.19128, section 5.1. Raises ValueError unless 1 <= lag <= length.
    """
    if not 1 <= lag <= length:
        raise ValueError(f"a lag of {lag} steps over {length} tokens: each step needs at least one token")
    return [first + max(0, token * lag // length - 1) for token in range(length)]


def interval_edges(lag: int, length: int) -> tuple[int, ...]:
    """The `lag` + 1 edges, from 0 to `length`, of the intervals that correspond to one optimizer step each.

    Edge i is ceil(i L / g), the first token t with floor(t g / L) = i.
    """
    return tuple(-(-i * length // lag) for i in range(lag + 1))


class MixedSampler:
    """Samples from one policy after another with one engine.

    An engine's version can't decrease, but the study's versions do. So the engine gets an update number that increases
    with every update, and the numbers in its completions are replaced by the versions they stand for.
    """

    def __init__(self, model: Any, tensors: Tensors, *, slots: int, prompt_tokens: int, max_tokens: int, kv: KV) -> None:
        """Takes ownership of the model. `prompt_tokens` and `max_tokens` are the longest prompt and completion to expect."""
        self._tensors = tensors
        self._slots = slots
        self._versions = [-1]  # by update number; 0: the initial weights, never used
        self._engine = LocalEngine(
            model,
            slots=slots,
            max_length=prompt_tokens + max_tokens,
            # All prompts are processed in the first step: every sequence then samples token s in step s.
            prefill_tokens=slots * prompt_tokens,
            kv_on_update=kv,
        )

    def sample(self, requests: Sequence[tuple[int, GenerationRequest]], policy: Sequence[int]) -> list[Sampled]:
        """Complete requests, given with their problems; token t is sampled by `policy[t]`. Stop tokens end a sequence.

        Raises RuntimeError if a token was sampled by another version.
        """
        found = []
        for begin in range(0, len(requests), self._slots):
            wave = {request.id: (problem, request) for problem, request in requests[begin : begin + self._slots]}
            for _, request in wave.values():
                self._engine.submit(request)
            token, done = 0, 0
            while done < len(wave):
                if token < len(policy) and (token == 0 or policy[token] != policy[token - 1]):
                    weights = self._tensors(policy[token])
                    self._engine.update_weights(WeightUpdate(len(self._versions), checksum(weights), weights))
                    self._versions.append(policy[token])
                for completion in self._engine.step().finished:
                    problem, request = wave[completion.request_id]
                    found.append(Sampled(request.prompt_ids, self._checked(completion, policy), problem))
                    done += 1
                token += 1
        return found

    def _checked(self, completion: Completion, policy: Sequence[int]) -> Completion:
        """The completion with versions in place of the engine's update numbers."""
        spans = tuple(VersionSpan(self._versions[span.version], span.start, span.end) for span in completion.weight_versions)
        count = len(completion.token_ids)
        if versions_from_spans(spans, count) != list(policy[:count]):
            raise RuntimeError(f"{completion.request_id} was sampled by {spans}, not by {policy}")
        return msgspec.structs.replace(completion, weight_versions=spans, prompt_versions=())


# ---- KL(mu || pi) of sampled tokens: exact over the vocabulary, and the estimators k1 and k3


def exact_kl(behaviour_NV: Tensor, target_NV: Tensor) -> Tensor:
    """sum_v mu_v (log mu_v - log pi_v) in nats, [N] in float64, given log-probabilities. Tokens with mu = 0 add nothing."""
    mu_NV = behaviour_NV.double().exp()
    terms_NV = mu_NV * (behaviour_NV.double() - target_NV.double())
    return terms_NV.masked_fill(mu_NV == 0, 0.0).sum(-1)


Tokens = Mapping[str, npt.NDArray[Any]]
"""Arrays [N] with an entry per sampled token: `problem`, `position`, `version`, and estimates of the KL at its position.

exact   between the two distributions, given the sampled prefix
k1      -log w for w = pi / mu of the sampled token, mu as the engine returned it: unbiased, but often negative
k3      w - 1 - log w: unbiased, never negative (Schulman, Approximating KL divergence, 2020)
"""


def sums(tokens: Tokens, name: str, problems: int, start: int = 0, end: float = np.inf) -> tuple[Floats, Floats]:
    """Sum of an array and number of tokens by problem, both [U], over positions start <= p < end."""
    inside_N = (tokens["position"] >= start) & (tokens["position"] < end)
    problem_n = tokens["problem"][inside_N]
    sums_U = np.bincount(problem_n, weights=tokens[name][inside_N], minlength=problems).astype(np.float64)
    return sums_U, np.bincount(problem_n, minlength=problems).astype(np.float64)


def divergences(
    behaviour: Recompute, target: Recompute, samples: Sequence[Sampled], tensors: Tensors, kv: KV
) -> tuple[Tokens, float]:
    """Divergence of the behaviour policy from the weights that `target` has, at every sampled token. `kv` as in sampling.

    Also returns the largest |log mu here - log mu of the engine| over sampled tokens. It should be rounding error.
    """
    parts: list[Tokens] = []
    fed: dict[str, int] = defaultdict(int)
    gap = 0.0
    for version, feeds, mu_NV in behaviour.run(samples, tensors, kv):
        pi_NV = target.log_probabilities([feed._replace(start=fed[feed.sequence.completion.request_id]) for feed in feeds])
        fed |= {feed.sequence.completion.request_id: feed.end for feed in feeds}
        ids, engine = values_of(feeds)
        column_N1 = torch.tensor(ids, device=mu_NV.device)[:, None]
        mu_N, pi_N = (log_NV.gather(1, column_N1)[:, 0].cpu().numpy() for log_NV in (mu_NV, pi_NV))
        behaviour_N = np.array(engine, dtype=np.float64)
        gap = max(gap, float(np.abs(mu_N - behaviour_N).max()))
        log_ratio_N = pi_N - behaviour_N
        parts.append(
            {
                "problem": np.repeat([feed.sequence.of for feed in feeds], [feed.kept for feed in feeds]),
                "position": np.concatenate([np.arange(feed.token, feed.token + feed.kept) for feed in feeds]),
                "version": np.full(len(ids), version),
                "exact": exact_kl(mu_NV, pi_NV).cpu().numpy(),
                "k1": -log_ratio_N,
                "k3": np.expm1(log_ratio_N) - log_ratio_N,
            }
        )
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}, gap


def equivalent_lag(kl: float, kl_by_lag: Sequence[float]) -> float | None:
    """The lag k at which `kl_by_lag[k]` first reaches `kl`, interpolated linearly; None if it never does."""
    for lag, (below, above) in enumerate(pairwise(kl_by_lag)):
        if above >= kl:
            return lag + (max(0.0, kl - below) / (above - below) if above > below else 0.0)
    return None
