"""How the engine treats requests: independence, streaming, cancelling, errors, updates in the middle of everything."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pipelinerl.engine import LocalEngine, flat, local
from pipelinerl.engine.static import engine_for
from pipelinerl.errors import LogitsError, PromptTooLongError, RequestError, UnsupportedModelError, WeightUpdateError
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.models.state import checksum, device_checksum, named_weights
from pipelinerl.serving.wire import token_events
from pipelinerl.types import cancelled_completion
from tests.parity.models import VOCABULARY, make_family, make_model
from tests.unit.engine.engine_parts import request, serve, update_of

LONG_PROMPT = tuple(random.Random(1).randrange(3, VOCABULARY) for _ in range(40))


def engine(slots: int = 4, **options: Any) -> LocalEngine:
    return LocalEngine(
        make_model("llama"), **{"slots": slots, "max_length": 96, "prefill_tokens": 16, "flatten": False} | options
    )


def test_same_prompt_is_prefilled_once_and_sampled_apart() -> None:
    group = [request(f"g{i}", tuple(range(3, 15)), 8, temperature=1.5) for i in range(4)]
    served = engine()
    for member in group:
        served.submit(member)
    served.step()
    assert served.progress().tokens_generated == 4  # 48 prompt tokens would have taken three steps of 16
    done = serve(served)
    assert len({completion.token_ids for completion in done.values()}) > 1
    for member in group:
        alone = engine().generate([member])[0]
        assert done[member.id].token_ids == alone.token_ids
        assert done[member.id].logprobs == pytest.approx(alone.logprobs, abs=1e-5)


def test_cancel_frees_the_slot_wherever_the_request_is_and_leaves_the_others_right() -> None:
    expected = engine().generate([request("follower", LONG_PROMPT, 12)])[0]
    served = engine(slots=3)
    served.submit(request("decoding", max_tokens=50))
    served.step()
    for name in ("leader", "follower", "waiting"):  # the first two share a prefill
        served.submit(request(name, LONG_PROMPT, 12))
    served.step()  # 16 of 40 prompt tokens
    assert (served.in_progress, served.queued) == (3, 1)
    for name in ("decoding", "leader", "waiting", "unknown"):
        served.cancel(name)
    cancelled = {completion.request_id: completion for completion in served.step().finished}
    assert {name: len(completion.token_ids) for name, completion in cancelled.items()} == {
        "decoding": 2,
        "leader": 0,
        "waiting": 0,
    }
    assert {completion.finish_reason for completion in cancelled.values()} == {"cancelled"}
    done = serve(served)["follower"]
    assert (done.token_ids, done.finish_reason) == (expected.token_ids, "length")
    assert done.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def test_a_request_that_can_not_be_served_fails_alone_with_the_numbers() -> None:
    served = engine()
    served.submit(request("good", max_tokens=4))
    odd = ({"top_p": 0.0}, {"temperature": math.nan}, {"temperature": math.inf}, {"temperature": -1.0})
    for refused, problem in (
        (request("long", (3,) * 90, 7), r"90 prompt tokens \+ 7 new tokens > 96"),
        (request("empty", ()), "empty prompt"),
        (request("garbage", (3, VOCABULARY)), "vocabulary"),
        (request("good"), "already"),
        (request("none", max_tokens=0), "0 tokens"),
        *((request("odd", **options), "out of range") for options in odd),
    ):
        with pytest.raises(PromptTooLongError if refused.id == "long" else RequestError, match=problem):
            served.submit(refused)
    assert set(serve(served)) == {"good"}


def test_an_update_neither_drops_nor_delays_a_sequence() -> None:
    served = engine(slots=3)
    for i in range(6):
        served.submit(request(f"r{i}", (3 + i, 4, 5), max_tokens=12, stream=True))
    steps = 0
    tokens_by_step = []
    while served.in_progress or served.queued:
        if steps in (3, 9, 15):
            receipt = served.update_weights(update_of(steps, version=steps))
            assert receipt.sequences_in_flight == 3
            assert receipt.checksum == update_of(steps, steps).checksum
        tokens_by_step.append(len(served.step().tokens))
        steps += 1
    assert tokens_by_step == [3] * 24


def test_an_update_that_does_not_fit_changes_nothing() -> None:
    served = engine(version=5)
    served.submit(request("x", max_tokens=30))
    for _ in range(5):
        served.step()
    good = update_of(1, version=6)
    name = "model.norm.weight"
    broken = {value: good.tensors[name].clone().index_fill_(0, torch.tensor(3), value) for value in (math.nan, math.inf)}
    for changed, problem in (
        (good._replace(tensors=dict(list(good.tensors.items())[1:])), "missing"),
        (good._replace(tensors={key: tensor[..., :-1] for key, tensor in good.tensors.items()}), "of another shape"),
        (good._replace(version=4), "older"),
        *(
            (
                good._replace(tensors={**good.tensors, name: weight}),
                r"1 with values that are not finite \(model.norm.weight\)",
            )
            for weight in broken.values()
        ),
    ):
        with pytest.raises(WeightUpdateError, match=problem):
            served.update_weights(changed)
    assert served.version == 5
    assert serve(served)["x"].token_ids == engine().generate([request("x", max_tokens=30)])[0].token_ids
    served.update_weights(good)
    assert checksum(named_weights(served._runner.model)) == good.checksum


def too_large(version: int) -> WeightUpdate:
    """Finite weights whose logits are not: about 1e18 * 1e25."""
    tensors = dict(update_of(1, version).tensors)
    head = tensors["lm_head.weight"] * 1e18
    tensors |= {"lm_head.weight": head, "model.embed_tokens.weight": head}
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 1e25
    return WeightUpdate(version, checksum(tensors), tensors)


@pytest.mark.parametrize("decoding", ["packed", "static"])
@pytest.mark.parametrize(("temperature", "stream"), [(0.0, True), (1.0, False), (1.0, True)])
def test_logits_that_are_not_finite_end_the_engine_by_an_error(temperature: float, stream: bool, decoding: Any) -> None:
    """Finite weights can be too large to compute with."""
    served = engine_for(make_model("llama"), decoding=decoding, slots=4, max_length=96, flatten=False)
    served.submit(request("x", max_tokens=30, temperature=temperature, stream=stream))
    for _ in range(5):
        served.step()
    served.update_weights(too_large(1))
    with pytest.raises(LogitsError, match="weights of version 1"):
        serve(served)


def test_an_update_does_not_hide_logits_that_were_not_finite() -> None:
    served = engine(slots=1)
    served.submit(request("x", max_tokens=30))
    served.step()
    served.update_weights(too_large(1))
    served.step()
    with pytest.raises(LogitsError, match="weights of version 1"):
        served.update_weights(update_of(1, version=2))


def test_after_a_restart_it_is_as_if_it_had_just_been_made() -> None:
    """Wherever its requests were. It then takes weights of a lower version, and draws what a new engine draws."""
    used, new = engine(slots=2), engine(slots=2)
    used.update_weights(update_of(1, 7))
    for name, prompt in (("decoding", (3, 4)), ("prefilling", LONG_PROMPT), ("waiting", (5, 6))):
        used.submit(request(name, prompt, 50))
        used.step()
    assert (used.in_progress, used.queued) == (2, 1)
    used.restart()
    assert used.progress() == new.progress()
    receipt = used.update_weights(update_of(2, 3))
    new.update_weights(update_of(2, 3))
    assert receipt.sequences_in_flight == 0
    again = [request("decoding"), request("other", (9, 8, 7))]
    assert used.generate(again) == new.generate(again)


@pytest.mark.parametrize("sums", [True, False])
@pytest.mark.parametrize("fault", ["after the copy", "before they were hashed", "rounded to another type"])
def test_weights_that_are_not_those_of_the_update_are_found_out(
    fault: str, sums: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "on_gpu", lambda _: True)  # sums are compared, as on a GPU
    model, update = make_model("llama"), update_of(1, version=1)
    served = LocalEngine(model.bfloat16() if "rounded" in fault else model, slots=4, max_length=96, flatten=False)
    if sums:
        update = update._replace(device_checksum=device_checksum(update.tensors))
    if fault == "before they were hashed":
        update = update._replace(tensors=update_of(2, version=1).tensors)
    copied = served._runner.weights_changed

    def damaged() -> None:
        copied()
        if fault == "after the copy":
            named_weights(model)["model.norm.weight"].view(torch.int32)[3] ^= 1

    served._runner.weights_changed = damaged  # type: ignore[method-assign]
    with pytest.raises(WeightUpdateError, match="after the update to version 1 engine 'engine' holds weights of checksum"):
        served.update_weights(update)
    assert served.version == 0


def test_an_engine_on_the_cpu_verifies_the_checksum_of_an_update_with_sums() -> None:
    good = update_of(1, version=1)
    assert engine().update_weights(good._replace(device_checksum="0" * 32)).checksum == good.checksum
    with pytest.raises(WeightUpdateError, match="checksum"):
        engine().update_weights(good._replace(checksum="0" * 32, device_checksum="0" * 32))


@pytest.mark.parametrize(
    ("kv", "prompt"),
    [("keep", [[(0, 0, 16), (1, 16, 40)]] * 4), ("recompute", [[(1, 0, 40)]] * 2 + [[(2, 0, 40)]] * 2)],
)
def test_a_completion_cut_at_any_token_says_which_weights_read_its_prompt(kv: Any, prompt: list[Any]) -> None:
    """One update comes between two chunks of the prompt, one after two tokens, and one after the last token."""
    served, events = engine(kv_on_update=kv), []
    served.submit(request("x", LONG_PROMPT, 9, stream=True))
    for version in (1, 2, 3):
        while len(events) < 2 * version - 2:
            events += served.step().tokens
        if version == 1:
            served.step()
        served.update_weights(update_of(version, version))
    served.cancel("x")
    (whole,) = served.step().finished
    cut = [cancelled_completion("x", events[:count]) for count in range(5)]
    assert cut[0].prompt_versions == ()
    assert cut[4] == whole
    assert events == token_events(whole)
    assert [[(span.version, span.start, span.end) for span in one.prompt_versions] for one in cut[1:]] == prompt


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_rows_move_without_mixing_sequences(kv: Any) -> None:
    """Many lengths and endings in few slots, with updates to the very same weights: all moves, no change."""
    generator = random.Random(3)
    wanted = [
        request(f"r{i}", tuple(generator.randrange(3, VOCABULARY) for _ in range(generator.randint(1, 40))), 1 + i)
        for i in range(16)
    ]
    done = serve(engine(slots=7, kv_on_update=kv), wanted, dict.fromkeys(range(0, 100, 5), update_of(0, version=0)))
    for expected in engine(slots=1).generate(wanted):
        found = done[expected.request_id]
        assert found.token_ids == expected.token_ids
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


@pytest.mark.parametrize(
    ("family", "reason"), [("openai-gpt", "returns no cache"), ("minimax", r"a cache of its own \(MiniMaxCache\)")]
)
def test_a_model_whose_past_can_not_be_held_in_slots_is_refused_by_what_it_keeps(family: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        LocalEngine(make_family(family), slots=1, max_length=32)


def test_a_model_that_raises_on_the_probe_is_refused() -> None:
    model = make_model("llama")
    model.model.layers[0].mlp = nn.Linear(3, 3)
    with pytest.raises(UnsupportedModelError, match=r"fails on the probe .* \(RuntimeError: "):
        LocalEngine(model, slots=1, max_length=32)


def with_first_layer(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A model whose first layer gets its hidden states changed."""
    model = make_model("llama")
    own = model.model.layers[0].forward
    model.model.layers[0].forward = lambda hidden, **options: own(change(hidden), **options)
    return model


def test_a_model_whose_attention_strays_from_its_own_is_refused() -> None:
    """It adds absolute positions, which are not those of a packed batch."""
    model = with_first_layer(lambda hidden: hidden + torch.arange(hidden.shape[1])[None, :, None])
    with pytest.raises(UnsupportedModelError, match="off by"):
        LocalEngine(model, slots=1, max_length=64)


@pytest.mark.slow
def test_a_model_that_can_not_be_flattened_runs_as_it_is(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    class Deciding(nn.Module):
        """Does the same either way, but looks at its data first."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, hidden: torch.Tensor, **options: Any) -> Any:
            return self.inner(hidden if bool(hidden.sum() > 0) else hidden.clone(), **options)

    model = make_model("llama")
    model.model.layers[0] = Deciding(model.model.layers[0])
    served = LocalEngine(model, slots=2, max_length=64)
    assert served._runner._flat is None
    assert "can't be exported as a graph" in caplog.text
    assert "def forward" not in capsys.readouterr().err  # torch would print the graph
    wanted = [request("a"), request("b", (7, 8))]
    assert served.generate(wanted) == engine(slots=2).generate(wanted)


@pytest.mark.slow
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch is built without oneDNN here")
def test_packed_weights_are_those_of_the_last_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large weights are used from a copy in another layout: here, all weights count as large."""
    monkeypatch.setattr(flat, "PACK_FROM", 1)
    packed, plain = engine(flatten=True), engine(flatten=False)
    assert packed._runner._flat is not None
    assert packed._runner._flat._packed
    wanted = [request(f"r{i}", tuple(range(3, 6 + i)), 20) for i in range(6)]
    completions = [serve(served, wanted, {8: update_of(1, version=1)}) for served in (packed, plain)]
    for one in wanted:
        found, expected = (done[one.id] for done in completions)
        assert found.token_ids == expected.token_ids
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        assert found.weight_versions == expected.weight_versions
