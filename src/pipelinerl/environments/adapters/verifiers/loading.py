"""Loads an environment of verifiers, by name or by a function in a user's file, and its rows."""

from __future__ import annotations

import importlib.util
import inspect
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from verifiers.envs.environment import Environment
from verifiers.utils.env_utils import env_module_name

from pipelinerl.environments.user.code import UserFunction, describe, find_function
from pipelinerl.errors import EnvironmentSetupError
from pipelinerl.types import Problem


class Loaded(NamedTuple):
    """An environment and its rows as problems. `evaluation` is None if it has no `eval_dataset`."""

    name: str
    environment: Environment
    training: list[Problem]
    evaluation: list[Problem] | None


def load_environment(installed: str, load: str, arguments: Mapping[str, Any]) -> Loaded:
    """The environment named `installed`, or the one that the function `load` returns. The other argument is "".

    Raises EnvironmentSetupError, with one line, if it can't be loaded or has no data to train on.
    """
    spec = load or f"{_module_of(installed)}:load_environment"
    name = installed or _name_of(load)
    with _signal_handlers_kept():
        function = find_function(spec)
        _check_arguments(name, function, arguments)
        try:
            environment = function(**arguments)
        except Exception as error:
            raise EnvironmentSetupError(f"environment {name} can't be loaded: {describe(error, spec)}") from error
        if not isinstance(environment, Environment):
            raise EnvironmentSetupError(f"{spec} returned a {type(environment).__name__}, not a verifiers.Environment")
        environment.env_id, environment.env_args = environment.env_id or name, environment.env_args or dict(arguments)
        try:
            dataset, eval_dataset = environment.build_dataset(), environment.build_eval_dataset()
        except Exception as error:
            raise EnvironmentSetupError(
                f"the data of environment {name} can't be loaded: {describe(error, spec)}"
            ) from error
    training = _problems(name, dataset)
    if not training:
        raise EnvironmentSetupError(f"environment {name} has no dataset to train on")
    evaluation = None if eval_dataset is None else _problems(f"{name}/held-out", eval_dataset)
    return Loaded(name, environment, training, evaluation)


def _module_of(installed: str) -> str:
    """The module of an installed environment. Raises EnvironmentSetupError if there is none."""
    module = str(env_module_name(installed))
    if not module.isidentifier() or importlib.util.find_spec(module) is None:
        raise EnvironmentSetupError(
            f"environment.args.environment: {installed!r} is not installed (there is no module {module}); install the "
            "environment's package, or name its file in environment.args.load"
        )
    return module


def _name_of(load: str) -> str:
    """The name of a user's environment in problem ids: the stem of its file, or its module."""
    module = load.rpartition(":")[0]
    return Path(module).stem if module.endswith(".py") else module


def _check_arguments(name: str, function: UserFunction, arguments: Mapping[str, Any]) -> None:
    """Raises EnvironmentSetupError for arguments that don't fit, so that a TypeError inside the function is told apart."""
    signature = inspect.signature(function)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        takes = ", ".join(signature.parameters) or "nothing"
        raise EnvironmentSetupError(
            f"environment.args.args don't fit environment {name}: {error}; it takes {takes}"
        ) from error


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Restore the handlers of SIGINT and SIGTERM, which every environment of verifiers replaces."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def _problems(name: str, dataset: Any) -> list[Problem]:
    """Each row is a payload, unchanged. Raises EnvironmentSetupError if the first row can't be encoded as JSON."""
    problems = [Problem(id=f"{name}/{number}", payload=dict(row)) for number, row in enumerate(dataset or ())]
    try:
        msgspec.json.encode(problems[:1])
    except TypeError as error:
        raise EnvironmentSetupError(f"the rows of environment {name} are not JSON: {error}") from error
    return problems
