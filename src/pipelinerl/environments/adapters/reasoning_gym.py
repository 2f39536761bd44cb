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
from pipelinerl.environments.single_turn import QuestionPrompt, SingleTurn, checked_format_reward, is_held_out
from pipelinerl.environments.user.code import finite_number
from pipelinerl.environments.user.trial import try_out
from pipelinerl.errors import EnvironmentSetupError
from pipelinerl.interfaces import GenerationClient, Tokenizer
from pipelinerl.types import Problem, Rollout, Turn

SYSTEM = "Work the problem out. Then give the final answer, and nothing else, between <answer> and </answer>."
TEXT = "{question}\nWork it out. Then give the final answer, and nothing else, between <answer> and </answer>.\n"

_MARKED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_TRIES = 64
_HELD_OUT_CHUNKS = 100
"""Number of chunks that are searched for held-out problems."""


class ReasoningGym(SingleTurn):
    """The reward is the task's own score of the text between the last `<answer>` and `</answer>`.

    task            name of the task, such as `chain_sum`
    args            arguments of the task, such as `{max_terms: 3}`
    marked          false: the whole completion is the answer, for a custom prompt that asks for the answer alone
    format_reward   minimum reward of an answer between the tags
    runs_answers    some tasks pass the model's answer to Python's `eval`, directly or through sympy. They are refused unless
                    this is true: the answer could then run any code with the permissions of your account
    chat, system, text   as in `math_words`
    max_tokens      longest completion, if `actor.max_tokens` is too long for this task
    score_processes   number of answers that are scored at once
    score_timeout_s   an answer that takes longer to score gets 0

    One question in ten (by a hash, the same for every seed) is held out for evaluation and never trained on.
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
        """Raises MissingDependencyError, and EnvironmentSetupError for an unknown or refused task, or wrong arguments."""
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
        self._ask = QuestionPrompt(tokenizer, chat=chat, system=system, text=text)
        self._format_reward = checked_format_reward(format_reward)
        self._marked = marked
        self._task = task
        self._arguments = dict(args or {})
        self._chunk = lru_cache(maxsize=4)(self._make_tasks)
        _check_safe(task, self._make_tasks(0), allowed=runs_answers)
        limits = Limits(timeout_s=score_timeout_s)
        functions = {"score": "pipelinerl.environments.adapters.reasoning_gym_tasks:score"}
        self._pool = FunctionPool(functions, workers=score_processes, limits=limits)
        first = self.problem(0)
        try_out(self._score(first, None), limits.start_timeout_s + limits.timeout_s, "an empty answer to the first problem")

    def problem(self, index: int) -> Problem:
        chunk, place = divmod(index, CHUNK)
        for attempt in range(_TRIES):
            # Each attempt uses another place as well as another seed: some tasks have fewer entries than a chunk.
            problem = self._entry(f"train/{self.seed}/{chunk}/{attempt}", (place + attempt * 97) % CHUNK)
            if problem is not None and not is_held_out(problem.payload["question"]):
                return problem
        raise EnvironmentSetupError(f"{self._task} of reasoning-gym has too few different problems for its arguments")

    def held_out(self, count: int) -> Sequence[Problem]:
        found: dict[str, Problem] = {}
        for number in range(_HELD_OUT_CHUNKS * CHUNK):
            if len(found) >= count:
                break
            problem = self._entry(f"held-out/{number // CHUNK}", number % CHUNK)
            if problem is not None and is_held_out(problem.payload["question"]):
                found.setdefault(problem.payload["question"], problem)
        return list(found.values())[:count]

    def prompt(self, problem: Problem) -> str | Sequence[Message]:
        return self._ask(problem.payload["question"])

    async def rollout(self, problem: Problem, client: GenerationClient) -> Rollout:
        """Metrics: `score` is the task's own; `marked` and `score_failed` (a limit was exceeded, or a crash) are 1 or 0."""
        prompt_ids = self._encode(self.prompt(problem))
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
        """Not used: answers are scored in another process (see `rollout`)."""
        raise NotImplementedError

    async def _score(self, problem: Problem, answer: str | None) -> float:
        task = {"name": self._task, "args": self._arguments}
        return finite_number(await self._pool.call("score", task, problem.payload, answer), f"{self._task} of reasoning-gym")

    def _entry(self, name: str, place: int) -> Problem | None:
        """The entry at `place` of the chunk `name`; None if the task has fewer entries."""
        seed = zlib.crc32(f"{self._task}/{name}".encode()) % 2**31
        try:
            entry = self._chunk(seed)[place]
        except IndexError:
            return None
        payload = {"seed": seed, "index": place, "question": entry["question"], "answer": str(entry["answer"])}
        return Problem(id=f"{self._task}/{seed}/{place}", payload=payload)

    def _make_tasks(self, seed: int) -> Any:
        return make_tasks(self._task, self._arguments, seed)


def marked_answer(text: str) -> str | None:
    """The text between the last pair of tags, stripped of white space. None if there is no pair."""
    found = _MARKED.findall(text)
    return found[-1].strip() if found else None


def _check_safe(task: str, tasks: Any, *, allowed: bool) -> None:
    if not allowed and runs_answers(tasks):
        raise EnvironmentSetupError(
            f"{task} of reasoning-gym evaluates parts of answers as Python, so a model's text would run on this machine; "
            "set environment.args.runs_answers to true if that is what you want"
        )


class _Types(msgspec.Struct, kw_only=True):
    """Types and ranges of these arguments in a run file."""

    task: str
    args: dict[str, Any] | None
    marked: bool
    format_reward: float
    runs_answers: bool
    max_tokens: Annotated[int, Meta(ge=1)] | None
    score_processes: Annotated[int, Meta(ge=1)]
    score_timeout_s: Annotated[float, Meta(gt=0)]
