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

# ------------------------------------------------------------------------------------------------------------------------
# Importing what users name: a Python file, by its path, or a module, by its name. Every mistake is one line.


def module_named(name: str) -> ModuleType:
    """The module of `path/to/file.py`, or `package.module`. Raises EnvironmentSetupError, with the file's line."""
    return module_of_file(Path(name)) if name.endswith(".py") or "/" in name else _module(name)


def module_of_file(path: Path) -> ModuleType:
    """Imported once in a process, with the folder that it is in as the last place to import from.

    A relative path is relative to the working directory. Raises EnvironmentSetupError.
    """
    path = path.expanduser().resolve()
    # A name of its own, so that no file can shadow a real module or another file of the same name.
    name = f"pipelinerl_file_{path.stem}_{zlib.crc32(bytes(path)):08x}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise no_file(path)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise EnvironmentSetupError(f"{path} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and the like look their module up there
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise EnvironmentSetupError(f"{path} can't be imported: {told(error, path)}") from error
    return module


def no_file(path: Path) -> EnvironmentSetupError:
    """What to say of a file that is not there."""
    return EnvironmentSetupError(f"there is no file {path} (a path is relative to the working directory, {Path.cwd()})")


def told(error: BaseException, file: Path) -> str:
    """One line for what code of `file` raised, with the last line of that file that took part."""
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f"line {error.lineno}: SyntaxError: {error.msg}"
    line = last_line(error, file)
    where = "" if line is None else f"line {line}: "
    return f"{where}{type(error).__name__}: {' '.join(str(error).split())}"


def last_line(error: BaseException, file: Path) -> int | None:
    """The last line of `file` that took part in raising `error`; None if none did."""
    line = None
    trace = error.__traceback__
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename).name == file.name:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise EnvironmentSetupError(
                f"there is no module {name} (is it installed, or on PYTHONPATH? A file is named by its path, with `.py`)"
            ) from error
        raise EnvironmentSetupError(f"module {name} can't be imported: {error}") from error
    except (Exception, SystemExit) as error:
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise EnvironmentSetupError(f"module {name} can't be imported: {what}") from error


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
