"""Prompts in token ids: what stands around a text, and the options of a chat template."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from pipelinerl.environments.registry import make_environment
from pipelinerl.errors import EnvironmentSetupError
from pipelinerl.models.encoding import encode_prompt
from tests.unit.chat_parts import CHATML, SamplingClient, make_tokenizer
from tests.unit.environments.env_client import one_line
from tests.unit.server_parts import byte_tokenizer

BOS, EOS = 1, 2
WITH_OPTION = "{% if brief %}Be brief.{% endif %}" + CHATML


def adding(template: str) -> Any:
    tokenizer = byte_tokenizer(None)
    special = [("<bos>", BOS), ("<eos>", EOS)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    return tokenizer


@pytest.mark.parametrize("limit", [None, 2])
@pytest.mark.parametrize(
    ("template", "before"), [("$A", ()), ("<bos> $A", (BOS,)), ("$A <eos>", ()), ("<bos> $A <eos>", (BOS,))]
)
def test_a_text_begins_as_the_model_expects_and_does_not_end(template: str, before: Any, limit: int | None) -> None:
    tokenizer = adding(template)
    if limit:
        tokenizer.backend_tokenizer.enable_truncation(limit)
        tokenizer.backend_tokenizer.enable_padding(length=9)
    text = tuple(tokenizer.encode("abcd", add_special_tokens=False))
    assert len(text) == 4
    assert encode_prompt(tokenizer, "abcd") == before + text
    assert encode_prompt(tokenizer, "<bos>abcd") == (BOS, *text)  # not twice
    assert encode_prompt(tokenizer, "abcd<eos>") == (*before, *text, EOS)  # what the user wrote stays


KINDS: dict[str, dict[str, Any]] = {
    "function": {"data": "data.jsonl", "reward": "r.py:reward", "isolate": False},
    "tools": {"data": "data.jsonl", "reward": "r.py:reward", "functions": "r.py:add", "isolate": False},
    "math": {"path": "data.jsonl", "judge": "numbers"},
    "mixture": {"environments": {"a": {"kind": "math", "args": {"path": "data.jsonl", "judge": "numbers"}}}},
}
REWARDS = "def reward(completion, example):\n    return 1.0\n"
TOOL = "def add(a: int):\n    '''Add.\n\n    Args:\n        a: one\n    '''\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = (f'{{"prompt": "{n}+{n}?", "question": "{n}+{n}?", "answer": "{2 * n}"}}\n' for n in range(40))
    Path("data.jsonl").write_text("".join(rows))
    Path("r.py").write_text(REWARDS + TOOL)


def made(kind: str, options: dict[str, Any], template: str | None = WITH_OPTION, **args: Any) -> tuple[Any, Any]:
    tokenizer = make_tokenizer(template=template)
    given = KINDS[kind] | args
    if kind == "mixture":
        part = given["environments"]["a"]
        given = {"environments": {"a": part | {"args": part["args"] | {"template_options": options}}}}
    else:
        given |= {"template_options": options}
    return make_environment(kind, given, tokenizer, 0), tokenizer


@pytest.mark.parametrize("kind", KINDS)
def test_options_reach_the_template_in_every_environment_with_chats(kind: str) -> None:
    for options in ({}, {"brief": True}):
        environment, tokenizer = made(kind, options)
        client = SamplingClient.saying(tokenizer, "4")
        asyncio.run(environment.rollout(environment.problem(0), client))
        assert tokenizer.decode(client.prompts[0]).startswith("Be brief.") == bool(options)


@pytest.mark.parametrize("kind", ["function", "math", "mixture"])
def test_an_option_without_effect_is_an_error(kind: str) -> None:
    with one_line(EnvironmentSetupError, "'enable_thinking' is not in the model's chat template; leave it out"):
        made(kind, {"enable_thinking": False})
    with one_line(EnvironmentSetupError, "'brief' has no effect: the prompts are not chats"):
        made(kind, {"brief": True}, template=None)
    with one_line(EnvironmentSetupError, "'add_generation_prompt' is set here; leave it out"):
        made(kind, {"add_generation_prompt": False})
