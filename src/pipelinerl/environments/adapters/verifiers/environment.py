"""An environment of the package `verifiers` (https://github.com/PrimeIntellect-ai/verifiers) as one of ours."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pipelinerl.environments.data import Split, split, without
from pipelinerl.environments.prompts import has_chat_template
from pipelinerl.environments.registry import checked
from pipelinerl.environments.single_turn import Epochs
from pipelinerl.errors import EnvironmentSetupError, MissingDependencyError
from pipelinerl.interfaces import GenerationClient, Tokenizer
from pipelinerl.types import Problem, Rollout

SAME_PROBLEM = ("prompt", "answer", "info")
"""Rows that have these in common are the same problem: they are what verifiers makes a rollout from."""


class Verifiers:
    """Problems, turns, tools and rewards are those of a `verifiers.Environment`; how the model is sampled is the run's.

    environment   name of an installed one, as for `verifiers.load_environment`
    load          instead of that: `path/to/file.py:load_environment`, a function that returns one
    args          that function's arguments
    held_out      share of the rows that evaluations use and training never sees (by a hash of the row), for environments
                  that have no `eval_dataset`
    template      options of the model's chat template, like `{enable_thinking: false}`
    threads       reward functions that aren't `async` run in threads, while generation goes on. false: in the main thread,
                  which the engine waits for
    drop_raised   a rollout is dropped if one of its reward functions raises. false: that function is worth 0, as verifiers
                  has it
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
        """Raises MissingDependencyError, and EnvironmentSetupError for what can't be loaded, or not be trained on."""
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
        # Here, because verifiers takes seconds to import, and is an extra.
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
        """Every row once an epoch, in an order that depends on the seed and the epoch."""
        return self._training[self._epochs.place(index)]

    def held_out(self, count: int) -> Sequence[Problem]:
        return self._held_out[:count]

    async def rollout(self, problem: Problem, client: GenerationClient) -> Rollout:
        return await self._player.play(problem.payload, client)


def _split(name: str, training: list[Problem], evaluation: list[Problem] | None, share: float) -> Split:
    """No problem is on both sides. Raises EnvironmentSetupError if nothing is left to train on."""
    if evaluation is None:
        return split(training, share, _key)
    unseen = without(training, {_key(problem) for problem in evaluation}, _key).training
    if not unseen:
        raise EnvironmentSetupError(f"all {len(training)} rows of the dataset of {name} are in its eval_dataset, too")
    return Split(unseen, evaluation)


def _key(problem: Problem) -> str:
    row = [problem.payload.get(field) for field in SAME_PROBLEM]
    return msgspec.json.encode(row, order="deterministic").decode()


class _Types(msgspec.Struct, kw_only=True):
    """What a run file's values for these arguments must be."""

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
            "like path/to/file.py:load_environment"
        )
    if not 0 <= types.held_out < 1:
        raise EnvironmentSetupError(f"environment.args.held_out is {types.held_out}; it must be a share below 1")
