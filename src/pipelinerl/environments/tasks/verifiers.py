"""Environments of the package `verifiers` (https://github.com/PrimeIntellect-ai/verifiers), unmodified.

Their prompts, turns, tools and rubrics are used, with exact token ids. `verifiers_rollouts` imports verifiers, which takes
seconds, so it is imported when an environment is built.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from pipelinerl.config.schema import ShareBelowOne
from pipelinerl.environments.chat.tool_use import require_chat
from pipelinerl.environments.data import ProblemSet, canonical, split
from pipelinerl.environments.options import Arguments, Options
from pipelinerl.environments.prompts import check_template_options
from pipelinerl.errors import EnvironmentSetupError
from pipelinerl.extras import require
from pipelinerl.interfaces import GenerationClient, Tokenizer
from pipelinerl.types import Problem, Rollout

SAME_PROBLEM = ("prompt", "answer", "info")
"""Rows with equal values in these fields are the same problem: verifiers builds a rollout from them."""


class VerifiersOptions(Options, frozen=True):
    environment: str = ""
    """Name of an installed environment, as for `verifiers.load_environment`."""
    load: str = ""
    """Instead of `environment`: a function that returns an environment, such as `path/to/file.py:load_environment`."""
    args: Arguments | None = None
    """Arguments of the function that loads the environment."""
    held_out: ShareBelowOne = 0.1
    """Share of the rows (by a hash of the row) for evaluation, never used in training; only for environments without an
    `eval_dataset`."""
    template_options: Arguments | None = None
    """Options of the model's chat template, such as `{enable_thinking: false}`."""
    threads: bool = True
    """Run reward functions that aren't `async` in threads, while generation continues. false: in the main thread, which
    blocks the engine."""

    def model_post_init(self, _: Any) -> None:
        if bool(self.environment) == bool(self.load):
            raise EnvironmentSetupError(
                "environment.args needs either `environment`, the name of an installed environment of verifiers, or `load`, "
                "such as path/to/file.py:load_environment"
            )


class Verifiers(ProblemSet):
    """Problems, turns, tools and rewards come from a `verifiers.Environment`; sampling settings come from the run."""

    Options = VerifiersOptions

    def __init__(self, tokenizer: Tokenizer, seed: int, **args: Any) -> None:
        """Raises MissingDependencyError, and EnvironmentSetupError if the environment can't be loaded or trained on."""
        options = VerifiersOptions.read(args)
        require("verifiers", "environment.kind verifiers")
        require_chat(tokenizer, "environment.kind verifiers")
        # Imported here because verifiers takes seconds to import and is an optional dependency.
        from pipelinerl.environments.tasks.verifiers_rollouts import load_environment, play, prepare_rubrics  # noqa: PLC0415

        loaded = load_environment(options.environment, options.load, options.args or {})
        if loaded.evaluation is not None:
            options.refuse_without_effect(f"environment {loaded.name} has an `eval_dataset`", "held_out")
        held_out = options.held_out if loaded.evaluation is None else loaded.evaluation
        parts = split(loaded.training, held_out, _key, f"the dataset of environment {loaded.name}")
        super().__init__(parts, f"verifiers/{seed}")
        template_options = check_template_options(tokenizer, options.template_options)
        prepare_rubrics(loaded.environment, loaded.name, threads=options.threads)
        self._play = partial(play, loaded=loaded, template_options=template_options)

    async def rollout(self, problem: Problem, client: GenerationClient) -> Rollout:
        return await self._play(problem.payload, client)


def _key(problem: Problem) -> str:
    return canonical([problem.payload.get(field) for field in SAME_PROBLEM])
