"""Several environments in one run, each with its share of the problems."""

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
    """An environment and its weight among the others."""

    weight: int | float = 1


class Place(NamedTuple):
    """The problem number `rank` (of those in one cycle) of the environment number `part`."""

    part: int
    rank: int


class Mixture:
    """Problems of several environments by weight: the shares are exact over each cycle, and no environment skips a problem.

    environments    by name: `{words: {kind: math, weight: 3, args: {...}}, numbers: {kind: countdown, weight: 1}}`

    A problem's id begins with the name of its environment, and so does each metric of a rollout; its reward is also there
    as the metric `NAME/reward`. Held-out problems come from each environment by weight too; where one has no more, the
    others go on.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int, *, environments: Mapping[str, Any]) -> None:
        """Raises EnvironmentSetupError, naming the environment, for what can't be built."""
        parts = _parts(environments)
        self._seed = seed
        self._names = tuple(parts)
        self._environments: dict[str, Environment] = {
            name: make_inner(f"environment.args.environments.{name}", part, tokenizer, seed) for name, part in parts.items()
        }
        self._counts = whole_weights([part.weight for part in parts.values()])
        self._cycle = lru_cache(maxsize=2)(self._shuffled)

    def problem(self, index: int) -> Problem:
        """In each cycle every environment has its turns, in an order that depends on the seed and the cycle."""
        cycle, place = divmod(index, sum(self._counts))
        part, rank = self._cycle(cycle)[place]
        name = self._names[part]
        return _outer(name, self._environments[name].problem(cycle * self._counts[part] + rank))

    def held_out(self, count: int) -> Sequence[Problem]:
        left = {name: iter(environment.held_out(count)) for name, environment in self._environments.items()}
        chosen: list[Problem] = []
        order = [self._names[place.part] for place in spread(self._counts)]
        while left and len(chosen) < count:
            for name in order:
                problem = next(left[name], None) if name in left else None
                if problem is not None:
                    chosen.append(_outer(name, problem))
                else:
                    left.pop(name, None)
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
    """The smallest whole numbers in the same proportion: how many problems of each there are in a cycle.

    Raises EnvironmentSetupError for weights that aren't positive, or make a cycle longer than LONGEST_CYCLE.
    """
    if not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise EnvironmentSetupError(f"the weights of a mixture must be greater than 0, but are {list(weights)}")
    exact = [Fraction(str(weight)) for weight in weights]
    common = math.lcm(*(weight.denominator for weight in exact))
    counts = [int(weight * common) for weight in exact]
    counts = [count // math.gcd(*counts) for count in counts]
    if sum(counts) > LONGEST_CYCLE:
        raise EnvironmentSetupError(
            f"the weights of a mixture are {list(weights)}: as whole numbers more than {LONGEST_CYCLE} in all; round them"
        )
    return counts


def spread(counts: Sequence[int]) -> list[Place]:
    """One cycle in which each part's turns lie as far apart as can be."""
    turns = [((turn + 0.5) / count, part) for part, count in enumerate(counts) for turn in range(count)]
    return _ranked([part for _, part in sorted(turns)])


def _ranked(order: Sequence[int]) -> list[Place]:
    seen: dict[int, int] = {}
    places = []
    for part in order:
        rank = seen.get(part, 0)
        places.append(Place(part, rank))
        seen[part] = rank + 1
    return places


def _outer(name: str, problem: Problem) -> Problem:
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
