"""Tasks of the package `reasoning-gym` by name, and what an answer is worth by their own rules.

The scoring runs in a process of its own (`pool`): some tasks take seconds over some answers, and may take for ever. An entry
is a function of the task's name, its arguments, the seed and the index, so these say which one is meant.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

import msgspec

from pipelinerl.errors import EnvironmentSetupError, MissingDependencyError, RolloutError

CHUNK = 500
"""Entries with one seed. Several tasks have a fixed number of entries, or make them all at once."""

_RUNS_TEXT = re.compile(r"\b(?:eval|exec|parse_expr|sympify)\(")


def make_tasks(name: str, arguments: Mapping[str, Any], seed: int) -> Any:
    """The data set of `CHUNK` entries of a seed.

    Raises MissingDependencyError without the package, EnvironmentSetupError for an unknown task or arguments it won't take.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise MissingDependencyError("reasoning-gym is not installed: pip install 'pipelinerl[reasoning-gym]'")
    from reasoning_gym.factory import DATASETS, create_dataset  # noqa: PLC0415 - takes a second, and is an extra

    if name not in DATASETS:
        close = get_close_matches(name, DATASETS, n=3)
        hint = f" Did you mean {' or '.join(close)}?" if close else f" It is one of {', '.join(sorted(DATASETS))}"
        raise EnvironmentSetupError(f"environment.args.task {name!r} is not in reasoning-gym.{hint}")
    config = DATASETS[name][1]
    own = sorted(set(inspect.signature(config).parameters) - {"seed", "size"})
    if unknown := sorted(set(arguments) - set(own)):
        raise EnvironmentSetupError(
            f"environment.args.args: {name} of reasoning-gym has no {unknown[0]}; it has {', '.join(own)}"
        )
    try:
        return create_dataset(name, seed=seed, size=CHUNK, **arguments)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise EnvironmentSetupError(f"environment.args.args don't fit {name} of reasoning-gym: {reason}") from error


def runs_answers(tasks: Any) -> bool:
    """Whether the task's class hands texts to Python or sympy to evaluate, as far as its source shows."""
    return _RUNS_TEXT.search(inspect.getsource(type(tasks))) is not None


def score(task: Mapping[str, Any], entry: Mapping[str, Any], answer: str | None) -> float:
    """What `answer` is worth. `task` has a name and `args`; `entry` the seed and index of a problem, and its question.

    Raises RolloutError if that entry asks another question here than where the problem was made.
    """
    tasks = _remembered(task["name"], msgspec.json.encode(task["args"], order="deterministic"), entry["seed"])
    found = tasks[entry["index"]]
    if found["question"] != entry["question"]:
        raise RolloutError(
            f"{task['name']} of reasoning-gym gives other problems in another process: they depend on the order of Python's "
            "sets; set PYTHONHASHSEED=0 in the environment that starts the run"
        )
    return float(tasks.score_answer(answer, found))


@lru_cache(maxsize=8)
def _remembered(name: str, arguments: bytes, seed: int) -> Any:
    return make_tasks(name, msgspec.json.decode(arguments), seed)
