"""Finds classes and functions of the user, named by `path/to/file.py:name` or `package.module:name`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import zlib
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from pipelinerl.errors import EnvironmentSetupError

UserFunction = Callable[..., Any]


def names_a_function(text: str) -> bool:
    """Whether `text` is `file.py:name` or `package.module:name`, as opposed to the name of a field."""
    module, colon, name = text.rpartition(":")
    return bool(colon and name.isidentifier() and (module.endswith(".py") or module.replace(".", "").isidentifier()))


def find_function(spec: str, *, allow_async: bool = False) -> UserFunction:
    """The function that `spec` names. Raises EnvironmentSetupError, with the line of its file, if there is none."""
    found: UserFunction = find(spec, "function", callable)
    if inspect.iscoroutinefunction(found) and not allow_async:
        raise EnvironmentSetupError(f"{spec} is `async def`; it must be a plain function, which may block")
    return found


def find(spec: str, what: str, is_one: Callable[[object], bool], where: str = "") -> Any:
    """What `spec` names, if `is_one`. Raises EnvironmentSetupError, which says that it is not a `what`, and `where`."""
    module_name, _, name = spec.rpartition(":")
    if not module_name or not name:
        raise EnvironmentSetupError(
            f"{spec!r} does not name a {what}; write path/to/file.py:{what} or package.module:{what}"
        )
    module = import_code(module_name)
    found = getattr(module, name, None)
    if is_one(found):
        return found
    if hasattr(module, name):
        raise EnvironmentSetupError(f"{name!r} of {module_name} is a {type(found).__name__}, not a {what}{where}")
    kind = inspect.isclass if what == "class" else inspect.isfunction
    names = [one for one, value in vars(module).items() if kind(value) and value.__module__ == module.__name__]
    near = get_close_matches(name, names, n=1) or names[:3]
    hint = f"; it has {', '.join(near)}" if near else ""
    raise EnvironmentSetupError(f"{module_name} has no {what} {name!r}{hint}{where}")


def import_code(name: str) -> ModuleType:
    """Import `path/to/file.py` or `package.module`. Raises EnvironmentSetupError, with the line of the file.

    A file is imported once per process, and its folder is appended to `sys.path`. A relative path is relative to the working
    directory.
    """
    is_file = name.endswith(".py") or "/" in name
    try:
        return _import_file(Path(name).expanduser().resolve()) if is_file else importlib.import_module(name)
    except EnvironmentSetupError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise EnvironmentSetupError(
                f"there is no module {name} (is it installed, or on PYTHONPATH? A file is named by its path, with `.py`)"
            ) from error
        what = name if is_file else f"module {name}"
        raise EnvironmentSetupError(f"{what} can't be imported: {describe(error, f'{name}:')}") from error


def _import_file(path: Path) -> ModuleType:
    # A unique module name: a file must not shadow a real module or another file with the same name.
    name = f"pipelinerl_file_{path.stem}_{zlib.crc32(bytes(path)):08x}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise EnvironmentSetupError(f"there is no file {path} (a path is relative to the working directory, {Path.cwd()})")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise EnvironmentSetupError(f"{path} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module there
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def describe(error: BaseException, spec: str) -> str:
    """An error from the function `spec` in one line, with its file and the last line of that file in the traceback."""
    name = Path(spec.rpartition(":")[0]).name
    line = error.lineno if isinstance(error, SyntaxError) else None
    trace = error.__traceback__
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename).name == name:
            line = trace.tb_lineno
        trace = trace.tb_next
    text = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return ("" if line is None else f"{name}, line {line}: ") + f"{type(error).__name__}: {text}{notes}"
