"""Several environments in one run, each with a fixed share of the problems."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from pipelinerl.environments.combine.nested import Inner, make_inner
from pipelinerl.errors import EnvironmentSetupError
from pipelinerl.interfaces import Environment, GenerationClient, Tokenizer
from pipelinerl.types import Problem, Rollout

LONGEST_CYCLE = 10_000


class Weighted(Inner, frozen=True, forbid_unknown_fields=True):
    """An environment and its relative weight."""

    weight: int | float = 1


class Place(NamedTuple):
    """Problem number `rank` within the cycle of environment number `part`."""

    part: int
    rank: int


class Mixture:
    """Problems of several environments by weight. Shares are exact over each cycle, and no environment skips a problem.

    environments    by name: `{words: {kind: math, weight: 3, args: {...}}, numbers: {kind: countdown, weight: 1}}`

    Problem ids and metric names are prefixed with the environment's name; the metric `NAME/reward` repeats the reward.
    Held-out problems are also mixed by weight; when one environment runs out, the others continue.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int, *, environments: Mapping[str, Any]) -> None:
        """Raises EnvironmentSetupError, naming the environment, if one can't be built."""
        parts = _parts(environments)
        self._seed = seed
        self._names = tuple(parts)
        self._environments: dict[str, Environment] = {
            name: make_inner(f"environment.args.environments.{name}", part, tokenizer, seed) for name, part in parts.items()
        }
        self._counts = whole_weights([part.weight for part in parts.values()])
        self._cycle = lru_cache(maxsize=2)(self._shuffled)

    def problem(self, index: int) -> Problem:
        """In each cycle every environment gets its share, in an order that depends on the seed and the cycle."""
        cycle, place = divmod(index, sum(self._counts))
        part, rank = self._cycle(cycle)[place]
        name = self._names[part]
        return _prefixed(name, self._environments[name].problem(cycle * self._counts[part] + rank))

    def held_out(self, count: int) -> Sequence[Problem]:
        remaining = {name: iter(environment.held_out(count)) for name, environment in self._environments.items()}
        chosen: list[Problem] = []
        order = [self._names[place.part] for place in spread(self._counts)]
        while remaining and len(chosen) < count:
            for name in order:
                problem = next(remaining[name], None) if name in remaining else None
                if problem is not None:
                    chosen.append(_prefixed(name, problem))
                else:
                    remaining.pop(name, None)
        return chosen[:count]

    async def rollout(self, problem: Problem, client: GenerationClient) -> Rollout:
        name = str(problem.payload["environment"])
        inner = Problem(id=problem.id.removeprefix(f"{name}/"), payload=problem.payload["problem"])
        rollout = await self._environments[name].rollout(inner, client)
        metrics = {f"{name}/{key}": value for key, value in {"reward": rollout.reward, **rollout.metrics}.items()}
        return msgspec.structs.replace(rollout, metrics=metrics)

    def _shuffled(self, cycle: int) -> list[Place]:
        places = spread(self._counts)
        order = [place.part for place in places]
        random.Random(f"mixture/{self._seed}/{cycle}").shuffle(order)
        return _ranked(order)


def whole_weights(weights: Sequence[int | float]) -> list[int]:
    """The smallest whole numbers in the same proportion: the number of problems of each environment per cycle.

    Raises EnvironmentSetupError for weights that aren't positive, or if a cycle would be longer than LONGEST_CYCLE.
    """
    if not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise EnvironmentSetupError(f"the weights of a mixture must be greater than 0, but are {list(weights)}")
    exact = [Fraction(str(weight)) for weight in weights]
    common = math.lcm(*(weight.denominator for weight in exact))
    counts = [int(weight * common) for weight in exact]
    counts = [count // math.gcd(*counts) for count in counts]
    if sum(counts) > LONGEST_CYCLE:
        raise EnvironmentSetupError(
            f"the weights of a mixture are {list(weights)}: as whole numbers they add up to over {LONGEST_CYCLE}; round them"
        )
    return counts


def spread(counts: Sequence[int]) -> list[Place]:
    """One cycle in which the problems of each part are spaced as evenly as possible."""
    positions = [((rank + 0.5) / count, part) for part, count in enumerate(counts) for rank in range(count)]
    return _ranked([part for _, part in sorted(positions)])


def _ranked(order: Sequence[int]) -> list[Place]:
    seen: dict[int, int] = {}
    places = []
    for part in order:
        rank = seen.get(part, 0)
        places.append(Place(part, rank))
        seen[part] = rank + 1
    return places


def _prefixed(name: str, problem: Problem) -> Problem:
    return Problem(id=f"{name}/{problem.id}", payload={"environment": name, "problem": problem.payload})


def _parts(environments: Mapping[str, Any]) -> dict[str, Weighted]:
    try:
        parts = msgspec.convert(environments, dict[str, Weighted])
    except msgspec.ValidationError as error:
        raise EnvironmentSetupError(
            f"environment.args.environments must be `{{NAME: {{kind: ..., weight: ..., args: {{...}}}}, ...}}`: {error}"
        ) from error
    if not parts:
        raise EnvironmentSetupError("environment.args.environments is empty: a mixture needs at least one")
    for name in parts:
        if not name or "/" in name:
            raise EnvironmentSetupError(f"environment.args.environments: {name!r} can't be a name: it must have no `/`")
    return parts
