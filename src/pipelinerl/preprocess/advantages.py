"""The advantages of a group's rollouts: one number for all tokens of a rollout, or one for each sampled token. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import Literal

from pipelinerl.config.schema import PreprocessConfig, is_function
from pipelinerl.errors import RolloutError
from pipelinerl.types import Group, finite

MAX_REWARD = 1e30
"""Rewards of a larger magnitude are rejected: the loss uses float32, whose largest number is 3e38."""

STD_EPSILON = 1e-6
"""Added to the standard deviation before dividing by it, so that tiny differences in reward are not amplified."""

Baseline = Literal["group_mean", "leave_one_out"]
Credit = float | tuple[float, ...]
"""The advantage of a rollout's tokens: one number for all, or one for each sampled token, over all turns in order."""
Advantages = Callable[[Group], Sequence[Credit]]
"""The credit of each rollout of a group, in order."""


def make_advantages(config: PreprocessConfig) -> Advantages:
    """What `preprocess.advantage` names. Raises EnvironmentSetupError if it is a function that can't be loaded."""
    if config.advantage == "none":
        return lambda group: [0.0] * len(group.rollouts)
    if is_function(config.advantage):
        from pipelinerl.user_code import find_function  # noqa: PLC0415 - few runs have one

        return partial(_users, function=find_function(config.advantage), name=config.advantage)
    baseline: Baseline = "leave_one_out" if config.advantage == "leave_one_out" else "group_mean"
    return partial(group_advantages, baseline=baseline, normalize_std=config.normalize_std)


def group_advantages(group: Group, *, baseline: Baseline, normalize_std: bool = False) -> list[Credit]:
    """The advantages of rewards, or those of turns if any turn of the group has a reward of its own.

    What the turns of a rollout have not earned of its reward belongs to its last turn. Raises ValueError as `advantages`.
    """
    if all(turn.reward is None for rollout in group.rollouts for turn in rollout.turns):
        rewards = [rollout.reward for rollout in group.rollouts]
        return list(advantages(rewards, baseline=baseline, normalize_std=normalize_std))
    earned = []
    for rollout in group.rollouts:
        turns = [Fraction(_checked(turn.reward or 0.0)) for turn in rollout.turns] or [Fraction()]
        turns[-1] += Fraction(_checked(rollout.reward)) - sum(turns)
        earned.append(turns)
    found = turn_advantages(earned, baseline=baseline, normalize_std=normalize_std)
    return [
        tuple(value for turn, value in zip(rollout.turns, values, strict=False) for _ in turn.completion.token_ids)
        for rollout, values in zip(group.rollouts, found, strict=True)
    ]


def advantages(rewards: Sequence[float], *, baseline: Baseline, normalize_std: bool = False) -> list[float]:
    """The advantage of each of a group's K rewards; 0 for a group of one.

    `group_mean`: R_i - mean(R), as in the paper. `leave_one_out`: R_i - mean of the others, which does not depend on R_i.
    With `normalize_std`, they are divided by the rewards' population standard deviation plus `STD_EPSILON`. Sums are
    exact (rational arithmetic): a reward that equals its baseline gets exactly 0.0, which the filters rely on.

    Raises ValueError for a reward that is not finite or beyond `MAX_REWARD`.
    """
    earned = [[Fraction(_checked(reward))] for reward in rewards]
    return [value for (value,) in turn_advantages(earned, baseline=baseline, normalize_std=normalize_std)]


def turn_advantages(
    earned: Sequence[Sequence[Fraction]], *, baseline: Baseline, normalize_std: bool = False
) -> list[list[float]]:
    """The advantage of each turn of K rollouts, of which turn t of rollout i earned `earned[i][t]`; 0 for a group of one.

        G_it = earned[i][t] + earned[i][t + 1] + ...                   the return from turn t on
        b_it = mean of G_jt over the other rollouts j that have a turn t
        A_it = s (G_it - b_it),  s = 1 (`leave_one_out`) or (K - 1) / K (`group_mean`)

    If no other rollout has a turn t, b_it is the mean reward of the others less what rollout i had earned before t. Neither
    baseline depends on what rollout i does from turn t on, and s is the same everywhere, so the expected gradient is s times
    the exact one. The mean over all rollouts with a turn t, i included, would scale turn t by (n - 1) / n with their number
    n. This number depends on the policy where it decides how long an episode is, and so that gradient is biased.
    """
    size = len(earned)
    returns = [[sum(rewards[turn:], Fraction()) for turn in range(len(rewards))] for rewards in earned]
    longest = max(map(len, returns), default=0)
    with_turn = [[of_one[turn] for of_one in returns if len(of_one) > turn] for turn in range(longest)]
    totals = [(sum(values, Fraction()), len(values)) for values in with_turn]
    factor = Fraction(max(0, size - 1), max(1, size)) if baseline == "group_mean" else Fraction(size > 1)
    found: list[list[Fraction]] = []
    for of_one in returns:
        others = (totals[0][0] - of_one[0]) / max(1, size - 1)
        values = []
        for turn, value in enumerate(of_one):
            total, count = totals[turn]
            mean = (total - value) / (count - 1) if count > 1 else others - (of_one[0] - value)
            values.append((value - mean) * factor)
        found.append(values)
    if not normalize_std:
        return [list(map(float, values)) for values in found]
    mean = totals[0][0] / size if size else Fraction()
    deviation = math.hypot(*(float(of_one[0] - mean) for of_one in returns)) / math.sqrt(max(1, size))
    return [[float(value) / (STD_EPSILON + deviation) for value in values] for values in found]


def minimum_variance(group: Group) -> list[float]:
    """R_i less the baseline of the others with the smallest variance: the mean of R_j, weighted by |grad log mu(y_j)|^2.

    The on-policy case of VCPO's baseline (arXiv 2602.17616), which also has the squared importance ratios; these are not
    known before the step. A gradient's squared norm is taken to be the sum of (1 - mu)^2 over its tokens, the square of the
    sampled token's entry of the gradient with respect to the logits (after Li et al., arXiv 2602.07078). Unlike theirs, the
    baseline leaves out rollout i, so that the gradient stays unbiased. For `preprocess.advantage:
    pipelinerl.preprocess.advantages:minimum_variance`. 0 for a group of one.
    """
    norms = [
        sum((1 - math.exp(min(0.0, logprob))) ** 2 for turn in rollout.turns for logprob in turn.completion.logprobs)
        for rollout in group.rollouts
    ]
    rewards = [_checked(rollout.reward) for rollout in group.rollouts]
    found = []
    for i, reward in enumerate(rewards):
        others = [j for j in range(len(rewards)) if j != i]
        total = sum(norms[j] for j in others)
        weights = [norms[j] / total if total else 1 / len(others) for j in others]
        found.append(float(sum(w * (reward - rewards[j]) for w, j in zip(weights, others, strict=True))))
    return found


def _checked(reward: float) -> float:
    if not abs(reward) <= MAX_REWARD:  # true for NaN too
        raise ValueError(f"reward {reward} is not a finite number between -{MAX_REWARD:g} and {MAX_REWARD:g}")
    return reward


def _users(group: Group, *, function: Callable[[Group], object], name: str) -> list[Credit]:
    """What a function of the user returns. Raises RolloutError if it raises, or returns something else."""
    try:
        returned = function(group)
    except Exception as error:
        from pipelinerl.user_code import describe  # noqa: PLC0415 - only for an error

        raise RolloutError(f"preprocess.advantage: {describe(error, name)}") from error
    if not isinstance(returned, Sequence) or len(returned) != len(group.rollouts):
        raise RolloutError(f"preprocess.advantage: {name} did not return a list of {len(group.rollouts)}, one per rollout")
    found: list[Credit] = []
    for rollout, credit in zip(group.rollouts, returned, strict=True):
        what = f"preprocess.advantage: the result of {name} for rollout {rollout.id!r}"
        if not isinstance(credit, Sequence):
            found.append(finite(credit, what, "a number, or one per sampled token"))
            continue
        tokens = sum(len(turn.completion.token_ids) for turn in rollout.turns)
        if len(credit) != tokens:
            raise RolloutError(f"{what} has {len(credit)} numbers; the rollout has {tokens} sampled tokens")
        found.append(tuple(finite(value, what) for value in credit))
    return found
