"""What the study takes from a run: prompts as the actor would submit them, facts on its rollouts, the steps to study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median_low

import msgspec
import numpy as np

from pipelinerl.actor.client import RolloutClient, derive_seed
from pipelinerl.actor.deadline import CodeAlarm
from pipelinerl.actor.rollouts import Failure, TimeLimits, attempt, problem_for
from pipelinerl.config.schema import ActorConfig
from pipelinerl.errors import EnvironmentSetupError, RunDirectoryError, UserError
from pipelinerl.interfaces import Environment, Tokenizer
from pipelinerl.launch.tryout import Answers
from pipelinerl.report.series import read_groups
from pipelinerl.types import Completion, GenerationRequest, SamplingParams


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


def read_history(run_dir: Path) -> History:
    """Raises RunDirectoryError if there are no readable records, and UserError for a task of several turns."""
    groups = read_groups(run_dir)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        raise RunDirectoryError(f"{run_dir} holds no rollout; give the directory of a run that trained")
    if any(len(rollout.turns) > 1 for rollout in rollouts):
        raise UserError(
            f"the rollouts in {run_dir} have several turns; this study switches weights within one completion, so give "
            "a run on a task of a single turn"
        )
    lengths = tuple(rollout.tokens for rollout in rollouts if rollout.turns)
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
            recorder = _Recorder(stop_token_ids[0])
            client = RolloutClient(
                recorder, tokenizer, sampling, name=f"p{problem}.a{number}", seed=derive_seed(seed, "study", problem, number)
            )
            request = await _first_request(environment, first_index + problem, client, limits, recorder)
            # The study's token limit overrides the environment's.
            request = msgspec.structs.replace(
                request, sampling=msgspec.structs.replace(request.sampling, max_tokens=max_tokens)
            )
            prompts.append(Prompt(problem, request))
    return prompts


class _Recorder(Answers):
    """Ends every completion at once, and records the requests."""

    def __init__(self, end_id: int) -> None:
        super().__init__(end_id)
        self.requests: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> Completion:
        self.requests.append(request)
        return await super().generate(request)


async def _first_request(
    environment: Environment, index: int, client: RolloutClient, limits: TimeLimits, recorder: _Recorder
) -> GenerationRequest:
    made = problem_for(environment, index, limits)
    if isinstance(made, Failure):
        raise EnvironmentSetupError(f"the environment made no problem: {made.message}")
    outcome = await attempt(environment, made[0], client, limits)
    if recorder.requests:
        return recorder.requests[0]
    why = outcome.message if isinstance(outcome, Failure) else "its rollout ended without a request"
    raise EnvironmentSetupError(f"the environment requested no completion for problem {index}: {why}")


# ---- where to start


NAMED_STARTS = ("early", "middle", "late")


def possible_starts(run_dir: Path, versions: Sequence[int], lag: int) -> Sequence[int]:
    """Every C of the ascending `versions` from which C, C+1, ..., C+lag were saved. Raises RunDirectoryError without any."""
    saved = set(versions)
    found = [version for version in versions if saved.issuperset(range(version, version + lag + 1))]
    if not found:
        longest = _longest_run(versions)
        smaller = f", or choose --lag {longest - 1} or less" if longest > 2 else ""
        raise RunDirectoryError(
            f"{run_dir} has no {lag + 1} consecutive checkpoints (at most {longest}); train with "
            f"--trainer.checkpoint_every 1 --trainer.keep_checkpoints N, where N is the number of steps{smaller}"
        )
    return found


def choose_starts(wanted: Sequence[str], possible: Sequence[int], lag: int) -> Mapping[str, int]:
    """Name -> version C. A name is `early`, `middle`, `late` (of the ascending `possible` versions), or a version number.

    If several names mean the same version, only the first is kept. Raises UserError for any other text or version.
    """
    chosen: dict[str, int] = {}
    for name in wanted:
        if name in NAMED_STARTS:
            version = {"early": possible[0], "middle": median_low(possible), "late": possible[-1]}[name]
        elif name.isdecimal() and int(name) in possible:
            version = int(name)
        else:
            raise UserError(
                f"--from {name}: give {', '.join(NAMED_STARTS)}, or versions from which {lag} more were saved "
                f"({possible[0]} to {possible[-1]} here)"
            )
        if version not in chosen.values():
            chosen[name] = version
    if not chosen:
        raise UserError(f"--from names no version; give {', '.join(NAMED_STARTS)}, or versions")
    return chosen


def _longest_run(versions: Sequence[int]) -> int:
    """Length of the longest run of consecutive numbers in the ascending `versions`."""
    breaks = [i for i in range(1, len(versions)) if versions[i] != versions[i - 1] + 1]
    return max(end - start for start, end in pairwise([0, *breaks, len(versions)]))
