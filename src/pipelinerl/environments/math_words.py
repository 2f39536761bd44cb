"""Maths word problems from JSON lines files, with a numeric verifier."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.environments.numbers import marks_answer, number_of, same_number
from pipelinerl.environments.prompts import Message, has_chat_template
from pipelinerl.environments.single_turn import SingleTurn
from pipelinerl.errors import EnvironmentSetupError
from pipelinerl.interfaces import Tokenizer
from pipelinerl.types import Problem

SYSTEM = "Solve the problem step by step. Write the final answer, a number, on the last line after ####."
TEXT = "Question: {question}\nAnswer step by step, and end with #### and the number.\nAnswer:"
HELD_OUT_IN = 10


class MathWords(SingleTurn):
    """Reward 1 if the number that the answer gives (see `numbers.answer_in`) has the right value, else 0.

    path            file of JSON lines, or a list of them: an object a line with a question and an answer. The answer is a
                    number, or a text that ends with `#### number` (as in GSM8K)
    held_out_path   the same for evaluation. Without it, every tenth problem of `path` (by a hash of its question) is held
                    out. A question that is held out is never trained on, even if `path` has it too
    question_field, answer_field   names of the two fields
    chat            use the model's chat template (default: if it has one), with `system` as the system message ("" for
                    none); otherwise the prompt is `text`, with the question in place of `{question}`
    format_reward   what a wrong answer is worth that is marked as the system message asks (`#### number`, or boxed). 0 by
                    default; a small model that is hardly ever right learns nothing without it
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int,
        *,
        path: str | Sequence[str],
        held_out_path: str | Sequence[str] | None = None,
        question_field: str = "question",
        answer_field: str = "answer",
        chat: bool | None = None,
        system: str = SYSTEM,
        text: str = TEXT,
        format_reward: float = 0.0,
    ) -> None:
        """Raises EnvironmentSetupError, naming file and line, for data that can't be used."""
        super().__init__(tokenizer, seed)
        if chat and not has_chat_template(tokenizer):
            raise EnvironmentSetupError(
                "environment.args.chat is true, but the model's tokenizer has no chat template: remove it, and set "
                "environment.args.text to a prompt with {question} in it"
            )
        if "{question}" not in text:
            raise EnvironmentSetupError("environment.args.text must have {question} in it, where the question goes")
        self._chat = has_chat_template(tokenizer) if chat is None else chat
        self._system = system
        self._text = text
        if not 0 <= format_reward < 1:
            raise EnvironmentSetupError(
                f"environment.args.format_reward is {format_reward}; it must be at least 0 and less than 1, what a right "
                "answer is worth"
            )
        self._format_reward = format_reward
        problems = _read_all(path, question_field, answer_field)
        if held_out_path is None:
            self._held_out = [problem for problem in problems if is_held_out(problem.payload["question"])]
        else:
            self._held_out = _read_all(held_out_path, question_field, answer_field)
        unseen = {problem.payload["question"] for problem in self._held_out}
        self._training = [problem for problem in problems if problem.payload["question"] not in unseen]
        if not self._training:
            raise EnvironmentSetupError(f"{path}: all of its {len(problems)} problems are held out; give it more")
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def problem(self, index: int) -> Problem:
        """Every problem once an epoch, in an order that depends on the seed and the epoch."""
        epoch, place = divmod(index, len(self._training))
        return self._training[self._order(epoch)[place]]

    def held_out(self, count: int) -> Sequence[Problem]:
        return self._held_out[:count]

    def prompt(self, problem: Problem) -> str | Sequence[Message]:
        question = problem.payload["question"]
        if not self._chat:
            return self._text.replace("{question}", question)
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, {"role": "user", "content": question}]

    def reward(self, problem: Problem, text: str) -> float:
        expected = number_of(problem.payload["answer"])
        if expected is not None and same_number(text, expected):
            return 1.0
        return self._format_reward if marks_answer(text) else 0.0

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self._training)))
        random.Random(f"math/{self.seed}/{epoch}").shuffle(order)
        return order


def is_held_out(question: str) -> bool:
    """One question in ten, whatever the order of the file."""
    return zlib.crc32(question.encode()) % HELD_OUT_IN == 0


def read_problems(path: Path, question_field: str, answer_field: str) -> list[Problem]:
    """The problems of one file of JSON lines; the payload has `question` and `answer`, the answer's number as text.

    Raises EnvironmentSetupError, naming the file and the line, for anything that isn't such a problem.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise EnvironmentSetupError(f"can't read the problems in {path}: {error.strerror or error}") from error
    problems = [
        _problem(line, f"{path}:{number}", f"{path.stem}/{number}", question_field, answer_field)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not problems:
        raise EnvironmentSetupError(f"{path} has no problems: it is empty")
    return problems


def _read_all(paths: str | Sequence[str], question_field: str, answer_field: str) -> list[Problem]:
    names = [paths] if isinstance(paths, str) else paths
    return [problem for name in names for problem in read_problems(Path(name).expanduser(), question_field, answer_field)]


def _problem(line: bytes, place: str, name: str, question_field: str, answer_field: str) -> Problem:
    try:
        fields: Any = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EnvironmentSetupError(f"{place} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise EnvironmentSetupError(f"{place} is not a JSON object with `{question_field}` and `{answer_field}`")
    for field in (question_field, answer_field):
        if field not in fields:
            there = ", ".join(map(str, fields)) or "none"
            raise EnvironmentSetupError(
                f"{place} has no field `{field}` (it has: {there}); set environment.args.question_field and answer_field"
            )
    question, answer = fields[question_field], fields[answer_field]
    if not isinstance(question, str) or not question.strip():
        raise EnvironmentSetupError(f"{place}: `{question_field}` must be a text")
    final = str(answer).rpartition("####")[2].strip()
    if isinstance(answer, bool) or number_of(final) is None:
        raise EnvironmentSetupError(f"{place}: `{answer_field}` ends in {final[:60]!r}, which is not a number")
    return Problem(id=name, payload={"question": question, "answer": final})
