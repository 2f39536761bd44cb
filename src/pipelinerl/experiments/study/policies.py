"""Behaviour policies: sampling from them with the engine, and their divergence from a target policy at every token.

Weights change at exact tokens of sequences that start together. Then the sampled sequences are fed to two models again, for
both policies' full distributions at every sampled token (`recompute.py`). The behaviour model has the weights that sampled
each token, the target model the weights C+g throughout.

Shapes: N tokens, V vocabulary, U problems.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from pipelinerl.engine import LocalEngine
from pipelinerl.experiments.recompute import KV, Recompute, Sampled, Tensors, values_of
from pipelinerl.experiments.statistics import Floats, Ints
from pipelinerl.experiments.study.inputs import StudyPrompt
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.models.state import checksum
from pipelinerl.types import Completion, VersionSpan, versions_from_spans

# ---- which weights sample which token


class Stretch(NamedTuple):
    """Tokens `start <= t < end` of every completion, sampled by one `version`."""

    start: int
    end: int
    version: int


def mixed_version(token: int, first: int, lag: int, length: int) -> int:
    """The version that samples token t = `token` of a mixed policy: C + max(0, floor(t g / L) - 1) (see `mixed_policy`)."""
    return first + max(0, token * lag // length - 1)


def mixed_policy(first: int, lag: int, length: int) -> tuple[Stretch, ...]:
    """The stretches of a mixed policy. Raises ValueError unless 1 <= lag <= length.

    A sequence of up to L = `length` tokens is sampled while the trainer takes g = `lag` optimizer steps, from C = `first`
    to C+g. One step takes as long as an interval of L/g tokens. The first weight update arrives after two intervals, and
    one more at the end of each further interval:

        token       0 ... 2L/g ... 3L/g ...      (g-1)L/g ... L
        weights     |   C   |  C+1  |  C+2  ...      |  C+g-2 |      trained on by C+g: lags g, g-1, ..., 2

    So there are g - 2 switches, and the lowest lag is 2. If L/g is not an integer, a switch takes place at the first token
    at or after its point. Source: PipelineRL, arXiv 2509.19128, section 5.1.
    """
    if not 1 <= lag <= length:
        raise ValueError(f"a lag of {lag} steps over {length} tokens: each step needs at least one token")
    edges = interval_edges(lag, length)
    starts = [0, *edges[2:-1]]
    return tuple(
        Stretch(start, end, mixed_version(start, first, lag, length)) for start, end in pairwise([*starts, edges[-1]])
    )


def lagged_policy(version: int, length: int) -> tuple[Stretch, ...]:
    """Conventional RL: one version samples all tokens."""
    return (Stretch(0, length, version),)


def interval_edges(lag: int, length: int) -> tuple[int, ...]:
    """The `lag` + 1 edges, from 0 to `length`, of the intervals that correspond to one optimizer step each.

    Edge i is ceil(i L / g), the first token t with floor(t g / L) = i.
    """
    return tuple(-(-i * length // lag) for i in range(lag + 1))


class CompletedPrompt(NamedTuple):
    """A prompt and its completion."""

    prompt: StudyPrompt
    completion: Completion


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

    def sample(self, prompts: Sequence[StudyPrompt], stretches: Sequence[Stretch]) -> list[CompletedPrompt]:
        """Complete `prompts`; token t is sampled by the version of the stretch that contains t. Stop tokens end a sequence.

        Raises RuntimeError if a token was sampled by another version.
        """
        found = []
        for begin in range(0, len(prompts), self._slots):
            found += self._sample_together(prompts[begin : begin + self._slots], stretches)
        return found

    def _sample_together(self, prompts: Sequence[StudyPrompt], stretches: Sequence[Stretch]) -> list[CompletedPrompt]:
        for prompt in prompts:
            self._engine.submit(prompt.request)
        switches = {stretch.start: stretch.version for stretch in stretches}
        done: dict[str, Completion] = {}
        token = 0
        while len(done) < len(prompts):
            if token in switches:
                self._update(switches[token])
            done |= {completion.request_id: self._with_versions(completion) for completion in self._engine.step().finished}
            token += 1
        expected = [stretch.version for stretch in stretches for _ in range(stretch.start, stretch.end)]
        for completion in done.values():
            count = len(completion.token_ids)
            if versions_from_spans(completion.weight_versions, count) != expected[:count]:
                raise RuntimeError(
                    f"{completion.request_id} was sampled by {completion.weight_versions}, not by {stretches}"
                )
        return [CompletedPrompt(prompt, done[prompt.request.id]) for prompt in prompts]

    def _update(self, version: int) -> None:
        weights = self._tensors(version)
        self._engine.update_weights(WeightUpdate(len(self._versions), checksum(weights), weights))
        self._versions.append(version)

    def _with_versions(self, completion: Completion) -> Completion:
        """Replace the engine's update numbers by versions."""

        def replaced(spans: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
            return tuple(VersionSpan(self._versions[span.version], span.start, span.end) for span in spans)

        return msgspec.structs.replace(
            completion,
            weight_versions=replaced(completion.weight_versions),
            prompt_versions=replaced(completion.prompt_versions),
        )


# ---- KL(mu || pi) of sampled tokens: exact over the vocabulary, and the estimators k1 and k3


def exact_kl(behaviour_NV: Tensor, target_NV: Tensor) -> Tensor:
    """sum_v mu_v (log mu_v - log pi_v) in nats, [N] in float64, given log-probabilities. Tokens with mu = 0 add nothing."""
    mu_NV = behaviour_NV.double().exp()
    terms_NV = mu_NV * (behaviour_NV.double() - target_NV.double())
    return terms_NV.masked_fill(mu_NV == 0, 0.0).sum(-1)


@dataclass(frozen=True, kw_only=True)
class TokenDivergences:
    """One entry per sampled token.

    `exact_N` is the KL between the two distributions at the token's position, given the sampled prefix. k1 and k3 estimate
    it from the sampled token alone.
    """

    problem_N: Ints
    position_N: Ints
    version_N: Ints
    exact_N: Floats
    log_ratio_N: Floats
    """log pi - log mu of the sampled token, mu as the engine returned it."""

    @property
    def k1_N(self) -> Floats:
        """-log w for w = pi / mu: unbiased, but negative about half of the time."""
        return -self.log_ratio_N

    @property
    def k3_N(self) -> Floats:
        """w - 1 - log w: unbiased, never negative (Schulman, Approximating KL divergence, 2020)."""
        return np.expm1(self.log_ratio_N) - self.log_ratio_N

    def sums(self, values_N: Floats, problems: int, start: int = 0, end: int | None = None) -> tuple[Floats, Floats]:
        """Sum of `values_N` and number of tokens by problem, both [U], over positions start <= p < end."""
        inside_N = (self.position_N >= start) & (self.position_N < (np.inf if end is None else end))
        problem_n = self.problem_N[inside_N]
        sums_U: Floats = np.bincount(problem_n, weights=values_N[inside_N], minlength=problems).astype(np.float64)
        tokens_U: Floats = np.bincount(problem_n, minlength=problems).astype(np.float64)
        return sums_U, tokens_U


def joined(parts: Sequence[TokenDivergences]) -> TokenDivergences:
    """All tokens of `parts`, in order."""
    names = [field.name for field in fields(TokenDivergences)]
    return TokenDivergences(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def equivalent_lag(kl: float, kl_by_lag: Sequence[float]) -> float | None:
    """The lag k at which `kl_by_lag[k]` first reaches `kl`, interpolated linearly; None if it never does."""
    for lag, (below, above) in enumerate(pairwise(kl_by_lag)):
        if above >= kl:
            return lag + (max(0.0, kl - below) / (above - below) if above > below else 0.0)
    return None


# ---- both policies' distributions of the sampled sequences


class Divergences:
    """Feeds sequences to two instances of the model: with the weights that sampled them, and with those of the target."""

    def __init__(self, behaviour: Any, target: Any, *, slots: int, max_length: int, temperature: float) -> None:
        """Takes ownership of both models: their weights are replaced."""
        sizes: dict[str, Any] = {"slots": slots, "max_length": max_length, "temperature": temperature}
        self._behaviour, self._target = (Recompute(model, **sizes) for model in (behaviour, target))

    def run(
        self, samples: Sequence[CompletedPrompt], target: int, tensors: Tensors, *, kv: KV
    ) -> tuple[TokenDivergences, float]:
        """Divergence from the weights of version `target` at every sampled token. `kv` as in sampling.

        Also returns the largest |log mu here - log mu of the engine| over sampled tokens. It should be rounding error.
        """
        self._target.load(tensors(target))
        # Sorted, because neighbouring sequences with equal prompt length share one attention call.
        ordered = sorted(samples, key=lambda s: (len(s.prompt.request.prompt_ids), -len(s.completion.token_ids)))
        slots = self._behaviour.slots
        found = [
            part
            for begin in range(0, len(ordered), slots)
            for part in self._wave(ordered[begin : begin + slots], tensors, kv)
        ]
        return joined([tokens for tokens, _ in found]), max(gap for _, gap in found)

    def _wave(self, wave: Sequence[CompletedPrompt], tensors: Tensors, kv: KV) -> Iterator[tuple[TokenDivergences, float]]:
        sequences = [Sampled(one.prompt.request.prompt_ids, one.completion) for one in wave]
        fed = [0] * len(wave)
        for version, feeds, mu_NV in self._behaviour.run(sequences, tensors, kv):
            pi_NV = self._target.log_probabilities(sequences, [feed._replace(start=fed[feed.row]) for feed in feeds])
            for feed in feeds:
                fed[feed.row] = feed.end
            ids, engine = values_of(sequences, feeds)
            column_N1 = torch.tensor(ids, device=mu_NV.device)[:, None]
            mu_N, pi_N = (log_NV.gather(1, column_N1)[:, 0].cpu().numpy() for log_NV in (mu_NV, pi_NV))
            behaviour_N = np.array(engine, dtype=np.float64)
            tokens = TokenDivergences(
                problem_N=np.repeat([wave[feed.row].prompt.problem for feed in feeds], [feed.kept for feed in feeds]),
                position_N=np.concatenate([np.arange(feed.token, feed.token + feed.kept) for feed in feeds]),
                version_N=np.full(len(ids), version),
                exact_N=exact_kl(mu_NV, pi_NV).cpu().numpy(),
                log_ratio_N=pi_N - behaviour_N,
            )
            yield tokens, float(np.abs(mu_N - behaviour_N).max())
