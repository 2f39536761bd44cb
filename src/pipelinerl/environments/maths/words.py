"""Maths word problems from files of JSON lines, with numeric answers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pipelinerl.environments.data import fields_of, read_rows
from pipelinerl.environments.maths.numbers import marks_answer, number_of, same_number
from pipelinerl.environments.single_turn import QuestionPrompt, QuestionSet, checked_format_reward, is_held_out
from pipelinerl.errors import EnvironmentSetupError
from pipelinerl.interfaces import Tokenizer
from pipelinerl.types import Problem

__all__ = ["MathWords", "is_held_out"]

SYSTEM = "Solve the problem step by step. Write the final answer, a number, on the last line after ####."
TEXT = "Question: {question}\nAnswer step by step, and end with #### and the number.\nAnswer:"


class MathWords(QuestionSet):
    """Reward 1 if the number in the answer (see `numbers.answer_in`) has the right value, else 0.

    path            file of JSON lines, or a list of files. Each line is an object with a question and an answer. The answer
                    is a number, or a text that ends with `#### number` (as in GSM8K)
    held_out_path   the same for evaluation. Without it, one problem in ten of `path` (by a hash of the question) is held
                    out. A held-out question is never trained on, even if `path` has it too
    question_field, answer_field   names of the two fields
    chat            use the model's chat template (default: if it has one), with `system` as the system message ("" for
                    none); otherwise the prompt is `text`, with the question in place of `{question}`
    format_reward   reward of a wrong answer that is marked as the system message asks (`#### number`, or boxed). 0 by
                    default; without it, a small model that is hardly ever right learns nothing
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
        """Raises EnvironmentSetupError, naming file and line, for unusable data."""
        question_prompt = QuestionPrompt(tokenizer, chat=chat, system=system, text=text)
        self._format_reward = checked_format_reward(format_reward)
        read = partial(_read_problems, question_field=question_field, answer_field=answer_field)
        super().__init__(tokenizer, seed, path=path, held_out_path=held_out_path, read=read, question_prompt=question_prompt)

    def reward(self, problem: Problem, text: str) -> float:
        expected = number_of(problem.payload["answer"])
        if expected is not None and same_number(text, expected):
            return 1.0
        return self._format_reward if marks_answer(text) else 0.0


def _read_problems(path: Path, question_field: str, answer_field: str) -> list[Problem]:
    """The problems of one file of JSON lines; the payload has `question` and `answer`, the answer's number as text.

    Raises EnvironmentSetupError, naming the file and the line, for a line that isn't such a problem.
    """
    return [
        _problem(row, f"{path}:{number}", f"{path.stem}/{number}", question_field, answer_field)
        for number, row in read_rows(path)
    ]


def _problem(fields: Any, place: str, name: str, question_field: str, answer_field: str) -> Problem:
    if not isinstance(fields, dict):
        raise EnvironmentSetupError(f"{place} is not a JSON object with `{question_field}` and `{answer_field}`")
    for field in (question_field, answer_field):
        if field not in fields:
            raise EnvironmentSetupError(
                f"{place} has no field `{field}` (it has: {fields_of(fields)}); set environment.args.question_field and "
                "answer_field"
            )
    question, answer = fields[question_field], fields[answer_field]
    if not isinstance(question, str) or not question.strip():
        raise EnvironmentSetupError(f"{place}: `{question_field}` must be a text")
    final = str(answer).rpartition("####")[2].strip()
    if isinstance(answer, bool) or number_of(final) is None:
        raise EnvironmentSetupError(f"{place}: `{answer_field}` ends in {final[:60]!r}, which is not a number")
    return Problem(id=name, payload={"question": question, "answer": final})
