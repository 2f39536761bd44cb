"""Static checks of `environment.kind` and `environment.args`, made before any process starts and without running user code.

User files are parsed, not imported. What parsing can't determine (names from `import *`, base classes in other files,
modules by dotted name) is left to `make_environment`.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelinerl.environments.options import (
    BASE_SIGNATURE,
    FileName,
    FunctionName,
    Inner,
    Options,
    check_arguments,
    names_a_dataset,
    unreadable,
)
from pipelinerl.environments.registry import constructor_of, find_class, no_held_out, options_of
from pipelinerl.environments.user.code import names_a_function, no_file, not_defined, summarize_error
from pipelinerl.errors import EnvironmentSetupError, UserError

OWN_BASES = {"SingleTurn", "ToolTask"}
"""Base classes whose constructor is known to be `BASE_SIGNATURE` and whose `held_out` returns no problems."""


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
        found = _class(kind, _parsed(Path(module)))
        if found is not None:
            _check_class(kind, found, args, held_out)


def _check_options(options: Options) -> None:
    """Check the files, functions and environments that are named in the arguments of a built-in environment."""
    for path in map(Path, _named(options, FileName)):
        if not names_a_dataset(path):
            try:
                path.expanduser().open("rb").close()
            except OSError as error:
                raise unreadable(path.expanduser(), error) from error
    for spec in _named(options, FunctionName):
        module, _, name = spec.rpartition(":")
        if names_a_function(spec) and _names_a_file(module):
            tree = _parsed(Path(module))
            if not _may_define(tree, name):
                functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
                raise not_defined(module, "function", name, functions)
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
    texts = [text for value in values for text in (value if isinstance(value, list) else [value])]
    return [text for text in texts if isinstance(text, str)]


def _parsed(path: Path) -> ast.Module:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise no_file(path)
    try:
        return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        raise EnvironmentSetupError(f"{path} can't be imported: {summarize_error(error, path)}") from error


def _class(kind: str, tree: ast.Module) -> ast.ClassDef | None:
    """The class that `kind` names; None if it may exist but is not defined where it can be parsed."""
    module, _, name = kind.rpartition(":")
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if name not in classes:
        if _may_define(tree, name):
            return None
        raise not_defined(module, "class", name, list(classes), f" (environment.kind {kind})")
    return classes[name]


def _check_class(kind: str, found: ast.ClassDef, args: Mapping[str, Any], held_out: int) -> None:
    """Check `args` against the constructor, and `held_out` against the methods of the class."""
    if found.decorator_list or found.keywords:
        return
    own = {node.name: node for node in found.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    known_bases = bool(found.bases) and {_last_name(base) for base in found.bases} <= OWN_BASES
    constructor = own.get("__init__")
    if constructor is not None and not constructor.decorator_list:
        check_arguments(kind, _signature_of(constructor.args), args)
    elif constructor is None and known_bases:
        check_arguments(kind, BASE_SIGNATURE, args)
    if held_out and known_bases and not _may_define(found, "held_out"):
        raise no_held_out(kind, held_out)


def _may_define(tree: ast.AST, name: str) -> bool:
    """Whether any node of this tree may bind `name`."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=bound) | ast.AsyncFunctionDef(name=bound) | ast.ClassDef(name=bound):
                if bound in (name, "__getattr__"):
                    return True
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                if any((it.asname or it.name.partition(".")[0]) in (name, "*") for it in names):
                    return True
            case ast.Name(id=bound, ctx=ast.Store()):
                if bound == name:
                    return True
            case ast.Call(func=ast.Name(id="globals" | "exec" | "setattr")):
                return True
    return False


def _signature_of(arguments: ast.arguments) -> inspect.Signature:
    """The signature of a method with these arguments, without `self`."""
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    some, keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(it.arg, some, default=inspect.Parameter.empty if place < required else None)
        for place, it in enumerate(positional)
    ][1:]
    if arguments.vararg:
        parameters.append(inspect.Parameter(arguments.vararg.arg, inspect.Parameter.VAR_POSITIONAL))
    parameters += [
        inspect.Parameter(it.arg, keyword, default=inspect.Parameter.empty if default is None else None)
        for it, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        parameters.append(inspect.Parameter(arguments.kwarg.arg, inspect.Parameter.VAR_KEYWORD))
    return inspect.Signature(parameters)


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _names_a_file(module: str) -> bool:
    return module.endswith(".py") or "/" in module
