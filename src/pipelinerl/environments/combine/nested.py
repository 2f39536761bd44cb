"""Environments within environments: read from `environment.args`, build, and list their distinct problems."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from pipelinerl.environments.registry import make_environment
from pipelinerl.errors import EnvironmentSetupError, PipelineRLError
from pipelinerl.interfaces import Environment, Tokenizer
from pipelinerl.types import Problem

MIN_REPEATS = 1000


class Inner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`kind` and `args`, as under `environment` in a run file."""

    kind: str
    args: dict[str, Any] = {}


def make_inner(where: str, inner: Inner, tokenizer: Tokenizer, seed: int) -> Environment:
    """Raises what `make_environment` raises, with the message prefixed by `where`."""
    try:
        return make_environment(inner.kind, inner.args, tokenizer, seed)
    except PipelineRLError as error:
        raise type(error)(f"{where}: {error}") from error


def read_inner(where: str, value: Mapping[str, Any]) -> Inner:
    """Raises EnvironmentSetupError if `value` is not an environment."""
    try:
        return msgspec.convert(value, Inner)
    except msgspec.ValidationError as error:
        raise EnvironmentSetupError(f"{where} must be an environment, `{{kind: ..., args: {{...}}}}`: {error}") from error


def distinct_problems(environment: Environment, limit: int) -> Iterator[Problem]:
    """The distinct training problems among the first `limit`, in order of first appearance.

    Ends early when max(MIN_REPEATS, number found so far) problems in a row are repeats: the set is then considered
    complete. Raises EnvironmentSetupError if two different problems have the same id.
    """
    found: dict[str, Problem] = {}
    repeats = 0
    for index in range(limit):
        problem = environment.problem(index)
        known = found.get(problem.id)
        if known is None:
            found[problem.id] = problem
            repeats = 0
            yield problem
            continue
        if known.payload != problem.payload:
            raise EnvironmentSetupError(f"two different problems have the id {problem.id!r}: rename one of their files")
        repeats += 1
        if repeats >= max(MIN_REPEATS, len(found)):
            return
