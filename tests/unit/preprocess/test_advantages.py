"""Advantages against their formulas, and the expected gradient of turn rewards against the exact one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import product
from pathlib import Path
from statistics import fmean

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.config.schema import PreprocessConfig
from pipelinerl.errors import EnvironmentSetupError, RolloutError
from pipelinerl.preprocess.advantages import (
    STD_EPSILON,
    Baseline,
    advantages,
    group_advantages,
    make_advantages,
    minimum_variance,
    turn_advantages,
)
from pipelinerl.types import Group, Rollout
from tests.unit.group_parts import group, turn

BASELINES: list[Baseline] = ["group_mean", "leave_one_out"]


REWARDS = st.lists(st.floats(-100, 100), min_size=2, max_size=20)


@given(REWARDS)
def test_advantages_equal_their_formula(rewards: list[float]) -> None:
    mean = [reward - sum(rewards) / len(rewards) for reward in rewards]
    assert advantages(rewards, baseline="group_mean") == pytest.approx(mean, abs=1e-10)
    others = [[*rewards[:i], *rewards[i + 1 :]] for i in range(len(rewards))]
    left_out = [reward - sum(rest) / len(rest) for reward, rest in zip(rewards, others, strict=True)]
    assert advantages(rewards, baseline="leave_one_out") == pytest.approx(left_out, abs=1e-10)


@given(REWARDS, st.sampled_from(BASELINES))
def test_normalised_advantages_are_divided_by_the_population_deviation(rewards: list[float], baseline: Baseline) -> None:
    plain = np.array(advantages(rewards, baseline=baseline))
    normalised = advantages(rewards, baseline=baseline, normalize_std=True)
    assert normalised == pytest.approx(list(plain / (np.std(rewards) + STD_EPSILON)), rel=1e-6, abs=1e-6)


@given(st.floats(-1e30, 1e30), st.integers(1, 64), st.sampled_from(BASELINES), st.booleans())
def test_identical_rewards_give_exactly_zero(reward: float, size: int, baseline: Baseline, normalize: bool) -> None:
    assert advantages([reward] * size, baseline=baseline, normalize_std=normalize) == [0.0] * size


@pytest.mark.parametrize("baseline", BASELINES)
def test_the_largest_rewards_allowed_give_finite_advantages_and_others_are_refused(baseline: Baseline) -> None:
    for normalize in (False, True):
        values = advantages([1e30, -1e30], baseline=baseline, normalize_std=normalize)
        assert math.inf > values[0] == -values[1] > 0
    for reward in (math.nan, math.inf, -math.inf, 1e31, -1e31):
        with pytest.raises(ValueError, match="not a finite number"):
            advantages([0.0, reward, 1.0], baseline=baseline)


EARNED = st.lists(st.lists(st.floats(-100, 100), min_size=1, max_size=4), min_size=2, max_size=6)


@given(EARNED, st.sampled_from(BASELINES), st.booleans())
def test_advantages_of_turns_equal_their_formula(earned: list[list[float]], baseline: Baseline, normalize: bool) -> None:
    exact = [[Fraction(reward) for reward in rewards] for rewards in earned]
    found = turn_advantages(exact, baseline=baseline, normalize_std=normalize)
    returns = [[sum(rewards[at:]) for at in range(len(rewards))] for rewards in exact]
    scale = 1.0 if baseline == "leave_one_out" else (len(earned) - 1) / len(earned)
    scale /= STD_EPSILON + float(np.std([float(of_one[0]) for of_one in returns])) if normalize else 1.0
    for i, of_one in enumerate(returns):
        others = [other for j, other in enumerate(returns) if j != i]
        for at, value in enumerate(of_one):
            reached = [other[at] for other in others if len(other) > at]
            before = sum(exact[i][:at])
            rest = reached or [other[0] - before for other in others]
            expected = value - sum(rest) / Fraction(len(rest))
            assert found[i][at] == pytest.approx(scale * float(expected), rel=1e-9, abs=1e-12)


# An episode of one or two turns: the policy chooses whether there is a second one. A turn is a choice between two actions
# with the log-odds `THETA`. Action 1 of the first turn goes on. The rewards are those of the turns.
THETA = (0.4, -0.7)
EPISODES: dict[tuple[int, ...], tuple[float, ...]] = {(0,): (0.3,), (1, 0): (0.1, -1.0), (1, 1): (0.1, 2.0)}


def probability(actions: tuple[int, ...]) -> float:
    chances = [1 / (1 + math.exp(-theta)) for theta in THETA]
    return math.prod(chance if action else 1 - chance for action, chance in zip(actions, chances, strict=False))


def expected_gradient(advantages_of: Callable[[Sequence[Sequence[float]]], list[list[float]]], size: int) -> list[float]:
    """The expected sum of A_it * d log pi(a_it) / d theta_t over all groups of `size` episodes."""
    gradient = [0.0, 0.0]
    for episodes in product(EPISODES, repeat=size):
        chance = math.prod(map(probability, episodes))
        found = advantages_of([EPISODES[actions] for actions in episodes])
        for actions, values in zip(episodes, found, strict=True):
            for at, (action, value) in enumerate(zip(actions, values, strict=True)):
                gradient[at] += chance * value * (action - 1 / (1 + math.exp(-THETA[at])))
    return gradient


def natural(earned: Sequence[Sequence[float]]) -> list[list[float]]:
    """The return of a turn less its mean over all rollouts that have the turn, this one included."""
    returns = [[sum(rewards[turn:]) for turn in range(len(rewards))] for rewards in earned]
    means = [fmean(of_one[turn] for of_one in returns if len(of_one) > turn) for turn in range(max(map(len, returns)))]
    return [[value - means[turn] for turn, value in enumerate(of_one)] for of_one in returns]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("baseline", BASELINES)
def test_the_gradient_of_turn_rewards_is_unbiased_where_the_policy_ends_episodes(size: int, baseline: Baseline) -> None:
    def exactly(earned: Sequence[Sequence[float]]) -> list[list[float]]:
        return turn_advantages([[Fraction(reward) for reward in rewards] for rewards in earned], baseline=baseline)

    def returns_alone(earned: Sequence[Sequence[float]]) -> list[list[float]]:
        return [[sum(rewards[turn:]) for turn in range(len(rewards))] for rewards in earned]

    exact = expected_gradient(returns_alone, 1)  # the policy gradient theorem
    scale = size if baseline == "leave_one_out" else size - 1
    assert expected_gradient(exactly, size) == pytest.approx([scale * part for part in exact], rel=1e-12)
    first, second = (found / part for found, part in zip(expected_gradient(natural, size), exact, strict=True))
    assert second < 0.9 * first  # the usual form gives the second turn too little


def with_rewards(*rewards: float | None, total: float, name: str = "a") -> Rollout:
    """A rollout of turns with one, two, ... tokens that earned these rewards."""
    turns = [
        msgspec.structs.replace(turn((9, number), range(number + 1), [-0.1] * (number + 1), 0), reward=reward)
        for number, reward in enumerate(rewards)
    ]
    return Rollout(id=name, reward=total, turns=tuple(turns))


def test_tokens_have_the_advantage_of_their_turn_and_the_last_turn_has_what_no_turn_earned() -> None:
    made = group(9, [with_rewards(1.0, None, total=1.5), with_rewards(None, None, total=0.5)])
    assert group_advantages(made, baseline="leave_one_out") == [(1.0, 0.0, 0.0), (-1.0, 0.0, 0.0)]
    without = group(9, [with_rewards(None, None, total=1.5), with_rewards(None, total=0.5)])
    assert group_advantages(without, baseline="leave_one_out") == [1.0, -1.0]


def credit_of(folder: Path, body: str) -> Callable[[Group], object]:
    file = folder / "credit.py"
    file.write_text(f"def credit(group):\n    {body}\n")
    return make_advantages(PreprocessConfig(advantage=f"{file}:credit"))


PAIR = group(9, [with_rewards(None, None, total=1.0, name="a"), with_rewards(None, total=3.0, name="b")])


def test_a_function_of_the_user_gives_numbers_for_rollouts_or_tokens(tmp_path: Path) -> None:
    assert credit_of(tmp_path, "return [one.reward for one in group.rollouts]")(PAIR) == [1.0, 3.0]
    assert make_advantages(PreprocessConfig(advantage="none"))(PAIR) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [1.0]", "one per rollout"),
        ("return [[1.0, 2.0], 0.0]", "2 numbers; the rollout has 3 sampled tokens"),
        ("return [float('nan'), 0.0]", "rollout 'a'"),
        ("return [[1.0, None, 2.0], 0.0]", "None"),
        ("return 1 / 0", "credit.py, line 2: ZeroDivisionError"),
    ],
)
def test_what_is_no_advantage_is_an_error(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        credit_of(tmp_path, body)(PAIR)
    with pytest.raises(EnvironmentSetupError, match="no function 'other'"):
        make_advantages(PreprocessConfig(advantage=f"{tmp_path / 'credit.py'}:other"))


@given(st.lists(st.tuples(st.floats(-10, 10), st.lists(st.floats(-5, 0), max_size=4)), min_size=1, max_size=5))
def test_the_baseline_of_smallest_variance_weights_rewards_by_squared_norms(made: list[tuple[float, list[float]]]) -> None:
    rollouts = [
        Rollout(id=str(i), reward=reward, turns=(turn((9,), range(len(logprobs)), logprobs, 0),))
        for i, (reward, logprobs) in enumerate(made)
    ]
    found = minimum_variance(group(9, rollouts))
    norms = [sum((1 - math.exp(logprob)) ** 2 for logprob in logprobs) for _, logprobs in made]
    for i, (reward, _) in enumerate(made):
        others = [(norms[j], made[j][0]) for j in range(len(made)) if j != i]
        total = sum(norm for norm, _ in others)
        plain = fmean([other for _, other in others] or [reward])
        baseline = sum(norm * other for norm, other in others) / total if total else plain
        assert found[i] == pytest.approx(reward - baseline, rel=1e-9, abs=1e-9)


@given(st.floats(-1e6, 1e6), st.lists(st.lists(st.floats(-5, 0), max_size=4), min_size=1, max_size=6))
def test_equal_rewards_have_no_advantage_over_the_baseline_of_smallest_variance(
    reward: float, made: list[list[float]]
) -> None:
    rollouts = [
        Rollout(id=str(i), reward=reward, turns=(turn((9,), range(len(logprobs)), logprobs, 0),))
        for i, logprobs in enumerate(made)
    ]
    assert minimum_variance(group(9, rollouts)) == [0.0] * len(made)
