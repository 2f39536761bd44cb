"""Static decode steps pass what packed steps pass. Attention is the reference of FlashAttention here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from pipelinerl.engine.static import engine_for
from tests.parity import test_engine as parity
from tests.parity.models import CONFIGS, THROUGH_CACHE

REFUSED = {"gemma2", "gpt-oss-sinks", "deepseek-v3-latents", *THROUGH_CACHE}
"""They have soft caps, sinks, values of another size than keys, or other states."""
CHECKS: tuple[Callable[[str], None], ...] = (
    parity.test_versions_are_exact_to_the_token,
    parity.test_after_an_update_with_kept_entries_a_mixed_cache_gives_the_same,
    parity.test_after_an_update_with_recompute_everything_is_as_with_the_new_weights,
    parity.test_greedy_tokens_are_those_of_generate,
    partial(parity.test_log_probabilities_are_those_of_a_full_forward, flatten=True),
    partial(parity.test_turns_continue_from_what_rows_hold, kv="keep"),
    partial(parity.test_turns_continue_from_what_rows_hold, kv="recompute"),
)
QUICK = {("llama", 0), ("llama", 1), ("llama", 2), ("gemma3", 4), ("llama", 5), ("llama", 6)}
CASES = [
    pytest.param(family, check, marks=() if (family, i) in QUICK else (pytest.mark.slow, pytest.mark.exhaustive))
    for family in sorted(CONFIGS.keys() - REFUSED)
    for i, check in enumerate(CHECKS)
]


@pytest.mark.parametrize(("family", "check"), CASES)
def test_static_steps_are_as_exact(family: str, check: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "LocalEngine", partial(engine_for, decoding="static"))
    check(family)
