"""Computes both policies' full distributions at every sampled token, by feeding the sampled sequences to the models again.

The behaviour model does what the engine did at each switch: it keeps the keys and values, or recomputes all with the new
weights. The target model has the weights C+g throughout. Both process the sequences one stretch of tokens at a time, so
that the distributions of only one stretch are in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipelinerl.engine.attention import Chunk
from pipelinerl.engine.runner import ModelRunner
from pipelinerl.experiments.study.divergence import TokenDivergences, exact_kl, joined, log_probabilities
from pipelinerl.experiments.study.sampling import KV, Sampled, Stretch, Tensors
from pipelinerl.models.state import load_weights

LONGEST_STRETCH = 256
FED_TOKENS = 8192
DISTRIBUTIONS = 1 << 23
"""Limits per forward: `FED_TOKENS` input tokens, and `DISTRIBUTIONS` log-probabilities in its output (tokens x vocabulary).
A stretch of one sequence is never split, so it may exceed them."""


class Replayed(NamedTuple):
    """`engine_gap` is the largest |log mu here - log mu of the engine| over sampled tokens. It should be rounding error."""

    tokens: TokenDivergences
    engine_gap: float


class _Feed(NamedTuple):
    """Positions `start <= p < end` of a sequence in row `row`; the last `kept` of them predict sampled tokens."""

    row: int
    start: int
    end: int
    kept: int


class Replay:
    """Replays sequences on two instances of the model, each with its own slots."""

    def __init__(self, behaviour: Any, target: Any, *, slots: int, max_length: int, temperature: float) -> None:
        """Takes ownership of both models: their weights are replaced."""
        self._behaviour = ModelRunner(behaviour, slots, max_length)
        self._target = ModelRunner(target, slots, max_length)
        self._slots = slots
        self._temperature = temperature

    @torch.inference_mode()
    def run(
        self, samples: Sequence[Sampled], stretches: Sequence[Stretch], target: int, tensors: Tensors, *, kv: KV
    ) -> Replayed:
        """Divergence from the weights of version `target` at every sampled token. `stretches` and `kv` as in sampling."""
        load_weights(self._target.model, tensors(target))
        # Sorted, because neighbouring sequences with equal prompt length share one attention call.
        ordered = sorted(samples, key=lambda s: (len(s.prompt.request.prompt_ids), -len(s.completion.token_ids)))
        parts: list[TokenDivergences] = []
        gaps = [0.0]
        for begin in range(0, len(ordered), self._slots):
            wave = ordered[begin : begin + self._slots]
            for stretch in _split(stretches):
                load_weights(self._behaviour.model, tensors(stretch.version))
                for tokens, gap in self._stretch(wave, stretch, kv):
                    parts.append(tokens)
                    gaps.append(gap)
        return Replayed(joined(parts), max(gaps))

    def _stretch(self, wave: Sequence[Sampled], stretch: Stretch, kv: KV) -> Iterator[tuple[TokenDivergences, float]]:
        target_feeds = _feeds(wave, stretch, from_start=False)
        behaviour_feeds = _feeds(wave, stretch, from_start=kv == "recompute")
        for batch in _batches(behaviour_feeds, self._behaviour.vocabulary):
            mu_NV = self._log_probabilities(self._behaviour, wave, behaviour_feeds[batch])
            pi_NV = self._log_probabilities(self._target, wave, target_feeds[batch])
            yield self._compare(wave, behaviour_feeds[batch], stretch, mu_NV, pi_NV)

    def _log_probabilities(self, runner: ModelRunner, wave: Sequence[Sampled], feeds: Sequence[_Feed]) -> Tensor:
        ids: list[int] = []
        positions: list[int] = []
        keep: list[int] = []
        chunks = []
        for feed in feeds:
            chunks.append(Chunk(begin=len(ids), count=feed.end - feed.start, row=feed.row, offset=feed.start))
            ids += _ids(wave[feed.row])[feed.start : feed.end]
            positions += range(feed.start, feed.end)
            keep += range(len(ids) - feed.kept, len(ids))
        logits_NV = runner.forward(runner.kv, ids, positions, keep=keep, chunks=tuple(chunks))
        return log_probabilities(logits_NV, self._temperature)

    def _compare(
        self, wave: Sequence[Sampled], feeds: Sequence[_Feed], stretch: Stretch, mu_NV: Tensor, pi_NV: Tensor
    ) -> tuple[TokenDivergences, float]:
        token_N = [t for feed in feeds for t in wave[feed.row].completion.token_ids[stretch.start :][: feed.kept]]
        engine_N = [p for feed in feeds for p in wave[feed.row].completion.logprobs[stretch.start :][: feed.kept]]
        column_N1 = torch.tensor(token_N, device=mu_NV.device)[:, None]
        mu_N = mu_NV.gather(1, column_N1)[:, 0].cpu().numpy()
        pi_N = pi_NV.gather(1, column_N1)[:, 0].cpu().numpy()
        behaviour_N = np.array(engine_N, dtype=np.float64)
        tokens = TokenDivergences(
            problem_N=np.repeat([wave[feed.row].prompt.problem for feed in feeds], [feed.kept for feed in feeds]),
            position_N=np.concatenate([np.arange(stretch.start, stretch.start + feed.kept) for feed in feeds]),
            version_N=np.full(len(token_N), stretch.version),
            exact_N=exact_kl(mu_NV, pi_NV).cpu().numpy(),
            log_ratio_N=pi_N - behaviour_N,
        )
        return tokens, float(np.abs(mu_N - behaviour_N).max())


def _ids(sample: Sampled) -> tuple[int, ...]:
    return (*sample.prompt.request.prompt_ids, *sample.completion.token_ids)


def _feeds(wave: Sequence[Sampled], stretch: Stretch, *, from_start: bool) -> list[_Feed]:
    """The input positions for each sequence that reaches the stretch. Token t is predicted at position prompt + t - 1.

    With `from_start`, all positions are fed again, prompt included; otherwise those before the stretch are in the KV cache.
    """
    feeds = []
    for row, sample in enumerate(wave):
        prompt, count = len(sample.prompt.request.prompt_ids), len(sample.completion.token_ids)
        kept = min(count, stretch.end) - stretch.start
        if kept > 0:
            start = 0 if from_start or stretch.start == 0 else prompt + stretch.start - 1
            feeds.append(_Feed(row, start, prompt + stretch.start + kept - 1, kept))
    return feeds


def _split(stretches: Sequence[Stretch]) -> list[Stretch]:
    """Split into stretches of at most LONGEST_STRETCH tokens. This does not change the result."""
    return [
        Stretch(start, min(start + LONGEST_STRETCH, stretch.end), stretch.version)
        for stretch in stretches
        for start in range(stretch.start, stretch.end, LONGEST_STRETCH)
    ]


def _batches(feeds: Sequence[_Feed], vocabulary: int) -> list[slice]:
    """Consecutive feeds that fit into one forward, by `FED_TOKENS` and `DISTRIBUTIONS`."""
    edges = [0]
    fed = kept = 0
    for index, feed in enumerate(feeds):
        fed, kept = fed + feed.end - feed.start, kept + feed.kept
        if index > edges[-1] and (fed > FED_TOKENS or kept * vocabulary > DISTRIBUTIONS):
            edges.append(index)
            fed, kept = feed.end - feed.start, feed.kept
    return [slice(start, end) for start, end in pairwise([*edges, len(feeds)]) if start < end]
