"""Importing what users name: a Python file, by its path, or a module, by its name. Every mistake is one line."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import zlib
from pathlib import Path
from types import ModuleType

from pipelinerl.errors import EnvironmentSetupError


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
