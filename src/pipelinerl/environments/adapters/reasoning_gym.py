"""Any task of the package `reasoning-gym` (https://github.com/open-thought/reasoning-gym) as an environment."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pipelinerl.environments.adapters.reasoning_gym_tasks import CHUNK, make_tasks, runs_answers
from pipelinerl.environments.pool.messages import Limits
from pipelinerl.environments.pool.pool import FunctionPool
from pipelinerl.environments.prompts import Message
from pipelinerl.environments.registry import checked
from pipelinerl.environments.single_turn import Asking, SingleTurn, checked_format_reward, is_held_out
from pipelinerl.environments.user.code import finite_number
from pipelinerl.environments.user.trial import try_out
from pipelinerl.errors import EnvironmentSetupError
from pipelinerl.interfaces import GenerationClient, Tokenizer
from pipelinerl.types import Problem, Rollout, Turn

SYSTEM = "Work the problem out. Then give the final answer, and nothing else, between <answer> and </answer>."
TEXT = "{question}\nWork it out. Then give the final answer, and nothing else, between <answer> and </answer>.\n"

_MARKED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_TRIES = 64
_PLACES = 100
"""Chunks that are looked through for held-out problems."""


class ReasoningGym(SingleTurn):
    """The reward is the task's own score of what stands between the last `<answer>` and `</answer>`.

    task            its name, like `chain_sum`
    args            its arguments, like `{max_terms: 3}`
    marked          false: the whole completion is the answer, for a prompt of yours that asks for nothing else
    format_reward   what an answer is worth at least that is marked
    runs_answers    some tasks hand the model's answer to Python's `eval` or to sympy, which does the same. They are refused
                    unless this is true: an answer could then do anything that your account can
    chat, system, text   as in `math_words`
    max_tokens      longest completion, if `actor.max_tokens` is too long for this task
    score_processes, score_timeout_s   so many answers are scored at once; one that takes longer scores 0

    One question in ten (by a hash of it) is for evaluations, the same for every seed, and is never trained on.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int,
        *,
        task: str,
        args: Mapping[str, Any] | None = None,
        marked: bool = True,
        format_reward: float = 0.0,
        runs_answers: bool = False,
        chat: bool | None = None,
        system: str = SYSTEM,
        text: str = TEXT,
        max_tokens: int | None = None,
        score_processes: int = 1,
        score_timeout_s: float = 5.0,
    ) -> None:
        """Raises MissingDependencyError, and EnvironmentSetupError for a task that can't be had, or not in this way."""
        super().__init__(tokenizer, seed)
        checked(
            _Types,
            task=task,
            args=args,
            marked=marked,
            format_reward=format_reward,
            runs_answers=runs_answers,
            max_tokens=max_tokens,
            score_processes=score_processes,
            score_timeout_s=score_timeout_s,
        )
        self.max_tokens = max_tokens
        self._ask = Asking(tokenizer, chat=chat, system=system, text=text)
        self._format_reward = checked_format_reward(format_reward)
        self._marked = marked
        self._task = task
        self._arguments = dict(args or {})
        self._chunk = lru_cache(maxsize=4)(self._made)
        _check_safe(task, self._made(0), allowed=runs_answers)
        limits = Limits(timeout_s=score_timeout_s)
        functions = {"score": "pipelinerl.environments.adapters.reasoning_gym_tasks:score"}
        self._pool = FunctionPool(functions, workers=score_processes, limits=limits)
        first = self.problem(0)
        try_out(self._score(first, None), limits.start_timeout_s + limits.timeout_s, "an empty answer to the first problem")

    def problem(self, index: int) -> Problem:
        chunk, place = divmod(index, CHUNK)
        for again in range(_TRIES):
            # Some tasks have fewer entries than a chunk: another place, too.
            problem = self._entry(f"train/{self.seed}/{chunk}/{again}", (place + again * 97) % CHUNK)
            if problem is not None and not is_held_out(problem.payload["question"]):
                return problem
        raise EnvironmentSetupError(f"{self._task} of reasoning-gym has too few different problems for its arguments")

    def held_out(self, count: int) -> Sequence[Problem]:
        found: dict[str, Problem] = {}
        for number in range(_PLACES * CHUNK):
            if len(found) >= count:
                break
            problem = self._entry(f"held-out/{number // CHUNK}", number % CHUNK)
            if problem is not None and is_held_out(problem.payload["question"]):
                found.setdefault(problem.payload["question"], problem)
        return list(found.values())[:count]

    def prompt(self, problem: Problem) -> str | Sequence[Message]:
        return self._ask(problem.payload["question"])

    async def rollout(self, problem: Problem, client: GenerationClient) -> Rollout:
        """Its metrics: `score` is the task's own, `marked` and `score_failed` (too slow, or a crash) are 1 or 0."""
        prompt_ids = self._encoded(self.prompt(problem))
        completion = await client.generate(prompt_ids, max_tokens=self.max_tokens)
        text = self._decode(completion.token_ids)
        answer = marked_answer(text) if self._marked else text.strip()
        failed = False
        try:
            score = 0.0 if answer is None else await self._score(problem, answer)
        except (TimeoutError, MemoryError, ChildProcessError):
            score, failed = 0.0, True
        reward = max(score, self._format_reward) if self._marked and answer is not None else score
        metrics = {"score": score, "marked": float(answer is not None), "score_failed": float(failed)}
        return Rollout(
            turns=(Turn(prompt_ids=prompt_ids, completion=completion, text=text),), reward=reward, metrics=metrics
        )

    def reward(self, problem: Problem, text: str) -> float:
        """Not used: an answer waits for the process that scores it (see `rollout`)."""
        raise NotImplementedError

    async def _score(self, problem: Problem, answer: str | None) -> float:
        task = {"name": self._task, "args": self._arguments}
        return finite_number(await self._pool.call("score", task, problem.payload, answer), f"{self._task} of reasoning-gym")

    def _entry(self, name: str, place: int) -> Problem | None:
        """None where a task has fewer entries than a chunk."""
        seed = zlib.crc32(f"{self._task}/{name}".encode()) % 2**31
        try:
            entry = self._chunk(seed)[place]
        except IndexError:
            return None
        payload = {"seed": seed, "index": place, "question": entry["question"], "answer": str(entry["answer"])}
        return Problem(id=f"{self._task}/{seed}/{place}", payload=payload)

    def _made(self, seed: int) -> Any:
        return make_tasks(self._task, self._arguments, seed)


def marked_answer(text: str) -> str | None:
    """What stands between the last pair of tags, without the white space around it. None if there is no pair."""
    found = _MARKED.findall(text)
    return found[-1].strip() if found else None


def _check_safe(task: str, tasks: Any, *, allowed: bool) -> None:
    if not allowed and runs_answers(tasks):
        raise EnvironmentSetupError(
            f"{task} of reasoning-gym evaluates parts of answers as Python, so a model's text would run on this machine; "
            "set environment.args.runs_answers to true if that is what you want"
        )


class _Types(msgspec.Struct, kw_only=True):
    """What a run file's values for these arguments must be."""

    task: str
    args: dict[str, Any] | None
    marked: bool
    format_reward: float
    runs_answers: bool
    max_tokens: Annotated[int, Meta(ge=1)] | None
    score_processes: Annotated[int, Meta(ge=1)]
    score_timeout_s: Annotated[float, Meta(gt=0)]
