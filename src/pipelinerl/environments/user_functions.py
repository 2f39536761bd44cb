"""A function in a user's file: found by `path/to/file.py:name` or `package.module:name`, and what it returns made plain."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from pipelinerl.environments.user_files import module_named, told
from pipelinerl.errors import EnvironmentSetupError, RolloutError

UserFunction = Callable[..., Any]


def names_a_function(text: str) -> bool:
    """Whether `text` is `file.py:name` or `package.module:name`, as opposed to the name of a field."""
    module, colon, name = text.rpartition(":")
    return bool(colon and name.isidentifier() and (module.endswith(".py") or module.replace(".", "").isidentifier()))


def find_function(spec: str, *, allow_async: bool = False) -> UserFunction:
    """The function that `spec` names; its file is imported, with the folder it is in as the last place to import from.

    Raises EnvironmentSetupError, with the file's line where there is one, if there is no such function.
    """
    module_name, colon, name = spec.rpartition(":")
    if not colon or not module_name or not name:
        raise EnvironmentSetupError(f"{spec!r} names no function; write path/to/file.py:function or package.module:function")
    module = module_named(module_name)
    found = getattr(module, name, None)
    if not callable(found):
        what = f"{name!r} of {module_name} is a {type(found).__name__}, not a function"
        raise EnvironmentSetupError(what if hasattr(module, name) else _no_such(module, module_name, name))
    if inspect.iscoroutinefunction(found) and not allow_async:
        raise EnvironmentSetupError(f"{spec} is `async def`; it must be a plain function, which may take its time")
    function: UserFunction = found
    return function


def describe(error: BaseException, spec: str) -> str:
    """One line for what the function `spec` raised, with its file and the last line of that file that took part."""
    file = Path(spec.rpartition(":")[0])
    said = told(error, file)
    return f"{file.name}, {said}" if said.startswith("line ") else said


def plain(value: object) -> object:
    """Numbers of NumPy, of torch (scalars) and the like as floats; anything else as it is."""
    if isinstance(value, bool | int | str) or not hasattr(type(value), "__float__"):
        return value
    return float(value)  # type: ignore[arg-type]  # it has `__float__`


def finite_number(value: object, name: str) -> float:
    """What the function `name` returned, as a reward. Raises RolloutError if it isn't a finite number."""
    number = plain(value)
    if not isinstance(number, bool | int | float):
        kind = "None" if value is None else f"a {type(value).__name__}"
        raise RolloutError(f"{name} returned {kind}, not a number")
    try:
        reward = float(number)
    except OverflowError:
        reward = math.inf
    if not math.isfinite(reward):
        raise RolloutError(not_finite(name, reward))
    return reward


def not_finite(name: str, value: float) -> str:
    return f"{name} returned {value}, not a finite number"


def _no_such(module: ModuleType, module_name: str, name: str) -> str:
    own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    functions = [key for key in own if inspect.isfunction(vars(module)[key])]
    near = get_close_matches(name, functions, n=1) or functions[:3]
    return f"{module_name} has no function {name!r}" + (f"; it has {', '.join(near)}" if near else "")
