"""Any task of the package `reasoning-gym` (https://github.com/open-thought/reasoning-gym) as an environment."""

from __future__ import annotations

import inspect
import re
import zlib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache, partial
from typing import Any

import msgspec

from pipelinerl.config.schema import Count, Positive
from pipelinerl.environments.options import Arguments, QuestionOptions, QuestionTask
from pipelinerl.environments.single_turn import Score, is_held_out
from pipelinerl.environments.user.pool import CALL_ENDED, FunctionPool, Limits
from pipelinerl.errors import EnvironmentSetupError, RolloutError
from pipelinerl.extras import require
from pipelinerl.interfaces import Tokenizer
from pipelinerl.models.encoding import Message
from pipelinerl.types import Problem, Turn, finite

SYSTEM = "Work the problem out. Then give the final answer, and nothing else, between <answer> and </answer>."
TEXT = "{question}\nWork it out. Then give the final answer, and nothing else, between <answer> and </answer>.\n"

CHUNK = 500
"""Entries per seed. Several tasks have a fixed number of entries, or create all of them at once."""

_RUNS_TEXT = re.compile(r"\b(?:eval|exec|parse_expr|sympify)\(")
"""In the source of a task that runs answers: `eval`, `exec`, or a sympy parser that uses `eval`."""
_MARKED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_TRIES = 64
_HELD_OUT_CHUNKS = 100
"""Number of chunks that are searched for held-out problems."""


class ReasoningGymOptions(QuestionOptions, frozen=True):
    task: str
    """Name of the task, such as `chain_sum`."""
    args: Arguments | None = None
    """Arguments of the task, such as `{max_terms: 3}`."""
    marked: bool = True
    """false: the whole completion is the answer, for a custom prompt that asks for the answer alone."""
    runs_answers: bool = False
    """Some tasks pass the model's answer to Python's `eval`, directly or through sympy. They are refused unless this is
    true: the answer could then run any code with the permissions of your account."""
    score_processes: Count = 1
    """How many answers are scored at once."""
    score_timeout_s: Positive = 5.0
    """An answer that takes longer to score gets 0."""
    system: str = SYSTEM
    text: str = TEXT


class ReasoningGym(QuestionTask):
    """The reward is the task's own score of the text between the last `<answer>` and `</answer>`.

    One question in ten (by a hash, the same for every seed) is held out for evaluation and never trained on.
    """

    Options = ReasoningGymOptions

    def __init__(self, tokenizer: Tokenizer, seed: int, **args: Any) -> None:
        """Raises MissingDependencyError, and EnvironmentSetupError for an unknown or refused task, or wrong arguments."""
        self._options = options = ReasoningGymOptions.read(args)
        super().__init__(tokenizer, seed, options)
        self._arguments = msgspec.json.encode(options.args or {}).decode()
        self._chunk = lru_cache(maxsize=4)(partial(make_tasks, options.task, self._arguments))
        source = inspect.getsource(type(self._chunk(0)))
        if _RUNS_TEXT.search(source) and not options.runs_answers:
            raise EnvironmentSetupError(
                f"{options.task} of reasoning-gym evaluates parts of answers as Python, so a model's text would run on this "
                "machine; set environment.args.runs_answers to true if that is what you want"
            )
        limits = Limits(timeout_s=options.score_timeout_s, workers=options.score_processes)
        # `create` is registered so that a process imports reasoning-gym when it starts: a call has no time for it.
        functions = {"score": f"{__name__}:score", "create": "reasoning_gym.factory:create_dataset"}
        self._pool = FunctionPool(functions, limits)

    def problem(self, index: int) -> Problem:
        chunk, place = divmod(index, CHUNK)
        for attempt in range(_TRIES):
            # Each attempt uses another place as well as another seed: some tasks have fewer entries than a chunk.
            problem = self._entry(f"train/{self.seed}/{chunk}/{attempt}", (place + attempt * 97) % CHUNK)
            if problem is not None and not is_held_out(problem.payload["question"]):
                return problem
        raise EnvironmentSetupError(
            f"{self._options.task} of reasoning-gym has too few different problems for its arguments"
        )

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
        return self.ask(problem.payload["question"])

    async def judge(self, problem: Problem, turn: Turn) -> Score:
        """Metrics: `marked`, `score_failed` (a limit was exceeded, or a crash) and `score_raised` (the task raised an error
        over the answer) are 1 or 0. Raises if the task can't score its own answer either."""
        answers = _MARKED.findall(turn.text) if self._options.marked else [turn.text]
        score, failed = 0.0, False
        if answers:
            try:
                score = await self._pool.call(
                    "score", self._options.task, self._arguments, problem.payload, answers[-1].strip()
                )
            except CALL_ENDED:
                failed = True
        raised = score is None
        reward = 0.0 if raised else finite(score, f"the score of {self._options.task}")
        metrics = {"marked": float(bool(answers)), "score_failed": float(failed), "score_raised": float(raised)}
        return reward, metrics

    def _entry(self, name: str, place: int) -> Problem | None:
        """The entry at `place` of the chunk `name`; None if the task has fewer entries."""
        seed = zlib.crc32(f"{self._options.task}/{name}".encode()) % 2**31
        try:
            entry = self._chunk(seed)[place]
        except IndexError:
            return None
        payload = {"seed": seed, "index": place, "question": entry["question"], "answer": str(entry["answer"])}
        return Problem(id=f"{self._options.task}/{seed}/{place}", payload=payload)


# ---- the package: its tasks, and their scores in another process
# Some tasks take seconds, or unbounded time, over some answers. An entry is a function of the task's name, its arguments,
# the seed and the index, so these identify it in that process.


def make_tasks(name: str, arguments: str, seed: int) -> Any:
    """The data set of `CHUNK` entries for a seed. `arguments` of the task are JSON.

    Raises MissingDependencyError without the package, EnvironmentSetupError for an unknown task or wrong arguments.
    """
    require("reasoning-gym", "environment.kind reasoning_gym")
    from reasoning_gym.factory import DATASETS, create_dataset  # noqa: PLC0415 - takes a second, and is an extra

    if name not in DATASETS:
        close = get_close_matches(name, DATASETS, n=3) or sorted(DATASETS)
        raise EnvironmentSetupError(f"environment.args.task {name!r} is not in reasoning-gym; it has {', '.join(close)}")
    try:
        return create_dataset(name, seed=seed, size=CHUNK, **msgspec.json.decode(arguments))
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise EnvironmentSetupError(f"environment.args.args don't fit {name} of reasoning-gym: {reason}") from error


_cached_tasks = lru_cache(maxsize=8)(make_tasks)


def score(name: str, arguments: str, entry: Mapping[str, Any], answer: str) -> float | None:
    """The score of `answer`; None if the task raises an error over it. `entry` has a problem's seed, index and question.

    Raises RolloutError if the entry has another question in this process than where the problem was created, and what the
    task raises over the entry's own answer.
    """
    tasks = _cached_tasks(name, arguments, entry["seed"])
    found = tasks[entry["index"]]
    if found["question"] != entry["question"]:
        raise RolloutError(
            f"{name} of reasoning-gym gives other problems in another process: they depend on the order of Python's "
            "sets; set PYTHONHASHSEED=0 in the environment that starts the run"
        )
    try:
        return float(tasks.score_answer(answer, found))
    except MemoryError:
        raise  # the state of the process is unknown: the worker exits
    except Exception:  # noqa: BLE001 - third-party code may raise anything over an answer of a model
        tasks.score_answer(found["answer"], found)
        return None
