"""A function in a user's file: found by `path/to/file.py:name` or `package.module:name`, and what it returns made plain."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
import zlib
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from pipelinerl.errors import EnvironmentSetupError, RolloutError

UserFunction = Callable[..., Any]


def names_a_function(text: str) -> bool:
    """Whether `text` is `file.py:name` or `package.module:name`, as opposed to the name of a field."""
    module, colon, name = text.rpartition(":")
    return bool(colon and name.isidentifier() and (module.endswith(".py") or module.replace(".", "").isidentifier()))


def find_function(spec: str) -> UserFunction:
    """The function that `spec` names; its file is imported, with the folder it is in as the last place to import from.

    Raises EnvironmentSetupError, with the file's line where there is one, if there is no such function.
    """
    module_name, colon, name = spec.rpartition(":")
    if not colon or not module_name or not name:
        raise EnvironmentSetupError(f"{spec!r} names no function; write path/to/file.py:function or package.module:function")
    module = _module_of_file(Path(module_name)) if module_name.endswith(".py") else _module(module_name)
    found = getattr(module, name, None)
    if not callable(found):
        what = f"{name!r} of {module_name} is a {type(found).__name__}, not a function"
        raise EnvironmentSetupError(what if hasattr(module, name) else _no_such(module, module_name, name))
    if inspect.iscoroutinefunction(found):
        raise EnvironmentSetupError(f"{spec} is `async def`; it must be a plain function, which may take its time")
    function: UserFunction = found
    return function


def describe(error: BaseException, spec: str) -> str:
    """One line for what a function raised, with the last line of its own file that took part."""
    file = spec.rpartition(":")[0]
    lines = []
    trace = error.__traceback__
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename).name == Path(file).name:
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f"line {error.lineno}: SyntaxError: {error.msg}"
    where = f"line {lines[-1]}: " if lines else ""
    return f"{where}{type(error).__name__}: {' '.join(str(error).split())}"


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


def _module_of_file(path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    # A name of its own, so that no file can shadow a real module or another file of the same name.
    name = f"pipelinerl_functions_{path.stem}_{zlib.crc32(bytes(path)):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise EnvironmentSetupError(f"there is no file {path} (a path is relative to the working directory, {Path.cwd()})")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and the like look their module up there
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise EnvironmentSetupError(f"{path} can't be imported: {describe(error, f'{path}:')}") from error
    return module


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise EnvironmentSetupError(
            f"module {name} can't be imported: {type(error).__name__}: {error} (a file is named by its path, with `.py`)"
        ) from error


def _no_such(module: ModuleType, module_name: str, name: str) -> str:
    own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    functions = [key for key in own if inspect.isfunction(vars(module)[key])]
    near = get_close_matches(name, functions, n=1) or functions[:3]
    return f"{module_name} has no function {name!r}" + (f"; it has {', '.join(near)}" if near else "")
