"""Finds, checks and builds the environment of `environment.kind` and `environment.args`; every user mistake is one line."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, cast

from pipelinerl.environments.prompts import encode_or_refuse, wrong_chat
from pipelinerl.environments.single_turn import SingleTurn, Task
from pipelinerl.errors import EnvironmentSetupError, PipelineRLError
from pipelinerl.interfaces import Environment, Tokenizer

if TYPE_CHECKING:
    from pipelinerl.config.schema import RunConfig
    from pipelinerl.environments.options import Options

BUILT_IN = {
    "gcd": "pipelinerl.environments.tasks.gcd:Gcd",
    "math": "pipelinerl.environments.tasks.maths:Maths",
    "reasoning_gym": "pipelinerl.environments.tasks.reasoning_gym:ReasoningGym",
    "verifiers": "pipelinerl.serving.agents.verifiers:Verifiers",
    "openenv": "pipelinerl.environments.tasks.openenv:OpenEnv",
    "mixture": "pipelinerl.environments.mixture:Mixture",
    "function": "pipelinerl.environments.user.function:Function",
    "tools": "pipelinerl.environments.user.function:Tools",
    "agent": "pipelinerl.serving.agents.environment:AgentEnvironment",
}


def make_environment(kind: str, args: Mapping[str, Any], tokenizer: Tokenizer, seed: int) -> Environment:
    """`Class(tokenizer, seed, **args)` for a built-in kind, `path/to/file.py:Class` or `package.module:Class`.

    Raises EnvironmentSetupError if the class does not exist, can't be built, or is not an environment.
    """
    environment = build(kind, args, tokenizer, seed)
    if isinstance(environment, SingleTurn):
        try:
            prompt = environment.prompt(environment.problem(0))
        except Exception:  # noqa: BLE001, S110 - may affect this problem only; failed rollouts are counted and bounded
            pass
        else:
            if not isinstance(cast("object", prompt), str | Sequence):
                what = type(prompt).__name__
                raise EnvironmentSetupError(f"the first problem's prompt is a {what}, not a text or chat messages")
            if not isinstance(prompt, str) and (wrong := wrong_chat(prompt)):
                raise EnvironmentSetupError(f"the first problem's prompt has {wrong}")
            encode_or_refuse(tokenizer, prompt, environment.template_options)
    # The rewards of this package are quick and safe.
    module = getattr(getattr(environment, "reward", None), "__module__", None) or "pipelinerl"
    if isinstance(environment, Task) and environment.isolate_reward and module.partition(".")[0] != "pipelinerl":
        from pipelinerl.environments.user.pool import reward_pool  # noqa: PLC0415 - only for a class of the user

        environment.reward_pool = reward_pool(environment, kind, args, tokenizer, seed)
    return environment


def build(kind: str, args: Mapping[str, Any], tokenizer: Tokenizer, seed: int) -> Environment:
    """What `make_environment` returns, without trying it and without a pool for its reward. Raises the same."""
    check_arguments(kind, args)
    try:
        return cast("Environment", find_class(kind)(tokenizer, seed, **args))
    except PipelineRLError:
        raise
    except Exception as error:
        from pipelinerl.user_code import describe  # noqa: PLC0415 - only for an error

        raise EnvironmentSetupError(f"environment {kind} can't be built: {describe(error, kind)}") from error


def make_inner(where: str, kind: str, args: Mapping[str, Any], tokenizer: Tokenizer, seed: int) -> Environment:
    """Raises what `make_environment` raises, with the message prefixed by `where`."""
    try:
        return make_environment(kind, args, tokenizer, seed)
    except PipelineRLError as error:
        raise type(error)(f"{where}: {error}") from error


def notes_of(environment: Environment, config: RunConfig) -> tuple[str, ...]:
    """Which limit on a turn is lower than `actor.max_tokens`, and how many steps an epoch is, if the environment says it."""
    notes: tuple[str, ...] = ()
    asked, default = config.actor.max_tokens, type(config.actor).model_fields["max_tokens"].default
    for name, part in {config.environment.kind: environment, **getattr(environment, "inner", {})}.items():
        limit = getattr(part, "max_tokens", None) or asked
        note = f"actor.max_tokens is {asked}, but {name} limits a turn to {limit} tokens"
        notes += (note,) if limit < asked != default else ()
    count: int | None = getattr(environment, "training_count", None)
    if count is None:
        return notes
    steps = count * config.actor.group_size / config.trainer.batch_size
    epoch = f"an epoch is {steps:.4g} steps (trainer.steps: {config.trainer.steps})"
    return (*notes, f"data: {count} training problems: {epoch}")


RENAMED = {
    "math_words": "It is now called `math` with `judge: numbers` in environment.args.",
    "calculator": "It is now an example, `examples/calculator.py:Calculator`, which needs `expressions.py` beside it.",
    "countdown": "It is now an example, `examples/countdown.py:Countdown`, which needs `expressions.py` beside it.",
    "guess_number": "It is now an example, `examples/guess_number.py:GuessNumber`.",
    "difficulty_filter": "Choose the lines of the data file by their pass rates, or set `actor.online_filter`.",
}
"""What to use instead of former kinds."""


def find_class(kind: str) -> type:
    """The class that `kind` names. Raises EnvironmentSetupError if there is none, or it is not an environment."""
    if kind in BUILT_IN:
        module_name, _, class_name = BUILT_IN[kind].partition(":")
        return cast("type", getattr(importlib.import_module(module_name), class_name))
    if ":" in kind:
        from pipelinerl.user_code import find  # noqa: PLC0415 - not for a built-in one

        found: type = find(kind, "class", inspect.isclass, f" (environment.kind {kind})")
        for name in ("problem(self, index)", "held_out(self, count)", "rollout(self, problem, client)"):
            if not callable(getattr(found, name.partition("(")[0], None)):
                raise EnvironmentSetupError(f"environment {kind} has no method `{name}`; see `Environment` in interfaces.py")
        return found
    close = get_close_matches(kind, BUILT_IN, n=1)
    hint = f" {RENAMED[kind]}" if kind in RENAMED else f" Did you mean {close[0]!r}?" if close else ""
    raise EnvironmentSetupError(
        f"environment.kind {kind!r} is unknown.{hint} It is one of {', '.join(BUILT_IN)}, `path/to/file.py:ClassName` "
        "or `package.module:ClassName`"
    )


def check_arguments(kind: str, args: Mapping[str, Any]) -> None:
    """Raises EnvironmentSetupError if `args` don't fit the constructor of the class that `kind` names.

    Checked before the call, so that a TypeError raised inside the constructor is not mistaken for wrong arguments.
    """
    found = find_class(kind)
    owner = next(base for base in found.__mro__ if "__init__" in vars(base))
    options = vars(owner).get("Options")
    if inspect.isclass(options) and hasattr(options, "refuse_without_effect"):
        cast("type[Options]", options).read(args)
        return
    signature = inspect.signature(found)
    try:
        signature.bind(None, 0, **args)
    except TypeError as error:
        own = list(signature.parameters.values())[2:]
        required = [it.name for it in own if it.default is it.empty and it.kind < it.VAR_KEYWORD]
        takes = ", ".join(f"{it.name} (required)" if it.name in required else it.name for it in own) or "nothing"
        raise EnvironmentSetupError(
            f"environment.args don't fit {kind}: {error}; after `tokenizer` and `seed` it takes {takes}"
        ) from error
