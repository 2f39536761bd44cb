"""Examples from files of JSON lines, and which of them are held out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from pipelinerl.environments.jsonl import read_rows
from pipelinerl.errors import EnvironmentSetupError
from pipelinerl.types import Problem


class Split(NamedTuple):
    training: list[Problem]
    held_out: list[Problem]


def read_examples(paths: str | Sequence[str], check: Callable[[dict[str, Any]], str | None]) -> list[Problem]:
    """Every line of the files, a JSON object, as the payload of a problem. `check` says what is wrong with an object.

    Raises EnvironmentSetupError, naming file and line, for a line that can't be used, and for a file without any.
    """
    names = [paths] if isinstance(paths, str) else paths
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
        raise EnvironmentSetupError(f"environment.args: {paths!r} must be a file of JSON lines, or a list of them")
    return [problem for name in names for problem in _read(Path(name).expanduser(), check)]


def read_split(
    data: str | Sequence[str],
    held_out: float | str | Sequence[str],
    check: Callable[[dict[str, Any]], str | None],
    key: Callable[[Problem], str],
) -> Split:
    """The problems of files: a share of them held out, or those that another file (or several) holds.

    Raises EnvironmentSetupError for files and shares that can't be used, and if nothing is left to train on.
    """
    problems = read_examples(data, check)
    if isinstance(held_out, int | float):
        if not 0 <= held_out < 1:
            raise EnvironmentSetupError(f"environment.args.held_out is {held_out}; it is a file, or a share below 1")
        parts = split(problems, held_out, key)
    else:
        evaluation = read_examples(held_out, check)
        parts = Split(without(problems, set(map(key, evaluation)), key).training, evaluation)
    if not parts.training:
        raise EnvironmentSetupError(f"{data}: all of its {len(problems)} examples are held out; give it more")
    return parts


def split(problems: list[Problem], held_out: float, key: Callable[[Problem], str]) -> Split:
    """Hold out this share of the problems, rounded up, but not all. A hash of `key` decides, not the order of the file.

    Problems of the same key are on the same side.
    """
    keys = sorted({key(problem) for problem in problems}, key=lambda text: blake2b(text.encode()).digest())
    count = min(math.ceil(held_out * len(keys)), len(keys) - 1)
    return without(problems, set(keys[:count]), key)


def without(problems: list[Problem], unseen: set[str], key: Callable[[Problem], str]) -> Split:
    """The problems whose key isn't in `unseen`, and those whose key is."""
    training = [problem for problem in problems if key(problem) not in unseen]
    return Split(training, [problem for problem in problems if key(problem) in unseen])


def _read(path: Path, check: Callable[[dict[str, Any]], str | None]) -> list[Problem]:
    problems = []
    for number, example in read_rows(path):
        wrong = check(example) if isinstance(example, dict) else "is not a JSON object"
        if wrong:
            raise EnvironmentSetupError(f"{path}:{number} {wrong}")
        problems.append(Problem(id=f"{path.stem}/{number}", payload=example))
    if not problems:
        raise EnvironmentSetupError(f"{path} has no examples: it is empty")
    return problems
