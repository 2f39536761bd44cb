r"""Reads maths problems from JSON lines in the formats of common data sets, and extracts the final answers.

Recognised by default: GSM8K (`question`; `answer` ending in `#### 42`), MATH (`problem`; `solution` with a `\boxed{}`),
AIME and similar sets (`problem`, `answer`, and optionally `solution`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipelinerl.environments.data import field_of, fields_of, read_rows
from pipelinerl.environments.maths.numbers import last_boxed
from pipelinerl.errors import EnvironmentSetupError
from pipelinerl.types import Problem

QUESTION_FIELDS = ("question", "problem", "prompt", "Question", "Problem")
ANSWER_FIELDS = ("answer", "final_answer", "expected_answer", "Answer", "solution", "Solution")
MAX_ANSWER = 300
"""Longest final answer in characters, in a data set or from a model."""

_BARE_BOX = re.compile(r"\\boxed\s+([^\s$.,]+)")


def read_math_problems(path: Path, question_field: str | None, answer_field: str | None) -> list[Problem]:
    """The problems of one file; the payload has `question` and the final `answer` as texts.

    A field may be a path (`extra.answer`, `0.value`). If it is None, the first of QUESTION_FIELDS or ANSWER_FIELDS in the
    row is used. Raises EnvironmentSetupError, naming file and line, for a row without a question or final answer.
    """
    problems = []
    for number, row in read_rows(path):
        place = f"{path}:{number}"
        _, question = _find_field(row, place, "question_field", question_field, QUESTION_FIELDS)
        answer_name, answer = _find_field(row, place, "answer_field", answer_field, ANSWER_FIELDS)
        if not isinstance(question, str) or not question.strip():
            raise EnvironmentSetupError(f"{place}: the question must be a text, not {_short(question)}")
        final = final_answer(answer)
        if not final:
            raise EnvironmentSetupError(
                f"{place}: `{answer_name}` has no final answer: it must be a number or a short text, end with "
                f"`#### answer`, or have a \\boxed{{answer}}; it is {_short(answer)}"
            )
        problems.append(Problem(id=f"{path.stem}/{number}", payload={"question": question, "answer": final}))
    return problems


def final_answer(answer: Any) -> str | None:
    r"""The text after the last `####`, else in the last `\boxed{}`, else all of it. None if it is not one short line."""
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
        return None
    text = _BARE_BOX.sub(r"\\boxed{\1}", str(answer).replace("\\fbox", "\\boxed"))
    _, marked, after = text.rpartition("####")
    if marked:
        text = after
    else:
        boxed = last_boxed(text)
        text = text if boxed is None else boxed
    text = text.strip()
    if len(text) > 1 and text.startswith("$") and text.endswith("$"):
        text = text.strip("$").strip()
    return text if 0 < len(text) <= MAX_ANSWER and "\n" not in text else None


def _find_field(row: Any, place: str, option: str, name: str | None, usual: Sequence[str]) -> tuple[str, Any]:
    """The name and value of the field `name`, or of the first of the `usual` fields in the row."""
    if not isinstance(row, (dict, list)):
        raise EnvironmentSetupError(f"{place} is not a JSON object, but {_short(row)}")
    for candidate in [name] if name else usual:
        try:
            return candidate, field_of(row, candidate)
        except KeyError:
            continue
    wanted = f"`{name}`" if name else " or ".join(f"`{one}`" for one in usual)
    raise EnvironmentSetupError(f"{place} has no field {wanted} (it has: {fields_of(row)}); set environment.args.{option}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:40]}...{text[-37:]}"
