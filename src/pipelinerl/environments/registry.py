"""Finds, checks and builds the environment of `environment.kind` and `environment.args`; every user mistake is one line."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from pipelinerl.environments.prompts import encode_prompt
from pipelinerl.environments.single_turn import JudgedTurn, Task
from pipelinerl.errors import EnvironmentSetupError, PipelineRLError
from pipelinerl.interfaces import Environment, Tokenizer

if TYPE_CHECKING:
    from pipelinerl.config.schema import RunConfig
    from pipelinerl.environments.options import Inner, Options

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


def make_environment(kind: str, args: Mapping[str, Any], tokenizer: Tokenizer, seed: int) -> Environment:
    """`Class(tokenizer, seed, **args)` for a built-in kind, `path/to/file.py:Class` or `package.module:Class`.

    Raises EnvironmentSetupError if the class does not exist, can't be built, or is not an environment.
    """
    environment = build(kind, args, tokenizer, seed)
    if isinstance(environment, JudgedTurn):
        _try_first_prompt(environment, tokenizer)
    # The rewards of this package are quick and safe.
    module = getattr(getattr(environment, "reward", None), "__module__", None) or "pipelinerl"
    if isinstance(environment, Task) and environment.isolate_reward and module.partition(".")[0] != "pipelinerl":
        from pipelinerl.environments.user.pool import RewardPool  # noqa: PLC0415 - only for a class of the user

        environment.reward_pool = RewardPool(environment, kind, args, tokenizer, seed)
    return environment


def build(kind: str, args: Mapping[str, Any], tokenizer: Tokenizer, seed: int) -> Environment:
    """What `make_environment` returns, without trying it and without a pool for its reward. Raises the same."""
    found = find_class(kind)
    try:
        constructor_of(found).bind(tokenizer, seed, **args)
    except TypeError:
        from pipelinerl.environments.options import check_arguments  # noqa: PLC0415 - only for an error

        check_arguments(kind, constructor_of(found), args)
    try:
        return cast("Environment", found(tokenizer, seed, **args))
    except PipelineRLError:
        raise
    except Exception as error:
        from pipelinerl.environments.user.code import describe  # noqa: PLC0415 - only for an error

        raise EnvironmentSetupError(f"environment {kind} can't be built: {describe(error, kind)}") from error


def make_inner(where: str, inner: Inner, tokenizer: Tokenizer, seed: int) -> Environment:
    """Raises what `make_environment` raises, with the message prefixed by `where`."""
    try:
        return make_environment(inner.kind, inner.args, tokenizer, seed)
    except PipelineRLError as error:
        raise type(error)(f"{where}: {error}") from error


def notes_of(environment: Environment, config: RunConfig) -> tuple[str, ...]:
    """How many steps an epoch is, if the environment says it, and what a user should know of its rewards."""
    notes: tuple[str, ...] = getattr(environment, "reward_notes", Task.reward_notes)
    asked, default = config.actor.max_tokens, type(config.actor).model_fields["max_tokens"].default
    for name, part in {config.environment.kind: environment, **getattr(environment, "inner", {})}.items():
        limit = getattr(part, "max_tokens", None) or asked
        said = f"actor.max_tokens is {asked}, but {name} limits a turn to {limit} tokens"
        notes += (said,) if limit < asked != default else ()
    count: int | None = getattr(environment, "training_count", None)
    if count is None:
        return notes
    steps = count * config.actor.group_size / config.trainer.batch_size
    epoch = f"an epoch is {steps:.4g} steps (trainer.steps: {config.trainer.steps})"
    return (*notes, f"data: {count} training problems: {epoch}")


def _try_first_prompt(environment: JudgedTurn, tokenizer: Tokenizer) -> None:
    """Raises EnvironmentSetupError if the model's tokenizer or chat template can't encode the first prompt."""
    with suppress(Exception):  # it is tried again, to say what is wrong
        prompt = environment.prompt(environment.problem(0))
        if isinstance(prompt, str) and encode_prompt(tokenizer, prompt):
            return
    from pipelinerl.environments.questions import try_first_prompt  # noqa: PLC0415 - for chats, and for an error

    try_first_prompt(environment, tokenizer)


def find_class(kind: str) -> type:
    """The class that `kind` names. Raises EnvironmentSetupError if there is none, or it is not an environment."""
    if kind in BUILT_IN:
        module_name, _, class_name = BUILT_IN[kind].partition(":")
        return cast("type", getattr(importlib.import_module(module_name), class_name))
    module_name, _, class_name = kind.rpartition(":")
    from pipelinerl.environments.user.code import find_user_class, unknown_kind  # noqa: PLC0415 - not for a built-in one

    if not module_name or not class_name:
        raise unknown_kind(kind, BUILT_IN)
    return find_user_class(module_name, class_name, kind)


def options_of(found: type) -> type[Options] | None:
    """The struct of the constructor's arguments; None if the class, or a subclass, has an ordinary constructor."""
    owner = next(base for base in found.__mro__ if "__init__" in vars(base))
    options = vars(owner).get("Options")
    is_struct = inspect.isclass(options) and hasattr(options, "refuse_without_effect")
    return cast("type[Options]", options) if is_struct else None


def constructor_of(found: type) -> inspect.Signature:
    options = options_of(found)
    return inspect.signature(found) if options is None else options.signature()
