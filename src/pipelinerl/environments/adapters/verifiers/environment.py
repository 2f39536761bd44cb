"""Adapter for environments of the package `verifiers` (https://github.com/PrimeIntellect-ai/verifiers)."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pipelinerl.environments.data import Split, hold_out, split
from pipelinerl.environments.prompts import has_chat_template
from pipelinerl.environments.registry import checked
from pipelinerl.environments.single_turn import Epochs
from pipelinerl.errors import EnvironmentSetupError, MissingDependencyError
from pipelinerl.interfaces import GenerationClient, Tokenizer
from pipelinerl.types import Problem, Rollout

SAME_PROBLEM = ("prompt", "answer", "info")
"""Rows with equal values in these fields are the same problem: verifiers builds a rollout from them."""


class Verifiers:
    """Problems, turns, tools and rewards come from a `verifiers.Environment`; sampling settings come from the run.

    environment   name of an installed environment, as for `verifiers.load_environment`
    load          instead of `environment`: `path/to/file.py:load_environment`, a function that returns an environment
    args          arguments of the function that loads the environment
    held_out      share of the rows (by a hash of the row) for evaluation, never used in training; only for environments
                  without an `eval_dataset`
    template      options of the model's chat template, such as `{enable_thinking: false}`
    threads       run reward functions that aren't `async` in threads, while generation continues. false: in the main thread,
                  which blocks the engine
    drop_raised   drop a rollout if one of its reward functions raises an error. false: that function counts as 0, as in
                  verifiers
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int,
        *,
        environment: str = "",
        load: str = "",
        args: Mapping[str, Any] | None = None,
        held_out: float = 0.1,
        template: Mapping[str, Any] | None = None,
        threads: bool = True,
        drop_raised: bool = False,
    ) -> None:
        """Raises MissingDependencyError, and EnvironmentSetupError if the environment can't be loaded or trained on."""
        types = checked(
            _Types,
            environment=environment,
            load=load,
            args=args,
            held_out=held_out,
            template=template,
            threads=threads,
            drop_raised=drop_raised,
        )
        _check(types)
        if importlib.util.find_spec("verifiers") is None:
            raise MissingDependencyError("verifiers is not installed: pip install 'pipelinerl[verifiers]'")
        # Imported here because verifiers takes seconds to import and is an optional dependency.
        from pipelinerl.environments.adapters.verifiers.loading import load_environment  # noqa: PLC0415
        from pipelinerl.environments.adapters.verifiers.playing import Player  # noqa: PLC0415

        loaded = load_environment(environment, load, args or {})
        self._training, self._held_out = _split(loaded.name, loaded.training, loaded.evaluation, held_out)
        self._epochs = Epochs(len(self._training), f"verifiers/{seed}")
        self._player = Player(loaded, template=template or {}, threads=threads, drop_raised=drop_raised)
        if not has_chat_template(tokenizer) and not isinstance(self._training[0].payload["prompt"], str):
            raise EnvironmentSetupError(
                f"the prompts of environment {loaded.name} are chats, but the model's tokenizer has no chat template"
            )

    def problem(self, index: int) -> Problem:
        """Each row once per epoch, in an order that depends on the seed and the epoch."""
        return self._training[self._epochs.place(index)]

    def held_out(self, count: int) -> Sequence[Problem]:
        return self._held_out[:count]

    async def rollout(self, problem: Problem, client: GenerationClient) -> Rollout:
        return await self._player.play(problem.payload, client)


def _split(name: str, training: list[Problem], evaluation: list[Problem] | None, share: float) -> Split:
    """Split without overlap. Raises EnvironmentSetupError if nothing is left to train on."""
    if evaluation is None:
        return split(training, share, _key)
    remaining = hold_out(training, {_key(problem) for problem in evaluation}, _key).training
    if not remaining:
        raise EnvironmentSetupError(f"all {len(training)} rows of the dataset of {name} are also in its eval_dataset")
    return Split(remaining, evaluation)


def _key(problem: Problem) -> str:
    row = [problem.payload.get(field) for field in SAME_PROBLEM]
    return msgspec.json.encode(row, order="deterministic").decode()


class _Types(msgspec.Struct, kw_only=True):
    """Types of these arguments in a run file."""

    environment: str
    load: str
    args: dict[str, Any] | None
    held_out: float
    template: dict[str, Any] | None
    threads: bool
    drop_raised: bool


def _check(types: _Types) -> None:
    if bool(types.environment) == bool(types.load):
        raise EnvironmentSetupError(
            "environment.args needs either `environment`, the name of an installed environment of verifiers, or `load`, "
            "such as path/to/file.py:load_environment"
        )
    if not 0 <= types.held_out < 1:
        raise EnvironmentSetupError(f"environment.args.held_out is {types.held_out}; it must be a share below 1")
