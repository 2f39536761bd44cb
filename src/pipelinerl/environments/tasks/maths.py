r"""Maths problems whose answers may be numbers, fractions, intervals or formulas.

Read from JSON lines in the formats of common data sets: GSM8K (`question`; `answer` ending in `#### 42`), MATH (`problem`;
`solution` with a `\boxed{}`), AIME and similar sets (`problem`, `answer`, and optionally `solution`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from pipelinerl.config.schema import Count, Natural, NotNegative, Positive, ShareBelowOne
from pipelinerl.environments.data import ProblemSet, Split, field_of, read_problems, split
from pipelinerl.environments.options import Files, QuestionOptions, QuestionTask
from pipelinerl.environments.single_turn import Score, is_held_out
from pipelinerl.environments.tasks.judge import MAX_ANSWER, Judge
from pipelinerl.environments.tasks.numbers import answer_in, last_boxed, number_of
from pipelinerl.errors import EnvironmentSetupError
from pipelinerl.interfaces import Tokenizer
from pipelinerl.models.encoding import Message
from pipelinerl.types import Problem, Turn

QUESTION_FIELDS = ("question", "problem", "prompt", "Question", "Problem")
ANSWER_FIELDS = ("answer", "final_answer", "expected_answer", "Answer", "solution", "Solution")
_BARE_BOX = re.compile(r"\\boxed\s+([^\s$.,]+)")

SYSTEM = "Solve the problem step by step. Put the final answer in \\boxed{}."
TEXT = "Problem: {question}\nSolve it step by step, and put the final answer in \\boxed{}.\nSolution:"


class MathsOptions(QuestionOptions, frozen=True):
    path: Files
    """Files of problems, one per line."""
    held_out_path: Files | None = None
    """Files for evaluation. null: one problem in ten of `path`. A held-out question is never trained on."""
    question_field: str | None = None
    """The field with the question, also as a path (`extra.question`). null: the usual names."""
    answer_field: str | None = None
    """The same for the answer."""
    judge: Literal["math-verify", "numbers"] = "math-verify"
    """`math-verify` (extra `math`), or `numbers`, for which all answers must be numbers."""
    judge_timeout_s: Positive = 5.0
    """An answer that takes longer to judge counts as wrong."""
    judge_processes: Count = 1
    """How many answers are judged at once."""
    format_reward: ShareBelowOne = 0.0
    """Reward of a wrong answer in a `\\boxed{}`; with `judge: numbers` also of a wrong number after `####`."""
    length_penalty_tokens: Natural = 0
    """Over how many tokens before `max_tokens` the reward falls; a text that is cut off gets the full penalty. 0: none."""
    length_penalty: NotNegative = 1.0
    """By how much it falls at most."""
    system: str = SYSTEM
    text: str = TEXT

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.length_penalty_tokens > (self.max_tokens or 0):
            raise EnvironmentSetupError(
                f"environment.args.length_penalty_tokens is {self.length_penalty_tokens}: it needs "
                f"environment.args.max_tokens to be at least as many (it is {self.max_tokens})"
            )
        if not self.length_penalty_tokens:
            self.refuse_without_effect("`length_penalty_tokens` is 0", "length_penalty")
        if self.judge == "numbers":
            self.refuse_without_effect(
                "it is for math-verify, and `judge` is `numbers`", "judge_timeout_s", "judge_processes"
            )


class Maths(ProblemSet, QuestionTask):
    r"""Reward 1 if the answer (in the last `\boxed{}`, else the last number) has the right value, else 0."""

    Options = MathsOptions

    def __init__(self, tokenizer: Tokenizer, seed: int, **args: Any) -> None:
        """Raises EnvironmentSetupError, naming file and line, for unusable data, and MissingDependencyError."""
        self._options = options = MathsOptions.read(args)
        QuestionTask.__init__(self, tokenizer, seed, options)
        self._judge: Judge | None = None  # for `numbers`
        if options.judge == "math-verify":
            self._judge = Judge(timeout_s=options.judge_timeout_s, processes=options.judge_processes)
        ProblemSet.__init__(self, _read(options), f"math/{seed}")

    def prompt(self, problem: Problem) -> str | Sequence[Message]:
        return self.ask(problem.payload["question"])

    async def judge(self, problem: Problem, turn: Turn) -> Score:
        """Metrics: `right`, `boxed` and `judge_failed` are 1 or 0; `length_penalty` is at most 0."""
        text, expected, options = turn.text, problem.payload["answer"], self._options
        boxed = last_boxed(text)
        number, is_marked = answer_in(text) if self._judge is None or boxed is None else (None, True)
        marked = boxed is not None
        if self._judge is None:
            verdict: bool | None = number is not None and number == number_of(expected)
            marked = marked or (is_marked and number is not None)
        else:
            final = boxed.strip() if boxed is not None else "" if number is None else str(number)
            verdict = await self._judge.verdict(expected, final)
        score = 1.0 if verdict else options.format_reward if marked else 0.0
        penalty = 0.0
        if options.length_penalty_tokens:
            # It warns a policy before its completions reach the limit, where the first signal would be the lost reward. The
            # text may be cut off before `max_tokens`, by `actor.max_tokens` or the slot's length.
            limit = self.max_tokens or 0
            length = limit if turn.completion.finish_reason == "length" else len(turn.completion.token_ids)
            over = length - (limit - options.length_penalty_tokens)
            penalty = -options.length_penalty * min(1.0, max(0.0, over / options.length_penalty_tokens))
        metrics = {
            "right": float(verdict or False),
            "boxed": float(boxed is not None),
            "judge_failed": float(verdict is None),
            "length_penalty": penalty,
        }
        return score + penalty, metrics


# ---- problems


def _read(options: MathsOptions) -> Split:
    """Raises EnvironmentSetupError if no problem is left to train on."""
    payload = partial(_payload, options=options)
    problems = read_problems(options.path, payload)
    if options.held_out_path is None:
        held_out = [problem for problem in problems if is_held_out(_question(problem))]
    else:
        held_out = read_problems(options.held_out_path, payload)
    return split(problems, held_out, _question, options.path)


def _question(problem: Problem) -> str:
    return str(problem.payload["question"])


def _payload(row: Any, place: str, options: MathsOptions) -> dict[str, Any]:
    """The `question` and the final `answer` of a row, as texts. Raises EnvironmentSetupError if there is none."""
    _, question = _find_field(row, place, "question_field", options.question_field, QUESTION_FIELDS)
    answer_name, answer = _find_field(row, place, "answer_field", options.answer_field, ANSWER_FIELDS)
    if not isinstance(question, str) or not question.strip():
        raise EnvironmentSetupError(f"{place}: the question must be a text, not {_short(question)}")
    final = final_answer(answer)
    if not final:
        raise EnvironmentSetupError(
            f"{place}: `{answer_name}` has no final answer: it must be a number or a short text, end with "
            f"`#### answer`, or have a \\boxed{{answer}}; it is {_short(answer)}"
        )
    if options.judge == "numbers" and number_of(final) is None:
        raise EnvironmentSetupError(f"{place}: {final[:60]!r} is not a number, but `judge` is `numbers`")
    return {"question": question, "answer": final}


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
    has = (", ".join(map(str, row)) if isinstance(row, dict) else f"a list of {len(row)}") or "none"
    raise EnvironmentSetupError(f"{place} has no field {wanted} (it has: {has}); set environment.args.{option}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:40]}...{text[-37:]}"
