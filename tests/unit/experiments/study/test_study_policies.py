"""Sampling from mixed policies, and the distributions of its tokens, against transformers' own cache and forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from pipelinerl.experiments import recompute
from pipelinerl.experiments.recompute import KV
from pipelinerl.experiments.study.inputs import StudyPrompt
from pipelinerl.experiments.study.policies import (
    CompletedPrompt,
    Divergences,
    MixedSampler,
    Stretch,
    TokenDivergences,
    mixed_policy,
)
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


def prompts(lengths: Sequence[int] = (3, 3, 9, 1, 30)) -> list[StudyPrompt]:
    generator = torch.Generator().manual_seed(3)
    sampling = [
        SamplingParams(max_tokens=LENGTH, temperature=TEMPERATURE, stop_token_ids=(5, 6, 7), seed=i)
        for i in range(len(lengths))
    ]
    return [
        StudyPrompt(
            i,
            GenerationRequest(
                id=f"r{i}",
                prompt_ids=tuple(torch.randint(3, VOCABULARY, (n,), generator=generator).tolist()),
                sampling=sampling[i],
            ),
        )
        for i, n in enumerate(lengths)
    ]


class Bench:
    """Engines and replays that tests share: making one takes a moment, and they must not depend on what they did before."""

    def __init__(self, models: Mapping[int, Any]) -> None:
        self.models = models
        self.tensors = lambda version: named_weights(models[version])
        sizes = {"slots": SLOTS, "prompt_tokens": 30, "max_tokens": LENGTH}
        kinds: tuple[KV, ...] = ("keep", "recompute")
        self.samplers = {kv: MixedSampler(make_model("llama", seed=9), self.tensors, **sizes, kv=kv) for kv in kinds}
        others = (make_model("llama", seed=9), make_model("llama", seed=9))
        self.divergences = Divergences(*others, slots=SLOTS, max_length=64, temperature=TEMPERATURE)

    def sample(self, stretches: Sequence[Stretch], *, kv: KV = "keep") -> list[CompletedPrompt]:
        return self.samplers[kv].sample(prompts(), stretches)

    def compare(self, samples: Sequence[CompletedPrompt], *, kv: KV = "keep") -> tuple[TokenDivergences, float]:
        return self.divergences.run(samples, TARGET, self.tensors, kv=kv)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(family())


@torch.no_grad()
def slow_distributions(models: Mapping[int, Any], sampled: CompletedPrompt, versions: Sequence[int], kv: KV) -> torch.Tensor:
    """Log-probabilities [tokens, V], token by token: a cache that is kept, or no cache at all."""
    prompt, completion = sampled.prompt.request.prompt_ids, sampled.completion.token_ids
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
    stretches = mixed_policy(0, LAG, LENGTH)
    assert len(stretches) == 3
    done = bench.sample(stretches, kv=kv)
    tokens, gap = bench.compare(done, kv=kv)
    assert gap < 1e-4
    found = {
        (int(problem), int(position)): (exact, ratio, version)
        for problem, position, exact, ratio, version in zip(
            tokens.problem_N, tokens.position_N, tokens.exact_N, tokens.log_ratio_N, tokens.version_N, strict=True
        )
    }
    assert len(found) == len(tokens.problem_N) == sum(len(sampled.completion.token_ids) for sampled in done)
    for sampled in done:
        ids = sampled.completion.token_ids
        versions = versions_from_spans(sampled.completion.weight_versions, len(ids))
        mu = slow_distributions(bench.models, sampled, versions, kv)
        pi = slow_distributions(bench.models, sampled, [TARGET] * len(ids), kv)
        for i, token in enumerate(ids):
            exact, ratio, version = found[sampled.prompt.problem, i]
            assert version == versions[i]
            assert exact == pytest.approx(float((mu[i].exp() * (mu[i] - pi[i])).sum()), abs=1e-5)
            assert ratio == pytest.approx(float(pi[i, token] - mu[i, token]), abs=1e-4)


def test_the_gap_to_the_engine_tells_kept_from_recomputed_entries(bench: Bench) -> None:
    """Without this, the checks above could not tell one from the other."""
    stretches = mixed_policy(0, LAG, LENGTH)
    done = bench.sample(stretches)
    _, gap = bench.compare(done, kv="recompute")
    assert gap > 1e-3


def test_a_token_of_other_weights_is_an_error(bench: Bench) -> None:
    """The second stretch claims tokens that the first one samples."""
    wrong = (Stretch(0, 3, 0), Stretch(2, LENGTH, 1))
    with pytest.raises(RuntimeError, match="was sampled by"):
        bench.sample(wrong)
