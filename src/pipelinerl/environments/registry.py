"""From `environment.kind` of the run file to an environment, with a one-line error for everything a user can get wrong."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import zlib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from pipelinerl.errors import EnvironmentSetupError, PipelineRLError
from pipelinerl.interfaces import Environment, Tokenizer

BUILT_IN = {
    "gcd": "pipelinerl.environments.gcd:Gcd",
    "math_words": "pipelinerl.environments.math_words:MathWords",
    "guess_number": "pipelinerl.environments.guess_number:GuessNumber",
    "math": "pipelinerl.environments.maths:Maths",
    "countdown": "pipelinerl.environments.countdown:Countdown",
    "mixture": "pipelinerl.environments.mixture:Mixture",
    "curriculum": "pipelinerl.environments.curriculum:Curriculum",
    "function": "pipelinerl.environments.function:Function",
}


def make_environment(kind: str, args: Mapping[str, Any], tokenizer: Tokenizer, seed: int) -> Environment:
    """`Class(tokenizer, seed, **args)` of a built-in kind, of `path/to/file.py:Class` or of `package.module:Class`.

    Raises EnvironmentSetupError if there is no such class, if it can't be built, or if it isn't an environment.
    """
    found = find_class(kind)
    _check_methods(kind, found)
    _check_arguments(kind, found, args)
    try:
        return cast("Environment", found(tokenizer, seed, **args))
    except PipelineRLError:
        raise
    except Exception as error:
        raise EnvironmentSetupError(f"environment {kind} can't be built: {type(error).__name__}: {error}") from error


def find_class(kind: str) -> type:
    """The class that `kind` names, not yet checked. Raises EnvironmentSetupError if there is none."""
    module_name, colon, class_name = BUILT_IN.get(kind, kind).rpartition(":")
    if not colon or not module_name or not class_name:
        close = get_close_matches(kind, BUILT_IN, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise EnvironmentSetupError(
            f"environment.kind {kind!r} is unknown.{hint} It is one of {', '.join(BUILT_IN)}, `path/to/file.py:ClassName` "
            "or `package.module:ClassName`"
        )
    is_file = module_name.endswith(".py") or "/" in module_name
    module = _module_of_file(Path(module_name)) if is_file else _module(module_name)
    found = getattr(module, class_name, None)
    if not inspect.isclass(found):
        classes = [
            name for name, value in vars(module).items() if inspect.isclass(value) and value.__module__ == module.__name__
        ]
        close = get_close_matches(class_name, classes, n=1) or classes[:3]
        hint = f"; it has {', '.join(close)}" if close else ""
        raise EnvironmentSetupError(f"{module_name} has no class {class_name!r}{hint} (environment.kind {kind})")
    return found


def _module_of_file(path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise EnvironmentSetupError(f"environment.kind names a file that isn't there: {path}")
    # A name of its own, so that no file can shadow a real module or another file of the same name.
    name = f"pipelinerl_environment_{path.stem}_{zlib.crc32(bytes(path)):08x}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise EnvironmentSetupError(f"environment.kind names a file that isn't Python: {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and the like look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise EnvironmentSetupError(f"{path} can't be imported: {_with_line(error, path)}") from error
    return module


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise EnvironmentSetupError(
                f"environment.kind names a module that isn't there: {name} (is it installed, or on PYTHONPATH? A file is "
                "named by its path, with `.py`)"
            ) from error
        raise EnvironmentSetupError(f"module {name} can't be imported: {error}") from error
    except Exception as error:
        raise EnvironmentSetupError(f"module {name} can't be imported: {type(error).__name__}: {error}") from error


def _check_methods(kind: str, found: type) -> None:
    for name, wanted in (
        ("problem", "(self, index)"),
        ("held_out", "(self, count)"),
        ("rollout", "(self, problem, client)"),
    ):
        if not callable(getattr(found, name, None)):
            raise EnvironmentSetupError(
                f"environment {kind} has no method `{name}{wanted}`; see `Environment` in interfaces.py"
            )
    if not inspect.iscoroutinefunction(inspect.unwrap(getattr(found, "rollout"))):  # noqa: B009 - `type` has no such attribute
        raise EnvironmentSetupError(f"`rollout` of environment {kind} must be `async def`, and return a Rollout")
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise EnvironmentSetupError(f"environment {kind} must define {', '.join(f'`{name}`' for name in missing)}")


def _check_arguments(kind: str, found: type, args: Mapping[str, Any]) -> None:
    """Tell a wrong `environment.args` from a TypeError inside the constructor."""
    signature = inspect.signature(found)
    try:
        signature.bind(None, 0, **args)
    except TypeError as error:
        own = list(signature.parameters.values())[2:]
        takes = ", ".join(
            f"{it.name} (required)" if it.default is it.empty and it.kind < it.VAR_KEYWORD else it.name for it in own
        )
        raise EnvironmentSetupError(
            f"environment.args don't fit {kind}: {error}; after `tokenizer` and `seed` it takes {takes or 'nothing'}"
        ) from error


def _with_line(error: Exception, path: Path) -> str:
    """The error and, if it came from the file itself, the line."""
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: SyntaxError: {error.msg}"
    lines = []
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    where = f"line {lines[-1]}: " if lines else ""
    return f"{where}{type(error).__name__}: {error}"
