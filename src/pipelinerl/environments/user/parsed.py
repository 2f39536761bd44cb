"""Checks a user's file by parsing it, without running it. Raises EnvironmentSetupError for what is certainly wrong.

What parsing can't determine (names from `import *`, base classes in other files) is left to `make_environment`.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipelinerl.environments.options import BASE_SIGNATURE, check_arguments
from pipelinerl.environments.registry import no_held_out
from pipelinerl.environments.user.code import names_a_function, no_file, not_defined, summarize_error
from pipelinerl.errors import EnvironmentSetupError

OWN_BASES = {"SingleTurn", "ToolTask"}
"""Base classes whose constructor is known to be `BASE_SIGNATURE` and whose `held_out` returns no problems."""


def check_class(kind: str, args: Mapping[str, Any], held_out: int) -> None:
    """Check that the file of `kind` defines the class, `args` against its constructor, and `held_out` against its methods.

    Nothing is checked of a class that may exist but is not defined where it can be parsed.
    """
    module, _, name = kind.rpartition(":")
    tree = _parsed(Path(module))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if name in classes:
        _check_class(kind, classes[name], args, held_out)
    elif not _may_define(tree, name):
        raise not_defined(module, "class", name, list(classes), f" (environment.kind {kind})")


def check_function(spec: str) -> None:
    """Check that the file of `path/to/file.py:function` defines the function."""
    module, _, name = spec.rpartition(":")
    if not names_a_function(spec):  # it is the name of a field
        return
    tree = _parsed(Path(module))
    if not _may_define(tree, name):
        functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        raise not_defined(module, "function", name, functions)


def _parsed(path: Path) -> ast.Module:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise no_file(path)
    try:
        return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        raise EnvironmentSetupError(f"{path} can't be imported: {summarize_error(error, path)}") from error


def is_async(spec: str) -> bool:
    """Whether `file.py:function` or `package.module:function` is `async def`, by its source. False if that is not known."""
    module, _, name = spec.rpartition(":")
    try:
        if module.endswith(".py") or "/" in module:
            path = Path(module)
        else:
            found = find_spec(module)
            path = Path(found.origin if found and found.origin else "")
        tree = _parsed(path)
    except (EnvironmentSetupError, ImportError, ValueError):  # whoever calls the function says what is wrong
        return False
    return any(isinstance(node, ast.AsyncFunctionDef) and node.name == name for node in tree.body)


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
