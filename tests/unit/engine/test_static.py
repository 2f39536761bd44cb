"""Static decode steps: nothing in them waits, results come one step late, and requests notice nothing of either."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from pipelinerl.engine import LocalEngine
from pipelinerl.engine.static import StaticEngine, engine_for
from pipelinerl.errors import UnsupportedModelError
from pipelinerl.serving.wire import token_events
from pipelinerl.types import GenerationRequest, versions_from_spans
from tests.parity.models import VOCABULARY, make_model
from tests.parity.test_engine import gaps_to_full_forwards
from tests.unit.engine.engine_parts import request, serve, update_of


def static(slots: int = 4, **options: Any) -> StaticEngine:
    settings = {"slots": slots, "max_length": 96, "prefill_tokens": 16, "flatten": False} | options
    made = engine_for(make_model("llama"), decoding="static", **settings)
    assert isinstance(made, StaticEngine)
    return made


def packed(slots: int = 4) -> LocalEngine:
    made = engine_for(make_model("llama"), slots=slots, max_length=96, flatten=False)
    assert type(made) is LocalEngine
    return made


@pytest.mark.parametrize(
    ("plain", "flatten"), [(True, False), (False, False), pytest.param(True, True, marks=pytest.mark.exhaustive)]
)
def test_a_step_neither_waits_for_the_device_nor_depends_on_what_it_computes(plain: bool, flatten: bool) -> None:
    served = static(flatten=flatten)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        served._rows.step(4, plain)  # .item(), nonzero() and indexing by a mask raise here


def mixed(count: int, seed: int) -> list[GenerationRequest]:
    generator = random.Random(seed)
    ways = [{}, {}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 3}, {"temperature": 0.0}]
    return [
        request(
            f"r{i}",
            tuple(generator.randrange(3, VOCABULARY) for _ in range(generator.randint(1, 40))),
            generator.randint(1, 40),
            stop_token_ids=tuple(generator.sample(range(VOCABULARY), generator.choice([0, 1, 6]))),
            stream=generator.random() < 0.3,
            **generator.choice(ways),
        )
        for i in range(count)
    ]


def test_requests_of_all_kinds_get_the_tokens_that_packed_steps_give_them() -> None:
    wanted = mixed(16, seed=0)
    assert max(len(request.sampling.stop_token_ids) for request in wanted) > 4  # more than there is room for at first
    for found, expected in zip(static(5).generate(wanted), packed(5).generate(wanted), strict=True):
        assert (found.token_ids, found.finish_reason) == (expected.token_ids, expected.finish_reason)
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 6))])
def test_streams_cancellations_and_updates_at_any_step_leave_every_token_and_version_right(seed: int) -> None:
    """With recomputed entries each token's log-prob is that of a full forward with the weights of its version."""
    generator = random.Random(seed)
    models = {version: make_model("llama", version) for version in range(3)}
    served = static(10, kv_on_update="recompute")
    wanted = {request.id: request for request in mixed(16, seed + 1)}
    for asked in wanted.values():
        served.submit(asked)
    updates, cancelled = dict(zip(sorted(generator.sample(range(1, 40), 2)), (1, 2), strict=True)), set()
    done, events = {}, defaultdict(list)
    for step in range(400):
        if step in updates:
            served.update_weights(update_of(updates[step], version=updates[step]))
        if generator.random() < 0.1:
            name = generator.choice(sorted(wanted))
            served.cancel(name)
            cancelled.add(name)
        output = served.step()
        for event in output.tokens:
            events[event.request_id].append(event)
        done |= {completion.request_id: completion for completion in output.finished}
        if len(done) == len(wanted):
            break
    assert len(done) == len(wanted)
    assert {name for name, completion in done.items() if completion.finish_reason == "cancelled"} <= cancelled
    for name, asked in wanted.items():
        found = done[name]
        versions = versions_from_spans(found.weight_versions, len(found.token_ids))
        if asked.stream:
            streamed, whole = events[name], token_events(found)
            assert streamed == whole[: len(streamed)]
            assert found.finish_reason == "cancelled" or len(streamed) == len(whole)
        prompt = [(span.version, span.start, span.end) for span in found.prompt_versions]
        assert prompt == [(version, 0, len(asked.prompt_ids)) for version in versions[-1:]]
        if asked.sampling.temperature == 1 and not asked.sampling.top_k:
            assert (gaps_to_full_forwards(models, asked, found) < 1e-4).all()


def test_rows_gather_when_most_have_ended() -> None:
    wanted = [request(f"r{i}", (3 + i, 4, 5), 60 if i >= 18 else 5 + i % 3) for i in range(20)]
    served = static(20)
    done = serve(served, wanted)
    assert served._table.highest() == 0
    assert served._rows.integers[0][:8].max() > 40  # one of the two long sequences, which began in the last rows
    expected = packed(20).generate(wanted)
    assert all(done[one.request_id].token_ids == one.token_ids for one in expected)


def test_a_row_that_ended_before_an_update_keeps_the_versions_it_was_made_with() -> None:
    wanted = [request("short", max_tokens=2), request("long", max_tokens=9)]
    # After two steps the second token of "short" has been sampled, but not been read.
    done = serve(static(kv_on_update="recompute"), wanted, {2: update_of(1, version=1)})
    spans = {name: [(span.version, span.end) for span in completion.weight_versions] for name, completion in done.items()}
    assert spans == {"short": [(0, 2)], "long": [(0, 2), (1, 9)]}
    assert [span.version for span in done["short"].prompt_versions] == [0]
    assert [span.version for span in done["long"].prompt_versions] == [1]


def test_a_model_that_needs_scores_is_refused_by_static_steps_only() -> None:
    with pytest.raises(UnsupportedModelError, match="soft caps"):
        engine_for(make_model("gemma2"), decoding="static", slots=1, max_length=32)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "norms"), [("llama", 5), ("qwen3", 9), ("gemma3", 0)])
def test_norms_are_one_operation_each(family: str, norms: int) -> None:
    """Of a layer two, and in Qwen 3 those of queries and keys. Gemma's have other weights and stay as they are."""
    runner = StaticEngine(make_model(family).bfloat16(), slots=2, max_length=64)._runner  # compares it with the model's own
    assert runner._flat is not None
    graph = runner._flat._run.__self__.graph  # type: ignore[attr-defined]
    assert sum(node.target is F.rms_norm for node in graph.nodes) == norms
