"""Behaviour policies: sampling from them with the engine, and their divergence from a target policy at every token.

Weights change at exact tokens of sequences that start together. Then the sampled sequences are fed to two models again, for
both policies' full distributions at every sampled token. The behaviour model does what the engine did at each switch: it
keeps the keys and values, or recomputes all with the new weights. The target model has the weights C+g throughout. Both
process the sequences one stretch of tokens at a time, so that the distributions of only one stretch are in memory.

Shapes: N tokens, V vocabulary, U problems.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from pipelinerl.engine import LocalEngine
from pipelinerl.engine.attention import Chunk
from pipelinerl.engine.runner import make_runner
from pipelinerl.engine.runners import Runner
from pipelinerl.experiments.statistics import Floats, Ints
from pipelinerl.experiments.study.inputs import Prompt
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.models.state import checksum, load_weights
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


KV = Literal["keep", "recompute"]
Tensors = Callable[[int], Mapping[str, Tensor]]
"""Function from a version to its weights by name."""


class Sampled(NamedTuple):
    """A prompt and its completion."""

    prompt: Prompt
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

    def sample(self, prompts: Sequence[Prompt], stretches: Sequence[Stretch]) -> list[Sampled]:
        """Complete `prompts`; token t is sampled by the version of the stretch that contains t. Stop tokens end a sequence.

        Raises RuntimeError if a token was sampled by another version.
        """
        found = []
        for begin in range(0, len(prompts), self._slots):
            found += self._sample_together(prompts[begin : begin + self._slots], stretches)
        return found

    def _sample_together(self, prompts: Sequence[Prompt], stretches: Sequence[Stretch]) -> list[Sampled]:
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
        return [Sampled(prompt, done[prompt.request.id]) for prompt in prompts]

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


def log_probabilities(logits_NV: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature), in float64: the divergences can be as small as float32 rounding errors."""
    return (logits_NV.double() / temperature).log_softmax(-1)


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


# ---- replay of the sampled sequences


LONGEST_STRETCH = 256
FED_TOKENS = 8192
DISTRIBUTIONS = 1 << 23
"""Limits per forward: `FED_TOKENS` input tokens, and `DISTRIBUTIONS` log-probabilities in its output (tokens x vocabulary).
A stretch of one sequence is never split, so it may exceed them."""


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
        self._behaviour = make_runner(behaviour, slots, max_length)
        self._target = make_runner(target, slots, max_length)
        self._slots = slots
        self._temperature = temperature

    @torch.inference_mode()
    def run(
        self, samples: Sequence[Sampled], stretches: Sequence[Stretch], target: int, tensors: Tensors, *, kv: KV
    ) -> tuple[TokenDivergences, float]:
        """Divergence from the weights of version `target` at every sampled token. `stretches` and `kv` as in sampling.

        Also returns the largest |log mu here - log mu of the engine| over sampled tokens. It should be rounding error.
        """
        _load(self._target, tensors(target))
        # Sorted, because neighbouring sequences with equal prompt length share one attention call.
        ordered = sorted(samples, key=lambda s: (len(s.prompt.request.prompt_ids), -len(s.completion.token_ids)))
        parts: list[TokenDivergences] = []
        gaps = [0.0]
        for begin in range(0, len(ordered), self._slots):
            wave = ordered[begin : begin + self._slots]
            for whole in stretches:
                _load(self._behaviour, tensors(whole.version))
                for start in range(whole.start, whole.end, LONGEST_STRETCH):  # splitting does not change the result
                    stretch = whole._replace(start=start, end=min(start + LONGEST_STRETCH, whole.end))
                    for tokens, gap in self._stretch(wave, stretch, kv):
                        parts.append(tokens)
                        gaps.append(gap)
        return joined(parts), max(gaps)

    def _stretch(self, wave: Sequence[Sampled], stretch: Stretch, kv: KV) -> Iterator[tuple[TokenDivergences, float]]:
        target_feeds = _feeds(wave, stretch, from_start=False)
        behaviour_feeds = _feeds(wave, stretch, from_start=kv == "recompute")
        for batch in _batches(behaviour_feeds, self._behaviour.vocabulary):
            mu_NV = self._log_probabilities(self._behaviour, wave, behaviour_feeds[batch])
            pi_NV = self._log_probabilities(self._target, wave, target_feeds[batch])
            yield self._compare(wave, behaviour_feeds[batch], stretch, mu_NV, pi_NV)

    def _log_probabilities(self, runner: Runner, wave: Sequence[Sampled], feeds: Sequence[_Feed]) -> Tensor:
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


def _load(runner: Runner, tensors: Mapping[str, Tensor]) -> None:
    load_weights(runner.model, tensors)
    runner.weights_changed()


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
