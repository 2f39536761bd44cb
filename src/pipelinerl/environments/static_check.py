"""Static checks of `environment.kind` and `environment.args`, made before any process starts and without running user code.

User files are parsed, not imported (`user.parsed`). What that can't determine is left to `make_environment`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelinerl.environments.options import (
    FileName,
    FunctionName,
    Inner,
    Options,
    check_arguments,
    names_a_dataset,
    unreadable,
)
from pipelinerl.environments.registry import constructor_of, find_class, options_of
from pipelinerl.errors import UserError


def check_statically(kind: str, args: Mapping[str, Any], *, held_out: int = 0) -> None:
    """Raises EnvironmentSetupError for files, classes, functions and arguments that are certainly wrong.

    Raises ConfigError if `held_out` is not 0 and the class certainly has no held-out problems.
    """
    module, colon, name = kind.rpartition(":")
    if not colon or not module or not name:
        found_class = find_class(kind)
        check_arguments(kind, constructor_of(found_class), args)
        if (options_type := options_of(found_class)) is not None:
            _check_options(options_type.read(args))
    elif _names_a_file(module):
        from pipelinerl.environments.user.parsed import check_class  # noqa: PLC0415 - a built-in environment needs no parser

        check_class(kind, args, held_out)


def _check_options(options: Options) -> None:
    """Check the files, functions and environments that are named in the arguments of a built-in environment."""
    for path in map(Path, _named(options, FileName)):
        if not names_a_dataset(path):
            try:
                path.expanduser().open("rb").close()
            except OSError as error:
                raise unreadable(path.expanduser(), error) from error
    for spec in _named(options, FunctionName):
        if _names_a_file(spec.rpartition(":")[0]):
            from pipelinerl.environments.user.parsed import check_function  # noqa: PLC0415 - as above

            check_function(spec)
    for argument in options.__struct_fields__:
        value = getattr(options, argument)
        named = value if isinstance(value, dict) else {"": value}
        for name, inner in named.items():
            if isinstance(inner, Inner):
                where = f"environment.args.{argument}" + (f".{name}" if name else "")
                try:
                    check_statically(inner.kind, inner.args)
                except UserError as error:
                    raise type(error)(f"{where}: {error}") from error


def _named(options: Options, kind: Any) -> list[str]:
    """The texts in the arguments of type `kind`."""
    values = [getattr(options, argument) for argument in options.fields_of(kind)]
    texts = [text for value in values for text in (value if isinstance(value, list | dict) else [value])]
    return [text for text in texts if isinstance(text, str)]


def _names_a_file(module: str) -> bool:
    return module.endswith(".py") or "/" in module
