"""Prompts of the study: the first request of a rollout, exactly as the actor would submit it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import msgspec
import numpy as np

from pipelinerl.actor.client import EngineClient, RolloutClient, derive_seed
from pipelinerl.actor.deadline import CodeAlarm
from pipelinerl.actor.rollouts import Failure, TimeLimits, attempt, problem_for
from pipelinerl.config.schema import ActorConfig
from pipelinerl.errors import EnvironmentSetupError, RunDirectoryError, UserError
from pipelinerl.files import read_json_lines
from pipelinerl.interfaces import Engine, Environment, Tokenizer
from pipelinerl.types import GenerationRequest, SamplingParams

_POLL_S = 0.0005


class Prompt(msgspec.Struct, frozen=True):
    """The engine request for one attempt at problem number `problem` of the study (0, 1, ...)."""

    problem: int
    request: GenerationRequest


class History(msgspec.Struct, frozen=True):
    """Facts from a run's recorded rollouts: the first problem index never started, and the completion lengths."""

    next_index: int
    lengths: tuple[int, ...]

    def length_quantile(self, q: float) -> int:
        """The shortest recorded length that a fraction q of the completions do not exceed."""
        return int(np.quantile(self.lengths, q, method="inverted_cdf"))


class _Completion(msgspec.Struct):
    token_ids: list[int]


class _Turn(msgspec.Struct):
    completion: _Completion


class _Rollout(msgspec.Struct):
    turns: list[_Turn]


class _Group(msgspec.Struct):
    index: int
    rollouts: list[_Rollout]


def read_history(run_dir: Path) -> History:
    """Raises RunDirectoryError if there are no readable records, and UserError for a task of several turns."""
    path = run_dir / "rollouts" / "rollouts.jsonl"
    try:
        groups = read_json_lines(path, _Group)
    except OSError as error:
        raise RunDirectoryError(f"can't read {path}: {error.strerror}; give the directory of a run that trained") from error
    except ValueError as error:
        raise RunDirectoryError(f"this is not a record of rollouts: {error}") from error
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        raise RunDirectoryError(f"{path} holds no rollout; give the directory of a run that trained")
    if any(len(rollout.turns) > 1 for rollout in rollouts):
        raise UserError(
            f"the rollouts in {run_dir} have several turns; this study switches weights within one completion, so give "
            "a run on a task of a single turn"
        )
    lengths = tuple(len(turn.completion.token_ids) for rollout in rollouts for turn in rollout.turns)
    return History(max(group.index for group in groups) + 1, lengths)


async def make_prompts(
    environment: Environment,
    tokenizer: Tokenizer,
    actor: ActorConfig,
    *,
    first_index: int,
    problems: int,
    attempts: int,
    max_tokens: int,
    stop_token_ids: tuple[int, ...],
    seed: int,
) -> list[Prompt]:
    """`attempts` requests for each of `problems` training problems from `first_index` on, each with its own seed.

    Raises EnvironmentSetupError if the environment fails or ends a rollout before its first request.
    """
    limits = TimeLimits(actor.rollout_timeout_s, CodeAlarm(actor.code_timeout_s))
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=actor.temperature,
        top_p=actor.top_p,
        top_k=actor.top_k,
        stop_token_ids=stop_token_ids,
    )
    prompts = []
    for problem in range(problems):
        for number in range(attempts):
            recorder = _RequestRecorder()
            client = RolloutClient(
                EngineClient(cast("Engine", recorder)),
                tokenizer,
                sampling,
                name=f"p{problem}.a{number}",
                seed=derive_seed(seed, "study", problem, number),
            )
            request = await _first_request(environment, first_index + problem, client, limits, recorder)
            # The study's token limit overrides the environment's.
            request = msgspec.structs.replace(
                request, sampling=msgspec.structs.replace(request.sampling, max_tokens=max_tokens)
            )
            prompts.append(Prompt(problem, request))
    return prompts


class _RequestRecorder:
    """A fake engine that records requests and never completes them."""

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []

    def submit(self, request: GenerationRequest) -> None:
        self.requests.append(request)

    def cancel(self, request_id: str) -> None:
        """Nothing to cancel."""


async def _first_request(
    environment: Environment, index: int, client: RolloutClient, limits: TimeLimits, recorder: _RequestRecorder
) -> GenerationRequest:
    """Start a rollout and cancel it at its first request."""
    made = problem_for(environment, index, limits)
    if isinstance(made, Failure):
        raise EnvironmentSetupError(f"the environment made no problem: {made.message}")
    task = asyncio.create_task(attempt(environment, made[0], client, limits))
    await asyncio.sleep(0)
    while not recorder.requests and not task.done():
        await asyncio.sleep(_POLL_S)
    task.cancel()
    await asyncio.wait({task})
    if recorder.requests:
        return recorder.requests[0]
    outcome = task.result()
    why = outcome.message if isinstance(outcome, Failure) else "its rollout ended without a request"
    raise EnvironmentSetupError(f"the environment requested no completion for problem {index}: {why}")
