r"""Maths problems whose answers, given in a `\boxed{}`, may be numbers, fractions, intervals or formulas."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pipelinerl.environments.maths.judge import Judge, Verdict
from pipelinerl.environments.maths.numbers import answer_in, last_boxed, number_of, same_number
from pipelinerl.environments.maths.problems import read_math_problems
from pipelinerl.environments.single_turn import QuestionPrompt, QuestionSet, checked_format_reward
from pipelinerl.errors import EnvironmentSetupError
from pipelinerl.interfaces import GenerationClient, Tokenizer
from pipelinerl.types import Completion, Problem, Rollout, Turn

# ---- parts of the reward: pure functions


def answer_of(text: str) -> str:
    r"""The final answer in a model's text: the content of the last `\boxed{}`, else the number of `numbers.answer_in`.

    Empty if there is none.
    """
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    number = answer_in(text)
    return "" if number is None else str(number)


def length_penalty(length: int, *, limit: int, soft_tokens: int) -> float:
    """0 up to `limit - soft_tokens` tokens, then linear down to -1 at `limit`, where a text is cut off.

    The penalty warns a policy before its completions reach the limit. Without it, the first signal is the lost reward of a
    text that was cut off.
    """
    if soft_tokens <= 0:
        return 0.0
    return -min(1.0, max(0.0, (length - (limit - soft_tokens)) / soft_tokens))


SYSTEM = "Solve the problem step by step. Put the final answer in \\boxed{}."
TEXT = "Problem: {question}\nSolve it step by step, and put the final answer in \\boxed{}.\nSolution:"


class Maths(QuestionSet):
    r"""Reward 1 if the answer (in the last `\boxed{}`, else the last number) has the right value, else 0.

    path            file of JSON lines, or a list of files, in the format of GSM8K, MATH, AIME and others (see `problems`)
    held_out_path   the same for evaluation. Without it, one problem in ten of `path` (by a hash of the question) is held
                    out. A held-out question is never trained on, even if `path` has it too
    question_field, answer_field   names of the fields, or paths such as `extra.answer`. Default: the usual names
    chat, system, text   as in `math_words`
    judge           `math-verify` (needs the extra `math`), or `numbers`, for which all answers must be numbers
    judge_timeout_s   an answer that takes longer to judge counts as wrong
    judge_processes   number of answers that are judged at once
    format_reward   reward of a wrong answer in a `\boxed{}`
    max_tokens      longest completion, if `actor.max_tokens` is too long for this task
    length_penalty_tokens   the reward falls linearly by up to `length_penalty` over this many tokens before `max_tokens`; a
                    text that is cut off gets the full penalty. 0: no penalty
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int,
        *,
        path: str | Sequence[str],
        held_out_path: str | Sequence[str] | None = None,
        question_field: str | None = None,
        answer_field: str | None = None,
        chat: bool | None = None,
        system: str = SYSTEM,
        text: str = TEXT,
        judge: str = "math-verify",
        judge_timeout_s: float = 5.0,
        judge_processes: int = 1,
        format_reward: float = 0.0,
        max_tokens: int | None = None,
        length_penalty_tokens: int = 0,
        length_penalty: float = 1.0,
    ) -> None:
        """Raises EnvironmentSetupError, naming file and line, for unusable data, and MissingDependencyError."""
        question_prompt = QuestionPrompt(tokenizer, chat=chat, system=system, text=text)
        self._format_reward = checked_format_reward(format_reward)
        _check_lengths(max_tokens, length_penalty_tokens, length_penalty)
        self.max_tokens = max_tokens
        self._soft_tokens = length_penalty_tokens
        self._penalty = length_penalty
        self._judge = Judge(judge, timeout_s=judge_timeout_s, processes=judge_processes)
        read = partial(_read, question_field=question_field, answer_field=answer_field, numbers=self._judge.numbers_only)
        super().__init__(tokenizer, seed, path=path, held_out_path=held_out_path, read=read, question_prompt=question_prompt)

    async def rollout(self, problem: Problem, client: GenerationClient) -> Rollout:
        """Metrics: `right`, `boxed` and `judge_failed` are 1 or 0; `length_penalty` is at most 0."""
        prompt_ids = self._encode(self.prompt(problem))
        completion = await client.generate(prompt_ids, max_tokens=self.max_tokens)
        text = self._decode(completion.token_ids)
        turn = Turn(prompt_ids=prompt_ids, completion=completion, text=text)
        verdict = await self._verdict(problem.payload["answer"], text)
        boxed = last_boxed(text) is not None
        score = 1.0 if verdict.right else self._format_reward if boxed else 0.0
        penalty = self._length_penalty(completion)
        metrics = {
            "right": float(verdict.right),
            "boxed": float(boxed),
            "judge_failed": float(verdict.failed),
            "length_penalty": penalty,
        }
        return Rollout(turns=(turn,), reward=score + penalty, metrics=metrics)

    def reward(self, problem: Problem, text: str) -> float:
        """Not used: the reward needs the judge process and the length of the completion (see `rollout`)."""
        raise NotImplementedError

    async def _verdict(self, expected: str, text: str) -> Verdict:
        if self._judge.numbers_only:
            number = number_of(expected)
            return Verdict(number is not None and same_number(text, number))
        return await self._judge.verdict(expected, answer_of(text))

    def _length_penalty(self, completion: Completion) -> float:
        if not self._soft_tokens or self.max_tokens is None:
            return 0.0
        # The text may be cut off before `self.max_tokens`, by `actor.max_tokens` or the slot's length.
        cut_off = completion.finish_reason == "length"
        length = self.max_tokens if cut_off else len(completion.token_ids)
        return self._penalty * length_penalty(length, limit=self.max_tokens, soft_tokens=self._soft_tokens)


def _check_lengths(max_tokens: int | None, soft_tokens: int, penalty: float) -> None:
    if max_tokens is not None and max_tokens < 1:
        raise EnvironmentSetupError(f"environment.args.max_tokens is {max_tokens}; it must be at least 1")
    if soft_tokens < 0 or penalty < 0:
        raise EnvironmentSetupError("environment.args.length_penalty and length_penalty_tokens must not be negative")
    if soft_tokens and (max_tokens is None or soft_tokens > max_tokens):
        raise EnvironmentSetupError(
            f"environment.args.length_penalty_tokens is {soft_tokens}: it needs environment.args.max_tokens to be "
            f"at least as many (it is {max_tokens})"
        )


def _read(path: Path, question_field: str | None, answer_field: str | None, numbers: bool) -> list[Problem]:
    problems = read_math_problems(path, question_field, answer_field)
    for problem in problems:
        answer = problem.payload["answer"]
        if numbers and number_of(answer) is None:
            line = problem.id.rpartition("/")[2]
            raise EnvironmentSetupError(f"{path}:{line}: {answer[:60]!r} is not a number, but `judge` is `numbers`")
    return problems
