"""Every family of causal language models of transformers that can be built small: exact on both sides, or refused."""

from __future__ import annotations

import pytest
import transformers
from benchmarks.models import OTHERS, PACKED, TABLE, measure

REASONS = {
    "DynamicIndexedLayer": "axk2 deepseek_v32 dots3_note dots3_note_text glm_moe_dsa hy_v4 qwen4_exp qwen4_exp_text",
    "off by": """bart bigbird_pegasus blenderbot blenderbot-small camembert data2vec-text gpt_neo inkling2_text inkling_text
        marian mbart mvp pegasus plbart roberta roberta-prelayernorm roformer trocr whisper xlm-roberta xlm-roberta-xl xmod
        zamba2""",
    "fails on the probe": "blt cpmant prophetnet",
    "DeepseekV4": "deepseek_v4",
    "EncoderDecoderCache": "megatron-bert rembert roc_bert",
    "MiniMaxCache": "minimax",
    "returns no cache": "openai-gpt recurrent_gemma reformer rwkv xlm xlnet",
    "xLSTMCache": "xlstm",
}
REFUSED = {family: reason for reason, families in REASONS.items() for family in families.split()}
"""Families that the engine refuses, and a part of its message."""
NOT_TRAINED = {"cpmant", "prophetnet", "xlnet"}
"""Not causal, or (ProphetNet) dependent on how many tokens follow: a padded batch has other logits than single sequences."""
NOT_LISTED = {
    "gemma3n": "its vision tower needs timm; text alone is gemma3n_text",
    "gemma4_assistant": "predicts from the keys and values of another model",
    "gemma4_unified_assistant": "predicts from the keys and values of another model",
    "musicgen": "predicts several codebooks of audio at once",
    "musicgen_melody": "predicts several codebooks of audio at once",
}
"""Causal language models of transformers that the table has no row for, and why."""
BOTH_WAYS = {"diffllama", "hrm_text"}
"""Use an attention layer twice in a forward: the trainer can, the engine can't."""


def test_every_causal_language_model_of_transformers_is_in_the_table() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    table = TABLE.read_text()
    if f"transformers {transformers.__version__}," not in table:
        pytest.skip("the table is of another version of transformers")
    listed = f"{PACKED} {OTHERS}".split()
    assert set(listed) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(NOT_LISTED)
    assert [row.split()[1] for row in table.splitlines() if row.startswith("| ")][1:] == sorted(listed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", PACKED.split())
def test_a_family_whose_attention_can_be_replaced_runs_packed_on_both_sides(family: str) -> None:
    found = measure(family, speed=False)
    assert (found.trainer, found.engine) == ("packed", "own cache" if family in BOTH_WAYS else "packed")
    assert found.trainer_error is not None
    assert found.trainer_error < 1e-4


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", OTHERS.split())
def test_any_other_family_is_trained_exactly_and_run_through_its_own_cache_or_refused(family: str) -> None:
    found = measure(family, speed=False)
    if family in NOT_TRAINED:
        assert found.trainer.startswith("refused")
    else:
        assert found.trainer in {"padded", "packed"}
        assert found.trainer_error is not None
        assert found.trainer_error < 1e-4
    if family in REFUSED:
        assert found.engine.startswith("refused")
        assert REFUSED[family] in found.engine
    else:
        assert found.engine.startswith(("own cache", "packed"))
