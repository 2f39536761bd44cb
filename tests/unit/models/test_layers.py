"""Compiled layers: the same gradients, or none that are compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipelinerl.models.layers import compile_layers
from pipelinerl.models.packed import PackedRow, training_forward
from pipelinerl.types import Segment
from tests.parity.models import CONFIGS, THROUGH_CACHE, make_model, tiny_llama
from tests.unit.compiler_parts import NotingCompiler, absent_compiler, nothing_compiled, wrong_compiler  # noqa: F401

pytestmark = pytest.mark.usefixtures("nothing_compiled")


def row(lengths: tuple[int, ...], least_shared: float = 1.0) -> PackedRow:
    ids = [tuple((5 * i + n) % 20 for i in range(n)) for n in lengths]
    segments = [Segment(token_ids=of_one, sampled=((1, len(of_one)),)) for of_one in ids]
    return PackedRow.of(segments, least_shared=least_shared)


def gradients_of(forward: Any, lengths: tuple[int, ...], least_shared: float = 1.0) -> list[torch.Tensor]:
    logits_PV = forward(row(lengths, least_shared))
    trained = [parameter for parameter in forward.model.parameters() if parameter.requires_grad]
    return list(torch.autograd.grad(logits_PV.log_softmax(-1)[:, 3].sum(), trained, allow_unused=True))


def assert_same(found: list[Any], expected: list[Any]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, atol=1e-5 * max(1.0, float(b.abs().max())), rtol=1e-4)


@pytest.mark.slow
def test_rows_of_all_lengths_have_the_gradients_of_the_model_and_are_compiled_once() -> None:
    plain, noting = training_forward(tiny_llama(num_hidden_layers=2)), NotingCompiler()
    forward = compile_layers(training_forward(tiny_llama(num_hidden_layers=2)), backend=noting)
    assert forward.compiled
    assert "compiled layers" in forward.description
    compiled = len(noting.graphs)
    for lengths in ((3,), (30, 30, 7), (2, 2, 2, 2, 9)):
        assert_same(gradients_of(forward, lengths), gradients_of(plain, lengths))
    assert_same(gradients_of(forward, (9, 30, 30), 0.2), gradients_of(plain, (9, 30, 30), 0.2))
    with torch.no_grad():
        forward(row((6, 3)))
    assert len(noting.graphs) == compiled > 0


@pytest.mark.slow
@pytest.mark.parametrize(("compiler", "reason"), [(absent_compiler, "No working C++ compiler"), (wrong_compiler, "off by")])
def test_what_can_not_be_compiled_exactly_runs_as_it_is_and_says_so(
    compiler: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain = training_forward(tiny_llama())
    forward = compile_layers(training_forward(tiny_llama()), backend=compiler)
    assert not forward.compiled
    assert reason in caplog.text
    assert "and more" not in caplog.text
    assert_same(gradients_of(forward, (7, 4)), gradients_of(plain, (7, 4)))


def test_a_model_that_is_trained_through_its_own_forward_is_not_compiled(caplog: pytest.LogCaptureFixture) -> None:
    forward = training_forward(make_model("bloom-alibi"))
    assert compile_layers(forward) is forward
    assert "own forward" in caplog.text


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("family", sorted(set(CONFIGS) - set(THROUGH_CACHE)))
def test_the_real_compiler_gives_the_gradients_of_every_family(family: str) -> None:
    forward = compile_layers(training_forward(make_model(family)))
    assert forward.compiled
    plain = training_forward(make_model(family))
    for lengths in ((3,), (30, 30, 7)):
        assert_same(gradients_of(forward, lengths), gradients_of(plain, lengths))
