"""The study of stale KV entries: what it takes from a run, its arithmetic against slow references, and the distributions of
sampled tokens against transformers' own cache and forward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from pipelinerl.errors import RunDirectoryError, UserError
from pipelinerl.experiments import recompute
from pipelinerl.experiments.recompute import KV, Recompute, Sampled
from pipelinerl.experiments.study import (
    MixedSampler,
    Tokens,
    by_problem,
    choose_starts,
    divergences,
    equivalent_lag,
    exact_kl,
    make_requests,
    mixed_policy,
    read_history,
)
from pipelinerl.models.state import named_weights
from pipelinerl.types import GenerationRequest, SamplingParams, versions_from_spans
from tests.parity.models import VOCABULARY, make_model
from tests.unit.experiments.parts import group, turn, write_rollouts

RUN = Path("r")
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
        sizes = {"slots": SLOTS, "prompt_tokens": 30, "max_length": 30 + LENGTH}
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
    """Log-probabilities [tokens, V], token by token: a cache that stays, or no cache at all."""
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
    rows = zip(*(values.tolist() for values in tokens), strict=True)
    found = {(problem, position): others for problem, position, *others in rows}
    assert len(found) == len(tokens.problem) == sum(len(sampled.completion.token_ids) for sampled in done)
    for sampled in done:
        ids = sampled.completion.token_ids
        versions = versions_from_spans(sampled.completion.weight_versions, len(ids))
        mu = slow_distributions(bench.models, sampled, versions, kv)
        pi = slow_distributions(bench.models, sampled, [TARGET] * len(ids), kv)
        for i in range(len(ids)):
            version, kl = found[sampled.of, i]
            assert version == versions[i]
            assert kl == pytest.approx(float((mu[i].exp() * (mu[i] - pi[i])).sum()), abs=1e-5)


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


# ---- what the study takes from a run


@pytest.mark.parametrize(
    ("saved", "wanted", "lag", "expected"),
    [
        (range(16), ["early", "middle", "late"], 5, [0, 5, 10]),
        (range(16), ["7", "late"], 5, [7, 10]),
        ([0, 3, 4, 5], ["early", "middle", "late"], 2, [3]),
        ([0, 1, 2, 4, 5, 6, 7], ["early", "late"], 2, [0, 5]),
        ([0, 1, 2, 4, 5, 6, 7], ["early"], 4, r"no 5 consecutive checkpoints.*checkpoint_every 1.*keep_checkpoints N"),
        (range(16), ["11"], 5, r"--from 11.*0 to 10 here"),
        (range(16), ["1.5"], 5, r"--from 1.5"),
        (range(16), [], 5, r"--from : give early"),
    ],
)
def test_starts_are_followed_by_enough_checkpoints(
    saved: list[int], wanted: list[str], lag: int, expected: list[int] | str
) -> None:
    if isinstance(expected, list):
        assert choose_starts(RUN, saved, wanted, lag) == expected
        return
    with pytest.raises(UserError, match=expected):
        choose_starts(RUN, saved, wanted, lag)


def test_the_latest_prompts_and_the_length_that_most_completions_do_not_exceed(tmp_path: Path) -> None:
    lengths = {2: (1, 2, 3, 4), 0: (5, 6, 7), 1: (8, 9, 10)}
    write_rollouts(tmp_path, [group(n, *([turn(length, prompt=n + 1)] for length in some)) for n, some in lengths.items()])
    groups, length = read_history(tmp_path)
    assert length == 9
    sampling = SamplingParams(max_tokens=33, temperature=0.7, stop_token_ids=(1,))
    found = make_requests(groups[:2], sampling, 3, 4)
    assert [(problem, len(request.prompt_ids)) for problem, request in found] == [(0, 3)] * 3 + [(1, 2)] * 3
    requests = [request for _, request in found]
    assert all(msgspec.structs.replace(request.sampling, seed=None) == sampling for request in requests)
    assert len({request.id for request in requests}) == len({request.sampling.seed for request in requests}) == 6
    assert found == make_requests(groups[:2], sampling, 3, 4) != make_requests(groups[:2], sampling, 3, 5)


def test_records_that_can_not_be_used(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="is not a run directory"):
        read_history(tmp_path)
    write_rollouts(tmp_path, [])
    with pytest.raises(RunDirectoryError, match="holds no rollout"):
        read_history(tmp_path)
    write_rollouts(tmp_path / "turns", [group(0, [turn(3)] * 2)])
    with pytest.raises(UserError, match="several turns"):
        read_history(tmp_path / "turns")


# ---- arithmetic


@given(st.integers(0, 200), st.integers(1, 40), st.integers(0, 300))
def test_versions_are_those_of_a_clock(first: int, lag: int, more: int) -> None:
    """A token takes g/L of an optimizer step; the update of a step arrives one step after its data were complete."""
    length = lag + more
    versions = []
    for token in range(length):
        steps_done = 0
        while (steps_done + 1) * length <= token * lag:  # in whole numbers: token >= (steps_done + 1) L / g
            steps_done += 1
        versions.append(first + max(0, steps_done - 1))
    assert mixed_policy(first, lag, length) == versions
    assert (versions[0], first + lag - versions[-1]) == (first, min(lag, 2))


def test_a_token_without_probability_adds_nothing_to_the_kl() -> None:
    mu = torch.tensor([[math.log(0.25), math.log(0.75), -math.inf]])
    pi = torch.tensor([[0.5, 0.25, 0.25]]).log()
    expected = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.25)
    assert exact_kl(mu, pi).tolist() == pytest.approx([expected])
    assert exact_kl(mu, mu).tolist() == [0.0]


def test_sums_by_problem_and_position() -> None:
    problem, position = np.array([0, 2, 2, 0, 2, 0]), np.array([0, 1, 2, 0, 0, 1])
    tokens = Tokens(problem, position, np.zeros(6, dtype=int), np.array([0.0, 1.0, 2.0, 3.0, 0.0, 1.0]))
    sums, counts = by_problem(tokens, 4, (1, 2, 9))
    assert sums.T.tolist() == [[4, 0, 3, 0], [1, 0, 1, 0], [0, 0, 2, 0]]
    assert counts.T.tolist() == [[3, 0, 3, 0], [1, 0, 1, 0], [0, 0, 1, 0]]


@pytest.mark.parametrize(("kl", "lag"), [(0.5, 0.5), (2.0, 1.5), (5.0, 3.5), (9.0, None), (0.0, 0.0)])
def test_equivalent_lag(kl: float, lag: float | None) -> None:
    assert equivalent_lag(kl, [0.0, 1.0, 3.0, 2.0, 8.0]) == pytest.approx(lag)
    assert equivalent_lag(0.0, [0.0, 0.0]) == 0.0
