"""One attempt at a row of an environment of verifiers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipelinerl.environments.verifiers_env.client import MODEL, PolicyClient
from pipelinerl.environments.verifiers_env.loading import Loaded
from pipelinerl.environments.verifiers_env.rubrics import note_errors, prepare_rubrics
from pipelinerl.errors import RolloutError
from pipelinerl.interfaces import GenerationClient
from pipelinerl.types import Rollout


class Player:
    """Plays rows of one environment, any number at a time."""

    def __init__(self, loaded: Loaded, *, template: Mapping[str, Any], threads: bool, drop_raised: bool) -> None:
        """Raises EnvironmentSetupError for rubrics that can't score a rollout by itself."""
        prepare_rubrics(loaded.environment, loaded.name, threads=threads)
        self._name = loaded.name
        self._environment = loaded.environment
        self._template = template
        self._drop_raised = drop_raised

    async def play(self, row: Mapping[str, Any], client: GenerationClient) -> Rollout:
        """Metrics are the rubric's, the conversation's, `reward_errors` (functions that raised) and `prompt_too_long` (1: so
        the rollout ended).

        Raises what a call of the model raised, if the rollout ended with that, and RolloutError for other errors in it.
        """
        policy = PolicyClient(client, self._template)
        raised = note_errors()
        output = await self._environment.run_rollout(dict(row), policy, MODEL, sampling_args={})
        turns = policy.conversation.turns
        if (error := output["error"]) is not None:
            raise policy.failure or RolloutError(f"environment {self._name} ended with {error['error_chain_repr']}")
        if policy.too_long is not None and not turns:
            raise policy.too_long
        for line, of_thread in raised:
            if of_thread:
                raise RolloutError(f"reward function {line} (set environment.args.threads to false)")
            if self._drop_raised:
                raise RolloutError(f"reward function {line}")
        metrics = {
            **policy.conversation.metrics,
            "prompt_too_long": float(policy.too_long is not None),
            "reward_errors": float(len(raised)),
            **(output["metrics"] or {}),
        }
        return Rollout(turns=turns, reward=output["reward"], metrics=metrics)
