"""The built-in tasks, tasks of one's own, and what a user can get wrong about them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipelinerl.config.schema import ModelConfig
from pipelinerl.environments import make_environment
from pipelinerl.environments.prompts import text_decoder
from pipelinerl.environments.tasks.gcd import GcdProblem, subtract_once
from pipelinerl.errors import EnvironmentSetupError
from pipelinerl.models.encoding import encode_prompt
from pipelinerl.models.loading import load_tokenizer
from tests.unit.environments.env_client import TOKENIZER, one_line, play
from tests.unit.scripted_engine import STOP, CharTokenizer

EXAMPLES = Path(__file__).parents[3] / "examples"


class ChatTokenizer(CharTokenizer):
    """A chat in which `<` and `>` mark turns and token 0 ends the model's: <u:hi>\\n<a:hello\\0\\n<u:..."""

    chat_template = "there is one"

    def apply_chat_template(self, conversation, *, tokenize, add_generation_prompt, **options):
        text = "S" + "".join(f"<{m['role'][0]}:{m['content']}{chr(STOP)}\n" for m in conversation)
        text += "<a:" if add_generation_prompt else ""
        return {"input_ids": self.encode(text), "attention_mask": []} if tokenize else text


# ------------------------------------------------------------------------------------------------------ gcd


def test_gcd_rewards_the_right_result():
    environment = make_environment("gcd", {}, TOKENIZER, 0)
    for problem in map(environment.problem, range(20)):
        task = GcdProblem(**problem.payload)
        a, b, cells = task.a, task.b, []
        while a != b:
            a, b = subtract_once(a, b)
            cells.append(f"{a:02d},{b:02d}")
        good, client = play(environment, problem, ";".join(cells) + f">{task.answer:02d}")
        assert TOKENIZER.decode(client.prompts[0]) == f"{task.a:02d},{task.b:02d}:"
        bad, _ = play(environment, problem, f">{task.answer + 1:02d}")
        assert (good.reward, bad.reward) == (1.0, 0.0)


# ------------------------------------------------------------------------------------------------- prompts


class StrictTokenizer(ChatTokenizer):
    def apply_chat_template(self, conversation, **options):
        if conversation[0]["role"] == "system":
            raise ValueError("System role\nnot supported")
        return super().apply_chat_template(conversation, **options)


def test_a_chat_template_or_tokenizer_that_does_not_fit_is_one_line_before_the_first_rollout(tmp_path):
    """The demo's model knows digits and a few signs."""
    with one_line(EnvironmentSetupError, "ValueError: System role not supported; if it takes no system message, set envi"):
        make_environment(f"{EXAMPLES}/countdown.py:Countdown", {}, StrictTokenizer(), 0)
    environment = make_environment(f"{EXAMPLES}/countdown.py:Countdown", {"system": ""}, StrictTokenizer(), 0)
    assert encode_prompt(StrictTokenizer(), environment.prompt(environment.problem(0)))
    (tmp_path / "data.jsonl").write_text('\ufeff{"question": "How many?", "answer": "2"}\n', encoding="utf-8")
    (tmp_path / "other.jsonl").write_text('{"question": "Why?", "answer": "2"}\n')
    args = {"path": str(tmp_path / "data.jsonl"), "held_out_path": str(tmp_path / "other.jsonl"), "judge": "numbers"}
    with one_line(EnvironmentSetupError, "the model's tokenizer can't make a prompt of 'Problem: How many"):
        make_environment("math", args, load_tokenizer(ModelConfig()), 0)


def test_text_is_decoded_as_the_tokenizer_says():
    tokenizer = load_tokenizer(ModelConfig())
    ids = [int(i) for i in np.random.default_rng(0).integers(len(tokenizer), size=200)]
    assert text_decoder(tokenizer)(ids) == tokenizer.decode(ids, skip_special_tokens=True) != tokenizer.decode(ids)

    text = tokenizer.decode(ids[:20])
    assert list(encode_prompt(tokenizer, text)) == tokenizer.encode(text)

    class Shouting(type(tokenizer)):
        def _decode(self, *args, **options):
            return super()._decode(*args, **options) + "!"

    tokenizer.__class__ = Shouting
    assert text_decoder(tokenizer)(ids).endswith("!")
    assert text_decoder(TOKENIZER)(TOKENIZER.encode("as it is")) == "as it is"


# -------------------------------------------------------------------------------------------- one's own task

OWN = """
import asyncio
from typing import Annotated
from pydantic import Field
from pipelinerl.environments import SingleTurn
from pipelinerl.environments.options import Options
from pipelinerl.types import Problem

class Shout(SingleTurn):
    def __init__(self, tokenizer, seed, *, word="hey", times: int = 1):
        super().__init__(tokenizer, seed)
        if times < 1:
            raise ValueError("times must be positive")
        self.word = word * times

    def problem(self, index):
        return Problem(id=str(index), payload={})

    def prompt(self, problem):
        return self.word

    def reward(self, problem, text):
        return text.isupper()

class ShortOptions(Options, frozen=True):
    most: Annotated[int, Field(ge=1)] = 3

class Short(SingleTurn):
    Options = ShortOptions
    problem, prompt = Shout.problem, lambda self, problem: "say"

    def __init__(self, tokenizer, seed, **args):
        super().__init__(tokenizer, seed)
        self.most = ShortOptions.read(args).most

    async def judge(self, problem, turn):
        await asyncio.sleep(0)
        return float(len(turn.text) <= self.most), {"tokens": len(turn.completion.token_ids)}

class Silent(SingleTurn):
    problem, prompt = Short.problem, Short.prompt

class Answered(Silent):
    prompt = lambda self, problem: [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    reward = Shout.reward

class NoEnvironment:
    pass

"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def test_a_class_in_a_file(own):
    environment = make_environment(f"{own}:Shout", {"word": "ab", "times": 2}, TOKENIZER, 7)
    rollout, client = play(environment, environment.problem(0), "HEY")
    assert (rollout.reward, rollout.turns[0].text) == (1.0, "HEY")
    assert client.prompts == [tuple(b"abab")]
    assert environment.seed == 7
    assert environment.held_out(5) == ()


def test_a_class_may_declare_its_arguments_in_a_model_and_await_its_judgement(own):
    environment = make_environment(f"{own}:Short", {"most": 2}, TOKENIZER, 0)
    outcomes = [play(environment, environment.problem(0), text)[0] for text in ("no", "yes")]
    assert [(outcome.reward, outcome.metrics) for outcome in outcomes] == [(1.0, {"tokens": 3}), (0.0, {"tokens": 4})]


@pytest.mark.parametrize(
    ("kind", "args", "complaint"),
    [
        ("gdc", {}, "'gdc' is unknown. Did you mean 'gcd'"),
        ("math_words", {}, "'math_words' is unknown. It is now called `math` with `judge: numbers` in environment.args"),
        ("poetry", {}, "It is one of gcd, math, reasoning_gym"),
        (":Shout", {}, "does not name a class"),
        ("nowhere/own.py:Shout", {}, "there is no file "),
        ("no_such_package.own:Shout", {}, "there is no module no_such_package.own"),
        ("{own}:Shoot", {}, "has no class 'Shoot'; it has Shout"),
        ("{own}:NoEnvironment", {}, "has no method `problem(self, index)`"),
        ("{own}:Silent", {}, "Silent has no method `reward(self, problem, text)`"),
        ("{own}:Answered", {}, "the first problem's prompt has chat messages that end with the assistant's"),
        (
            "{own}:Shout",
            {"wrod": "x"},
            "unexpected keyword argument 'wrod'; after `tokenizer` and `seed` it takes word, times",
        ),
        ("{own}:Shout", {"times": 0}, "can't be built: own.py, line 13: ValueError: times must be positive"),
        ("{own}:Short", {"most": 0}, "environment.args.most: 0 is not allowed here; this takes a whole number >= 1"),
        ("{examples}/countdown.py:Countdown", {"higest": 20}, "did you mean `highest`?"),
        ("gcd", {"digits": 3}, "it takes nothing"),
        ("{examples}/calculator.py:Calculator", {}, "Calculator needs a chat model"),
        ("math", {"path": "no/such.jsonl", "judge": "numbers"}, "/no/such.jsonl: a path is relative to the working"),
        ("math", {"path": "", "judge": "numbers", "judge_processes": 2}, "judge_processes has no effect: it is for"),
        ("math", {"path": "", "judge": "numbers", "system": "x"}, "system has no effect: there is no chat"),
        ("agent", {"run": "a.py:f", "problems": {"kind": "gcd"}, "held_out": 0.5}, "held_out has no effect"),
        ("{examples}/countdown.py:Countdown", {"numbers": [4, 3]}, "numbers is [4, 3]: give the minimum first"),
        ("{examples}/countdown.py:Countdown", {"highest": 90, "numbers": 8, "highest_target": 2}, "leave too few problems"),
    ],
)
def test_mistakes_are_one_line_that_names_them(own, kind, args, complaint):
    with one_line(EnvironmentSetupError, complaint):
        make_environment(kind.format(own=own, examples=EXAMPLES), args, TOKENIZER, 0)


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("\nx = 1 / 0", "line 2: ZeroDivisionError"),
        ("def", "SyntaxError"),
        ("import sys\nsys.exit(3)", "line 2: SystemExit: 3"),
    ],
)
def test_a_file_that_can_not_be_imported(tmp_path, code, complaint):
    path = tmp_path / "broken.py"
    path.write_text(code)
    for _ in range(2):
        with pytest.raises(EnvironmentSetupError, match=complaint):
            make_environment(f"{path}:X", {}, TOKENIZER, 0)
