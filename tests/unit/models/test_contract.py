"""Whether tokenizer, chat template and model agree: what ends a completion, and what a user reads if they do not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import LlamaConfig

from pipelinerl.config.schema import ModelConfig
from pipelinerl.errors import ModelLoadError
from pipelinerl.models.contract import Contract, read_contract
from pipelinerl.models.loading import load_config, load_tokenizer
from tests.unit.chat_parts import ALTERNATES, CHATML, COUNTS, STRIPS_THOUGHTS, TRIMS
from tests.unit.server_parts import byte_tokenizer

EOS, SIZE = 2, 270
PROMPT = "{% if add_generation_prompt %}<a>{% endif %}"
TURNS = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}"


def contract(template: str | None = None, *, tokens: str = "<|im_start|> <|im_end|> <u> <a>", **changes: Any) -> Contract:
    """Of the bytes' tokenizer, whose eos is 2, with these special tokens from 259 on."""
    tokenizer = byte_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(token) for token in tokens.split()]})
    if "tokenizer" in changes:
        tokenizer.eos_token = changes["tokenizer"]
    config = LlamaConfig(vocab_size=changes.get("size", SIZE), eos_token_id=changes.get("config"))
    generation = SimpleNamespace(eos_token_id=changes.get("generation"))
    return read_contract(SimpleNamespace(config=config, generation_config=generation), tokenizer)


@pytest.mark.parametrize("template", [CHATML, TRIMS, STRIPS_THOUGHTS, COUNTS, ALTERNATES])
def test_the_end_of_a_turn_ends_a_completion_also_if_no_config_names_it(template: str) -> None:
    found = contract(template)
    assert found.stop_token_ids == (EOS, 260)
    (note,) = found.notes
    assert "ends an answer with '<|im_end|>' (260), which no eos_token_id names: it ends completions, too" in note


@pytest.mark.parametrize(
    "changes", [{"generation": [EOS, 260]}, {"config": 260}, {"generation": 260}, {"tokenizer": "<|im_end|>"}]
)
def test_nothing_is_noted_if_all_agree(changes: dict[str, Any]) -> None:
    found = contract(CHATML, **changes)
    assert found.notes == ()
    assert 260 in found.stop_token_ids


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("<eos>", EOS),  # Mistral, OLMo
        (" <eos>\n", EOS),  # Llama 2
        ("\n\n<|im_end|>\n", 260),
        ("{% if not loop.last %}<|im_end|>{% endif %}", 260),  # only what is followed is ended
        ("{% if loop.last %}<eos>{% else %}<|im_end|>{% endif %}", EOS),  # gpt-oss: the last answer ends the turn
        ("", 261),  # GLM: the user's marker is what the model writes when it has done
    ],
)
def test_the_end_is_the_first_token_after_an_answer(end: str, expected: int) -> None:
    found = contract(TURNS + end + "{% endfor %}" + PROMPT)
    assert set(found.stop_token_ids) == {EOS, expected}


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            TURNS + "[/END]\n{% endfor %}" + PROMPT,
            "no token at the end of an answer, only '[/END]\\n': completions end with '<eos>' (2)",
        ),
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}",
            "only 'user: ?",
        ),
        ("{{ raise_exception('never') }}", "what ends a turn is not known: never"),
        ("{% if messages[1:] %}{{ raise_exception('one turn only') }}{% endif %}?", "is not known: one turn only"),
        ("{{ messages[0].content }}", "is not known: it leaves the answer out"),
        ("{% for m in messages %}<a>{{ m.undefined.field }}{% endfor %}", "is not known"),
    ],
)
def test_a_template_with_no_token_at_the_end_of_an_answer_is_named(template: str, message: str) -> None:
    found = contract(template)
    assert found.stop_token_ids == (EOS,)
    assert message in found.notes[0]


@pytest.mark.parametrize(
    ("changes", "stops", "note"),
    [
        (
            {"generation": [EOS, 50, 268, 300], "config": -1},
            (EOS, 50, 268),
            "tokenizer: -1, 'P' (50) and 2 more (of config.json, generation_config.json)",
        ),
        (
            {"generation": list(range(EOS, 1000)), "config": -1},
            tuple(range(EOS, SIZE)),
            "and 992 more (of config.json, generation_config.json)",
        ),
        ({"tokenizer": None}, (), "no token ends a completion"),
        (
            {"size": 260},
            (EOS,),
            "of 260: '<|im_end|>' (260), '<u>' (261) and 1 more; prompts with them are refused",
        ),
    ],
)
def test_tokens_that_model_and_tokenizer_do_not_share_are_one_note(
    changes: dict[str, Any], stops: tuple[int, ...], note: str
) -> None:
    found = contract(**changes)
    assert found.stop_token_ids == stops
    assert note in found.notes[0]
    assert len(found.notes) == 1


@pytest.mark.parametrize("given", ["</s>", [[2]], 2.5, ["2"]])
def test_an_eos_token_id_that_is_no_id_is_an_error(given: Any) -> None:
    with pytest.raises(ModelLoadError, match=r"eos_token_id of generation_config.json must be a token id.* but is"):
        contract(generation=given)


def test_more_positions_than_the_model_was_made_for_are_named() -> None:
    model = SimpleNamespace(config=LlamaConfig(vocab_size=SIZE, eos_token_id=EOS, max_position_embeddings=64))
    assert read_contract(model, byte_tokenizer(None), 64).notes == ()
    (note,) = read_contract(model, byte_tokenizer(None), 65).notes
    assert "engine.max_length 65 is more than the 64 positions that the model was made for" in note


@pytest.mark.parametrize("name", ["demo", "demo-tools"])
def test_the_models_of_this_package_agree_with_their_tokenizers(name: str) -> None:
    config = ModelConfig(path=name)
    assert read_contract(load_config(config), load_tokenizer(config)) == ((1,), ())
