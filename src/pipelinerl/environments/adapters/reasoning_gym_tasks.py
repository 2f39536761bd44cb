"""Creates tasks of the package `reasoning-gym` and scores answers by their own rules.

Scoring runs in a separate process (`pool`), because some tasks take seconds, or unbounded time, over some answers. An entry
is a function of the task's name, its arguments, the seed and the index, so these identify it in that process.
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
"""Entries per seed. Several tasks have a fixed number of entries, or create all of them at once."""

_RUNS_TEXT = re.compile(r"\b(?:eval|exec|parse_expr|sympify)\(")


def make_tasks(name: str, arguments: Mapping[str, Any], seed: int) -> Any:
    """The data set of `CHUNK` entries for a seed.

    Raises MissingDependencyError without the package, EnvironmentSetupError for an unknown task or wrong arguments.
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
    """Whether the source of the task's class calls `eval`, `exec`, or a sympy parser that uses `eval`."""
    return _RUNS_TEXT.search(inspect.getsource(type(tasks))) is not None


def score(task: Mapping[str, Any], entry: Mapping[str, Any], answer: str | None) -> float:
    """The score of `answer`. `task` has `name` and `args`; `entry` has the seed, index and question of a problem.

    Raises RolloutError if the entry has another question in this process than where the problem was created.
    """
    tasks = _cached_tasks(task["name"], msgspec.json.encode(task["args"], order="deterministic"), entry["seed"])
    found = tasks[entry["index"]]
    if found["question"] != entry["question"]:
        raise RolloutError(
            f"{task['name']} of reasoning-gym gives other problems in another process: they depend on the order of Python's "
            "sets; set PYTHONHASHSEED=0 in the environment that starts the run"
        )
    return float(tasks.score_answer(answer, found))


@lru_cache(maxsize=8)
def _cached_tasks(name: str, arguments: bytes, seed: int) -> Any:
    return make_tasks(name, msgspec.json.decode(arguments), seed)
