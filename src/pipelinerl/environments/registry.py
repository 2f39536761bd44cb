"""Finds, checks and builds the environment of `environment.kind` and `environment.args`; every user mistake is one line."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from pipelinerl.environments.data import names_a_dataset, unreadable
from pipelinerl.environments.options import BASE_SIGNATURE, FileName, FunctionName, Inner, Options, check_arguments
from pipelinerl.environments.prompts import try_prompt
from pipelinerl.environments.single_turn import JudgedTurn
from pipelinerl.environments.user.code import import_module_or_file, last_line, names_a_function, no_file, summarize_error
from pipelinerl.errors import ConfigError, EnvironmentSetupError, PipelineRLError, UserError
from pipelinerl.interfaces import Environment, Tokenizer

BUILT_IN = {
    "gcd": "pipelinerl.environments.tasks.gcd:Gcd",
    "math": "pipelinerl.environments.maths.environment:Maths",
    "guess_number": "pipelinerl.environments.tasks.guess_number:GuessNumber",
    "countdown": "pipelinerl.environments.tasks.countdown:Countdown",
    "reasoning_gym": "pipelinerl.environments.adapters.reasoning_gym:ReasoningGym",
    "verifiers": "pipelinerl.environments.adapters.verifiers:Verifiers",
    "mixture": "pipelinerl.environments.combine:Mixture",
    "difficulty_filter": "pipelinerl.environments.combine:DifficultyFilter",
    "function": "pipelinerl.environments.user.function:Function",
    "tools": "pipelinerl.environments.user.function:Tools",
    "calculator": "pipelinerl.environments.tasks.calculator:Calculator",
    "agent": "pipelinerl.serving.agents.environment:Agent",
}
RENAMED = {"curriculum": "`difficulty_filter`", "math_words": "`math` with `judge: numbers` in environment.args"}
"""What former names of built-in kinds are called now, for the error message."""
OWN_BASES = {"SingleTurn", "ToolTask"}
"""Base classes whose constructor is known to be `BASE_SIGNATURE` and whose `held_out` returns no problems."""


def make_environment(kind: str, args: Mapping[str, Any], tokenizer: Tokenizer, seed: int) -> Environment:
    """`Class(tokenizer, seed, **args)` for a built-in kind, `path/to/file.py:Class` or `package.module:Class`.

    Raises EnvironmentSetupError if the class does not exist, can't be built, or is not an environment.
    """
    found = find_class(kind)
    _check_methods(kind, found)
    check_arguments(kind, _constructor(found), args)
    try:
        environment = cast("Environment", found(tokenizer, seed, **args))
    except PipelineRLError:
        raise
    except Exception as error:
        raise EnvironmentSetupError(f"environment {kind} can't be built: {_constructor_error(kind, error)}") from error
    if isinstance(environment, JudgedTurn):
        _try_first_prompt(environment, tokenizer)
    return environment


def make_inner(where: str, inner: Inner, tokenizer: Tokenizer, seed: int) -> Environment:
    """Raises what `make_environment` raises, with the message prefixed by `where`."""
    try:
        return make_environment(inner.kind, inner.args, tokenizer, seed)
    except PipelineRLError as error:
        raise type(error)(f"{where}: {error}") from error


def _constructor_error(kind: str, error: Exception) -> str:
    """What the constructor raised, in one line, with the last line of the user's file in the traceback."""
    file = Path(kind.rpartition(":")[0])
    line = last_line(error, file)
    where = "" if line is None else f" ({file.name}, line {line})"
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"


def no_held_out(kind: str, problems: int) -> ConfigError:
    """The error for a run that evaluates an environment without held-out problems."""
    return ConfigError(
        f"evaluation.problems is {problems}, but environment {kind} has no held-out problems: define "
        "`held_out(self, count)` in its class, or set evaluation.problems to 0"
    )


def _try_first_prompt(environment: JudgedTurn, tokenizer: Tokenizer) -> None:
    """Raises EnvironmentSetupError if the model's tokenizer or chat template can't encode the first prompt."""
    try:
        prompt = environment.prompt(environment.problem(0))
    except Exception:  # noqa: BLE001 - may affect this problem only; failed rollouts are counted and bounded
        return
    try_prompt(tokenizer, prompt)


def find_class(kind: str) -> type:
    """The class that `kind` names, without checking its methods. Raises EnvironmentSetupError if there is none."""
    module_name, colon, class_name = BUILT_IN.get(kind, kind).rpartition(":")
    if not colon or not module_name or not class_name:
        close = get_close_matches(kind, BUILT_IN, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        if kind in RENAMED:
            hint = f" It is now called {RENAMED[kind]}."
        raise EnvironmentSetupError(
            f"environment.kind {kind!r} is unknown.{hint} It is one of {', '.join(BUILT_IN)}, `path/to/file.py:ClassName` "
            "or `package.module:ClassName`"
        )
    module = import_module_or_file(module_name)
    found = getattr(module, class_name, None)
    if not inspect.isclass(found):
        classes = [
            name for name, value in vars(module).items() if inspect.isclass(value) and value.__module__ == module.__name__
        ]
        close = get_close_matches(class_name, classes, n=1) or classes[:3]
        hint = f"; it has {', '.join(close)}" if close else ""
        raise EnvironmentSetupError(f"{module_name} has no class {class_name!r}{hint} (environment.kind {kind})")
    return found


def _options(found: type) -> type[Options] | None:
    """The struct of the constructor's arguments; None if the class, or a subclass, has an ordinary constructor."""
    owner = next(base for base in found.__mro__ if "__init__" in vars(base))
    options = vars(owner).get("Options")
    return options if inspect.isclass(options) and issubclass(options, Options) else None


def _constructor(found: type) -> inspect.Signature:
    options = _options(found)
    return inspect.signature(found) if options is None else options.signature()


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


# ---- static checks, made before any process starts and without running user code
# User files are parsed, not imported. What parsing can't determine (names from `import *`, base classes in other files,
# modules by dotted name) is left to `make_environment`.


def check_statically(kind: str, args: Mapping[str, Any], *, held_out: int = 0) -> None:
    """Raises EnvironmentSetupError for files, classes, functions and arguments that are certainly wrong.

    Raises ConfigError if `held_out` is not 0 and the class certainly has no held-out problems.
    """
    module, colon, name = kind.rpartition(":")
    if not colon or not module or not name:
        found_class = find_class(kind)
        check_arguments(kind, _constructor(found_class), args)
        if (options_type := _options(found_class)) is not None:
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
            _check_function(_parsed(Path(module)), module, name)
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
        near = get_close_matches(name, classes, n=1) or list(classes)[:3]
        hint = f"; it has {', '.join(near)}" if near else ""
        raise EnvironmentSetupError(f"{module} has no class {name!r}{hint} (environment.kind {kind})")
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


def _check_function(tree: ast.Module, module: str, name: str) -> None:
    if _may_define(tree, name):
        return
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    near = get_close_matches(name, functions, n=1) or functions[:3]
    raise EnvironmentSetupError(f"{module} has no function {name!r}" + (f"; it has {', '.join(near)}" if near else ""))


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
