"""Examples become supervised samples: exactly the answers are trained on, and a line that can't be used is named."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.config.schema import WarmStartConfig
from pipelinerl.errors import UserError
from pipelinerl.preprocess.warm_start import batches_of, read_examples
from pipelinerl.types import TrainingSample
from tests.unit.server_parts import EOS, byte_tokenizer

CHAT = [
    {"role": "user", "content": "2+2"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "3+3"},
    {"role": "assistant", "content": "6"},
]
# Ends an answer with the end token, and a line break after it.
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}"
    "{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
THINKS = TEMPLATE.replace("a:{% endif %}", "a:<think>{% endif %}")
BEGINS = "<eos>" + TEMPLATE.replace("<eos>", "")  # the end token stands only before the answers


def examples(folder: Path, *rows: object, template: str | None = TEMPLATE) -> list[TrainingSample]:
    file = folder / "data.jsonl"
    file.write_text("\n\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return read_examples(WarmStartConfig(data=str(file)), byte_tokenizer(template))


def shown(sample: TrainingSample) -> list[tuple[str, list[str]]]:
    """The text of each segment, and the texts that are trained on."""
    decode: Any = byte_tokenizer().decode
    return [
        (decode(one.token_ids), [decode(one.token_ids[start:end]) for start, end in one.supervised])
        for one in sample.segments
    ]


def test_a_text_is_context_and_its_answer_is_trained_on_with_its_end(tmp_path: Path) -> None:
    row = {"prompt": "84,36:", "completion": "48", "other": 1}
    first, second = examples(tmp_path, row, {"prompt": "x", "completion": "y"})
    assert shown(first) == [("84,36:48<eos>", ["48<eos>"])]
    assert (first.sampled_count, first.supervised_count, first.has_gradient) == (0, 3, True)
    assert first.segments[0].token_ids[-1] == EOS
    assert second.id == "example 3"  # the number of its line


def test_all_answers_of_a_chat_are_trained_on_and_nothing_else(tmp_path: Path) -> None:
    (sample,) = examples(tmp_path, {"messages": CHAT})
    assert shown(sample) == [("u:2+2\na:4<eos>\nu:3+3\na:6<eos>", ["4<eos>", "6<eos>"])]
    (same,) = examples(tmp_path, {"prompt": CHAT[:3], "completion": "6"})
    assert shown(same) == shown(sample)
    (other,) = examples(tmp_path, {"messages": CHAT[:2]}, template=BEGINS)
    assert shown(other) == [("<eos>u:2+2\na:4\n", ["4\n"])]


@pytest.mark.parametrize(
    ("row", "template", "message"),
    [
        ("{", TEMPLATE, "line 3: "),
        ({"prompt": "x"}, TEMPLATE, "line 3: it needs `prompt` and `completion`"),
        ({"prompt": CHAT[:1], "answer": "4"}, TEMPLATE, "line 3: it needs `prompt` and `completion`"),
        ({"messages": CHAT[:1]}, TEMPLATE, "line 3: `messages` have no answer"),
        ({"messages": [{"role": 1, "content": "x"}]}, TEMPLATE, "line 3: Expected `str`"),
        ({"messages": CHAT}, None, "line 3: the model's tokenizer has no chat template"),
        ({"messages": CHAT}, THINKS, "line 3: the chat template renders an answer otherwise"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(row: object, template: str | None, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"trainer.warm_start.data: .*{message}"):
        examples(tmp_path, {"prompt": "x", "completion": "y"}, row, template=template)


def test_an_example_that_the_model_is_too_short_for_is_named(tmp_path: Path) -> None:
    examples(tmp_path, {"prompt": "abc", "completion": "d"})
    config = WarmStartConfig(data=str(tmp_path / "data.jsonl"))
    assert read_examples(config, byte_tokenizer(), longest=5)
    with pytest.raises(UserError, match="line 1: it has 5 tokens, and the model takes 4"):
        read_examples(config, byte_tokenizer(), longest=4)


def test_a_file_without_examples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no examples"):
        examples(tmp_path)
    with pytest.raises(UserError, match="can't read"):
        read_examples(WarmStartConfig(data=str(tmp_path / "none.jsonl")), byte_tokenizer())


def test_batches_have_every_example_once_in_an_epoch_and_depend_on_the_seed_alone(tmp_path: Path) -> None:
    samples = examples(tmp_path, *({"prompt": str(n), "completion": "y"} for n in range(5)))
    config = WarmStartConfig(data="x", steps=5, batch_size=3)
    batches = list(batches_of(samples, config, seed=1))
    assert [len(batch) for batch in batches] == [3] * 5
    assert Counter(sample.id for batch in batches for sample in batch) == {sample.id: 3 for sample in samples}
    assert batches == list(batches_of(samples, config, seed=1)) != list(batches_of(samples, config, seed=2))
