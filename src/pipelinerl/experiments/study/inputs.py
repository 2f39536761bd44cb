"""What the study takes from a run: the prompts and lengths of its rollouts, and the steps to study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median_low

import msgspec
import numpy as np

from pipelinerl.actor.client import derive_seed
from pipelinerl.errors import RunDirectoryError, UserError
from pipelinerl.report.series import read_groups
from pipelinerl.types import GenerationRequest, SamplingParams


class StudyPrompt(msgspec.Struct, frozen=True):
    """The engine request for one attempt at problem number `problem` of the study (0, 1, ...)."""

    problem: int
    request: GenerationRequest


class RunHistory(msgspec.Struct, frozen=True):
    """From a run's recorded rollouts: the prompts of each group, the latest group first, and the lengths of completions."""

    prompts: tuple[tuple[tuple[int, ...], ...], ...]
    lengths: tuple[int, ...]

    def length_quantile(self, q: float) -> int:
        """The shortest recorded length that a fraction q of the completions do not exceed."""
        return int(np.quantile(self.lengths, q, method="inverted_cdf"))


def read_history(run_dir: Path) -> RunHistory:
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
    latest = sorted(groups, key=lambda group: -group.index)
    prompts = (tuple(turn.prompt_ids for one in group.rollouts for turn in one.turns) for group in latest)
    lengths = tuple(rollout.tokens for rollout in rollouts if rollout.turns)
    return RunHistory(tuple(ids for ids in prompts if ids), lengths)


def make_prompts(
    history: RunHistory, sampling: SamplingParams, *, problems: int, attempts: int, seed: int
) -> list[StudyPrompt]:
    """`attempts` requests for each of the run's latest `problems`, each with its own seed."""
    return [
        StudyPrompt(
            problem,
            GenerationRequest(
                id=f"p{problem}.a{number}",
                prompt_ids=prompts[number % len(prompts)],
                sampling=msgspec.structs.replace(sampling, seed=derive_seed(seed, "study", problem, number)),
            ),
        )
        for problem, prompts in enumerate(history.prompts[:problems])
        for number in range(attempts)
    ]


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
