"""From `environment.kind` of the run file to an environment, with a one-line error for everything a user can get wrong."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from pipelinerl.environments.prompts import try_prompt
from pipelinerl.environments.single_turn import SingleTurn
from pipelinerl.environments.user.code import last_line, module_named
from pipelinerl.errors import ConfigError, EnvironmentSetupError, PipelineRLError
from pipelinerl.interfaces import Environment, Tokenizer

BUILT_IN = {
    "gcd": "pipelinerl.environments.tasks.gcd:Gcd",
    "math_words": "pipelinerl.environments.maths.words:MathWords",
    "guess_number": "pipelinerl.environments.tasks.guess_number:GuessNumber",
    "math": "pipelinerl.environments.maths.environment:Maths",
    "countdown": "pipelinerl.environments.tasks.countdown:Countdown",
    "reasoning_gym": "pipelinerl.environments.adapters.reasoning_gym:ReasoningGym",
    "verifiers": "pipelinerl.environments.adapters.verifiers.environment:Verifiers",
    "mixture": "pipelinerl.environments.combine.mixture:Mixture",
    "curriculum": "pipelinerl.environments.combine.difficulty_filter:Curriculum",
    "function": "pipelinerl.environments.user.function:Function",
    "tools": "pipelinerl.environments.chat.tools:Tools",
    "calculator": "pipelinerl.environments.tasks.calculator:Calculator",
    "agent": "pipelinerl.serving.agents.environment:Agent",
}


def make_environment(kind: str, args: Mapping[str, Any], tokenizer: Tokenizer, seed: int) -> Environment:
    """`Class(tokenizer, seed, **args)` of a built-in kind, of `path/to/file.py:Class` or of `package.module:Class`.

    Raises EnvironmentSetupError if there is no such class, if it can't be built, or if it isn't an environment.
    """
    found = find_class(kind)
    _check_methods(kind, found)
    check_arguments(kind, inspect.signature(found), args)
    try:
        environment = cast("Environment", found(tokenizer, seed, **args))
    except PipelineRLError:
        raise
    except Exception as error:
        raise EnvironmentSetupError(f"environment {kind} can't be built: {_built_wrongly(kind, error)}") from error
    if isinstance(environment, SingleTurn):
        _try_first_prompt(environment, tokenizer)
    return environment


def _built_wrongly(kind: str, error: Exception) -> str:
    """One line for what the constructor raised, with the last line of the user's file that took part."""
    file = Path(kind.rpartition(":")[0])
    line = last_line(error, file)
    where = "" if line is None else f" ({file.name}, line {line})"
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"


def no_held_out(kind: str, problems: int) -> ConfigError:
    """What to say of an environment that can't be evaluated, in a run that asks for it."""
    return ConfigError(
        f"evaluation.problems is {problems}, but environment {kind} has no held-out problems: define "
        "`held_out(self, count)` in its class, or set evaluation.problems to 0"
    )


def _try_first_prompt(environment: SingleTurn, tokenizer: Tokenizer) -> None:
    """Raises EnvironmentSetupError if the model's tokenizer or chat template can't do with it."""
    try:
        prompt = environment.prompt(environment.problem(0))
    except Exception:  # noqa: BLE001 - perhaps this problem's alone: rollouts that fail are reported, counted and bounded
        return
    try_prompt(tokenizer, prompt)


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
    module = module_named(module_name)
    found = getattr(module, class_name, None)
    if not inspect.isclass(found):
        classes = [
            name for name, value in vars(module).items() if inspect.isclass(value) and value.__module__ == module.__name__
        ]
        close = get_close_matches(class_name, classes, n=1) or classes[:3]
        hint = f"; it has {', '.join(close)}" if close else ""
        raise EnvironmentSetupError(f"{module_name} has no class {class_name!r}{hint} (environment.kind {kind})")
    return found


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


def check_arguments(kind: str, signature: inspect.Signature, args: Mapping[str, Any]) -> None:
    """Tell a wrong `environment.args` from a TypeError inside the constructor, of this signature (without `self`)."""
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


# ------------------------------------------------------------------------------------------------------------------------
# Of which types `environment.args` must be: a struct says it, and mistakes are told in the run file's words.


Types = TypeVar("Types", bound=msgspec.Struct)


def checked(types: type[Types], **arguments: object) -> Types:
    """The arguments as `types` has them. Raises EnvironmentSetupError that names the first of another type or range."""
    try:
        return msgspec.convert(arguments, types)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        raise EnvironmentSetupError(f"environment.args.{where.rstrip('`')}: {what[:1].lower()}{what[1:]}") from error
