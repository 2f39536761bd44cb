"""The engine against transformers: same tokens, same log-probabilities, exact versions, whatever happens in between."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal

import msgspec
import pytest
import torch
from transformers import DynamicCache

from pipelinerl.engine import LocalEngine
from pipelinerl.types import Completion, GenerationRequest, SamplingParams, versions_from_spans
from tests.parity.models import CONFIGS, QUICK, THROUGH_CACHE, VOCABULARY, make_model
from tests.unit.engine.engine_parts import serve, update_of

SLOW, EXHAUSTIVE = (pytest.mark.slow,), (pytest.mark.slow, pytest.mark.exhaustive)
USUAL = (
    *QUICK,
    "qwen3.5-delta-rule",
    "deepseek-v3-latents",
    "falcon-mamba-token-by-token",
    "gemma2",
    "gpt-neox",
    "gpt-oss-sinks",
)
"""The others differ from these only in what the engine's own check compares when it loads them."""

MARKS = dict.fromkeys(CONFIGS, EXHAUSTIVE) | dict.fromkeys(USUAL, SLOW) | dict.fromkeys(QUICK, ())
pytestmark = pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=MARKS[name]) for name in sorted(CONFIGS)],
)
TOLERANCE = 1e-4
MAX_LENGTH = 128


def engine_of(model: Any, **options: Any) -> LocalEngine:
    engine = LocalEngine(model, **{"slots": 6, "max_length": MAX_LENGTH, "prefill_tokens": 24} | options)
    # A family that suddenly can't be run over packed batches, or flattened, would run, but slowly and unnoticed.
    packed = model.config.model_type not in {config.model_type for config in THROUGH_CACHE.values()}
    assert ("exported graph" in engine._runner.description) == (packed and options.get("flatten", True))
    assert ("own cache" in engine._runner.description) != packed
    return engine


def requests(count: int, temperature: float, max_tokens: int = 40) -> list[GenerationRequest]:
    """Prompts of many lengths, some of them equal, some longer than a chunk and than the sliding windows."""
    generator = torch.Generator().manual_seed(7)
    lengths = [3, 1, 30, 30, 7, 55, 12, 3, 21, 2][:count]
    prompts = [tuple(torch.randint(3, VOCABULARY, (n,), generator=generator).tolist()) for n in lengths]
    prompts[3] = prompts[2]
    return [
        GenerationRequest(
            id=f"r{i}",
            prompt_ids=prompt,
            sampling=SamplingParams(max_tokens=max_tokens - 3 * i, temperature=temperature, stop_token_ids=(2,), seed=i),
        )
        for i, prompt in enumerate(prompts)
    ]


CHECKED = (0, 3, 5, 8)
"""Requests to compare with generation token by token, which takes longest: the longest answer, a prompt that occurs twice,
one of several chunks, and one that starts when another has ended."""


@torch.no_grad()
def full_forward_logprobs(model: Any, prompt: tuple[int, ...], completion: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities [len(prompt) + len(completion) - 1, V] of a plain forward over the whole sequence."""
    ids = torch.tensor([[*prompt, *completion]])
    return model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)


def gaps_to_full_forwards(models: Mapping[int, Any], request: GenerationRequest, done: Completion) -> torch.Tensor:
    """|engine - full forward with the weights of the token's version| of each sampled token's log-probability."""
    versions_T = torch.tensor(versions_from_spans(done.weight_versions, len(done.token_ids)))
    gaps_T = torch.zeros(len(versions_T))
    for version in set(versions_T.tolist()):
        rows = full_forward_logprobs(models[version], request.prompt_ids, done.token_ids)[len(request.prompt_ids) - 1 : -1]
        expected_T = rows.gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
        gaps_T = torch.where(versions_T == version, (expected_T - torch.tensor(done.logprobs)).abs(), gaps_T)
    return gaps_T


@torch.no_grad()
def mixed_cache_logprobs(models: dict[int, Any], request: GenerationRequest, done: Completion) -> list[float]:
    """Token by token over transformers' own cache: each position's entries by the weights that fed it to the model."""
    cache = DynamicCache(config=models[0].config)
    name = "cache_params" if "cache_params" in inspect.signature(models[0].forward).parameters else "past_key_values"
    prompt = request.prompt_ids
    versions = versions_from_spans(done.weight_versions, len(done.token_ids))
    logits = None
    for span in done.prompt_versions:
        # After the first tokens one by one: not every recurrence can be continued by several.
        starts = [span.start, *range(span.start + 1, span.end)] if span.start else [0]
        for start, end in pairwise([*starts, span.end]):
            ids = torch.tensor([prompt[start:end]])
            logits = models[span.version](input_ids=ids, **{name: cache}, use_cache=True).logits[0, -1]
    found = []
    for i, token in enumerate(done.token_ids):
        if i:
            ids = torch.tensor([[done.token_ids[i - 1]]])
            logits = models[versions[i]](input_ids=ids, **{name: cache}, use_cache=True).logits[0, -1]
        assert logits is not None
        found.append(float(logits.float().log_softmax(-1)[token]))
    return found


def test_greedy_tokens_are_those_of_generate(family: str) -> None:
    reference = make_model(family)
    engine = engine_of(make_model(family))
    wanted = requests(10, temperature=0.0)
    for i, (request, done) in enumerate(zip(wanted, engine.generate(wanted), strict=True)):
        rows = full_forward_logprobs(reference, request.prompt_ids, done.token_ids)[len(request.prompt_ids) - 1 : -1]
        assert rows.argmax(-1).tolist() == list(done.token_ids)
        if i not in CHECKED:
            continue
        out = reference.generate(
            torch.tensor([request.prompt_ids]),
            attention_mask=torch.ones(1, len(request.prompt_ids), dtype=torch.long),
            max_new_tokens=request.sampling.max_tokens,
            do_sample=False,
            eos_token_id=2,
            pad_token_id=0,
        )
        assert list(done.token_ids) == out[0, len(request.prompt_ids) :].tolist()


@pytest.mark.parametrize("flatten", [True, False])
def test_log_probabilities_are_those_of_a_full_forward(family: str, flatten: bool) -> None:
    if family in THROUGH_CACHE and not flatten:
        pytest.skip("the model's own cache is used with and without a graph")
    reference = make_model(family)
    engine = engine_of(make_model(family), flatten=flatten)
    wanted = requests(10, temperature=1.0)
    for request, done in zip(wanted, engine.generate(wanted), strict=True):
        assert (gaps_to_full_forwards({0: reference}, request, done) < TOLERANCE).all()


def test_after_an_update_with_recompute_everything_is_as_with_the_new_weights(family: str) -> None:
    models = {version: make_model(family, seed=version) for version in range(3)}
    engine = engine_of(make_model(family, seed=0), kv_on_update="recompute")
    wanted = requests(10, temperature=1.0)
    done = serve(engine, wanted, {2: update_of(models[1], 1), 17: update_of(models[2], 2)})
    switched = 0
    for request in wanted:
        completion = done[request.id]
        switched += len(completion.weight_versions) > 1
        assert (gaps_to_full_forwards(models, request, completion) < TOLERANCE).all()
    assert switched >= 3


def test_after_an_update_with_kept_entries_a_mixed_cache_gives_the_same(family: str) -> None:
    if family == "deepseek-v3-latents":
        pytest.skip("transformers' cache has latents, which newer weights expand; the engine's has keys and values")
    models = {version: make_model(family, seed=version) for version in range(3)}
    engine = engine_of(make_model(family, seed=0), kv_on_update="keep")
    wanted = requests(10, temperature=1.0)
    done = serve(engine, wanted, {2: update_of(models[1], 1), 17: update_of(models[2], 2)})
    checked = [(wanted[i], done[wanted[i].id]) for i in CHECKED]
    assert any(len(completion.prompt_versions) > 1 for _, completion in checked)
    assert sum(len(completion.weight_versions) > 1 for _, completion in checked) >= 2
    for request, completion in checked:
        expected = mixed_cache_logprobs(models, request, completion)
        assert max(abs(a - b) for a, b in zip(expected, completion.logprobs, strict=True)) < TOLERANCE


def test_versions_are_exact_to_the_token(family: str) -> None:
    """One sequence whose prompt is done in the first step samples token i in step i: versions follow from the steps."""
    models = {version: make_model(family, seed=version) for version in range(3)}
    engine = engine_of(make_model(family, seed=0))
    request = GenerationRequest(id="x", prompt_ids=(5, 6, 7), sampling=SamplingParams(max_tokens=12, seed=1))
    done = serve(engine, [request], {4: update_of(models[1], 1), 9: update_of(models[2], 2)})["x"]
    assert versions_from_spans(done.weight_versions, 12) == [0] * 4 + [1] * 5 + [2] * 3


def next_turns(wanted: list[GenerationRequest], done: Mapping[str, Completion], turn: int) -> list[GenerationRequest]:
    """Each continues a request by its completion and five more tokens."""
    return [
        msgspec.structs.replace(
            request,
            id=f"{request.id}.{turn}",
            prompt_ids=(*request.prompt_ids, *done[request.id].token_ids, *range(10 + turn, 15 + turn)),
            sampling=msgspec.structs.replace(request.sampling, max_tokens=8),
        )
        for request in wanted
    ]


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_turns_continue_from_what_rows_hold(family: str, kv: Literal["keep", "recompute"]) -> None:
    """Of the version of each position that they read, whichever rows that are and wherever updates come."""
    if family == "deepseek-v3-latents" and kv == "keep":
        pytest.skip("transformers' cache has latents, which newer weights expand; the engine's has keys and values")
    models = {version: make_model(family, seed=version) for version in range(4)}
    engine = engine_of(make_model(family, seed=0), kv_on_update=kv)
    wanted = [msgspec.structs.replace(one, reuses_from=0) for one in requests(10, temperature=1.0, max_tokens=30)]
    found: list[tuple[GenerationRequest, Completion]] = []
    for turn in range(1, 4):
        done = serve(engine, wanted, {3: update_of(models[turn], turn)})
        found += [(one, done[one.id]) for one in wanted]
        wanted = next_turns(wanted, done, turn)
    progress = engine.progress()
    assert progress.prefilled_tokens < 0.85 * progress.prompt_tokens
    for request, completion in found if kv == "recompute" else found[::4]:
        if kv == "recompute":
            assert (gaps_to_full_forwards(models, request, completion) < TOLERANCE).all()
        else:
            expected = mixed_cache_logprobs(models, request, completion)
            assert max(abs(a - b) for a, b in zip(expected, completion.logprobs, strict=True)) < TOLERANCE
    read = [len(completion.prompt_versions) for _, completion in found]
    assert max(read) > 1 if kv == "keep" else {*read} == {1}
