"""Every family of causal language models of transformers that can be built small: exact on both sides, or refused."""

from __future__ import annotations

import pytest
from benchmarks.models import OTHERS, PACKED, measure

pytestmark = pytest.mark.exhaustive
REFUSED_BY_THE_ENGINE = {
    "axk2": "DynamicIndexedLayer",
    "bailing_hybrid": "",
}
"""Families with a cache that slots can't hold, by a part of the message."""


@pytest.mark.parametrize("family", PACKED.split())
def test_a_family_whose_attention_can_be_replaced_runs_packed_on_both_sides(family: str) -> None:
    found = measure(family, speed=False)
    assert (found.trainer, found.engine) == ("packed", "packed")
    assert found.trainer_error is not None
    assert found.trainer_error < 1e-4


@pytest.mark.parametrize("family", OTHERS.split())
def test_any_other_family_is_trained_exactly_and_run_through_its_own_cache_or_refused(family: str) -> None:
    found = measure(family, speed=False)
    assert found.trainer in {"padded", "packed"}
    assert found.trainer_error is not None
    assert found.trainer_error < 1e-4
    if family in REFUSED_BY_THE_ENGINE:
        assert found.engine.startswith("refused")
        assert REFUSED_BY_THE_ENGINE[family] in found.engine
    else:
        assert found.engine.startswith(("own cache", "packed"))
