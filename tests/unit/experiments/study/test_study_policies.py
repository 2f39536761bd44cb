"""Sampling from mixed policies, and the distributions of its tokens, against transformers' own cache and forward."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from pipelinerl.experiments import recompute
from pipelinerl.experiments.recompute import KV, Recompute, Sampled
from pipelinerl.experiments.study.policies import MixedSampler, Tokens, divergences, mixed_policy
from pipelinerl.models.state import named_weights
from pipelinerl.types import GenerationRequest, SamplingParams, versions_from_spans
from tests.parity.models import VOCABULARY, make_model

LAG, LENGTH, TARGET = 4, 22, 4
SLOTS = 3
TEMPERATURE = 0.8


def family() -> dict[int, Any]:
    """Weights of versions 0 to 4: each a step from the one before."""
    models = {}
    for version in range(LAG + 1):
        models[version] = make_model("llama", seed=0)
        with torch.no_grad():
            for number, parameter in enumerate(models[version].parameters()):
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
                parameter.add_(noise, alpha=0.01 * version)
    return models


def requests(lengths: Sequence[int] = (3, 3, 9, 1, 30)) -> list[tuple[int, GenerationRequest]]:
    generator = torch.Generator().manual_seed(3)
    found = []
    for i, length in enumerate(lengths):
        sampling = SamplingParams(max_tokens=LENGTH, temperature=TEMPERATURE, stop_token_ids=(5, 6, 7), seed=i)
        ids = tuple(torch.randint(3, VOCABULARY, (length,), generator=generator).tolist())
        found.append((i, GenerationRequest(id=f"r{i}", prompt_ids=ids, sampling=sampling)))
    return found


class Bench:
    """Engines and replays that tests share: making one takes a moment, and they must not depend on what they did before."""

    def __init__(self, models: Mapping[int, Any]) -> None:
        self.models = models
        self.tensors = lambda version: named_weights(models[version])
        sizes = {"slots": SLOTS, "prompt_tokens": 30, "max_tokens": LENGTH}
        kinds: tuple[KV, ...] = ("keep", "recompute")
        self.samplers = {kv: MixedSampler(make_model("llama", seed=9), self.tensors, **sizes, kv=kv) for kv in kinds}
        self.behaviour, self.target = (
            Recompute(make_model("llama", seed=9), slots=SLOTS, max_length=64, temperature=TEMPERATURE) for _ in range(2)
        )
        self.target.load(self.tensors(TARGET))

    def sample(self, policy: Sequence[int], *, kv: KV = "keep") -> list[Sampled]:
        return self.samplers[kv].sample(requests(), policy)

    def compare(self, samples: Sequence[Sampled], *, kv: KV = "keep") -> tuple[Tokens, float]:
        return divergences(self.behaviour, self.target, samples, self.tensors, kv)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(family())


@torch.no_grad()
def slow_distributions(models: Mapping[int, Any], sampled: Sampled, versions: Sequence[int], kv: KV) -> torch.Tensor:
    """Log-probabilities [tokens, V], token by token: a cache that is kept, or no cache at all."""
    prompt, completion = sampled.prompt_ids, sampled.completion.token_ids
    rows = []
    cache = DynamicCache(config=models[0].config)
    for i, version in enumerate(versions):
        if kv == "recompute":
            logits = models[version](torch.tensor([[*prompt, *completion[:i]]]), use_cache=False).logits[0, -1]
        else:
            fed = prompt if i == 0 else completion[i - 1 : i]
            logits = models[version](torch.tensor([fed]), past_key_values=cache, use_cache=True).logits[0, -1]
        rows.append((logits.double() / TEMPERATURE).log_softmax(-1))
    return torch.stack(rows)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_divergences_are_those_of_token_by_token_forwards(kv: KV, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "LONGEST_PIECE", 7)
    monkeypatch.setattr(recompute, "FED_TOKENS", 40)
    monkeypatch.setattr(recompute, "DISTRIBUTIONS", 12 * VOCABULARY)
    policy = mixed_policy(0, LAG, LENGTH)
    assert len(set(policy)) == 3
    done = bench.sample(policy, kv=kv)
    tokens, gap = bench.compare(done, kv=kv)
    assert gap < 1e-4
    names = ("problem", "position", "exact", "k1", "k3", "version")
    rows = zip(*(tokens[name].tolist() for name in names), strict=True)
    found = {(problem, position): others for problem, position, *others in rows}
    assert len(found) == len(tokens["problem"]) == sum(len(sampled.completion.token_ids) for sampled in done)
    for sampled in done:
        ids = sampled.completion.token_ids
        versions = versions_from_spans(sampled.completion.weight_versions, len(ids))
        mu = slow_distributions(bench.models, sampled, versions, kv)
        pi = slow_distributions(bench.models, sampled, [TARGET] * len(ids), kv)
        for i, token in enumerate(ids):
            exact, k1, k3, version = found[sampled.of, i]
            assert version == versions[i]
            assert exact == pytest.approx(float((mu[i].exp() * (mu[i] - pi[i])).sum()), abs=1e-5)
            ratio = float(pi[i, token] - mu[i, token])
            assert k1 == pytest.approx(-ratio, abs=1e-4)
            assert k3 == pytest.approx(math.exp(ratio) - 1 - ratio, abs=1e-4)


def test_the_gap_to_the_engine_tells_kept_from_recomputed_entries(bench: Bench) -> None:
    """Without this, the checks above could not tell one from the other."""
    _, gap = bench.compare(bench.sample(mixed_policy(0, LAG, LENGTH)), kv="recompute")
    assert gap > 1e-3


def test_a_token_of_other_weights_is_an_error(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine applies an update a step late."""
    engine = bench.samplers["keep"]._engine
    own, waiting = engine.update_weights, []

    def late(update: Any) -> None:
        waiting.append(update)
        if len(waiting) > 1:
            own(waiting[-2])

    monkeypatch.setattr(engine, "update_weights", late)
    with pytest.raises(RuntimeError, match="was sampled by"):
        bench.sample(mixed_policy(0, LAG, LENGTH))
