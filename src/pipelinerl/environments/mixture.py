"""Several environments in one run, each with a fixed share of the problems."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any

import msgspec
from pydantic import Field

from pipelinerl.config.schema import Count
from pipelinerl.environments.options import Inner, Options
from pipelinerl.environments.registry import make_inner
from pipelinerl.errors import EnvironmentSetupError
from pipelinerl.interfaces import Environment, GenerationClient, ScoresGroups, Tokenizer
from pipelinerl.types import Problem, Rollout


class Weighted(Inner, frozen=True):
    """An environment, and how many of a cycle's problems it gives."""

    weight: Count = 1


class MixtureOptions(Options, frozen=True):
    environments: Annotated[dict[str, Weighted], Field(min_length=1)]
    """The environments by name: `{words: {kind: math, weight: 3, args: {...}}, digits: {kind: gcd, weight: 1}}`."""

    def model_post_init(self, _: Any) -> None:
        for name in self.environments:
            if not name or "/" in name:
                raise EnvironmentSetupError(f"environment.args.environments: {name!r} can't be a name: it must have no `/`")


class Mixture:
    """Problems of several environments by weight. Shares are exact over each cycle, and no environment skips a problem.

    Problem ids and metric names are prefixed with the environment's name; the metric `NAME/reward` repeats the reward.
    Held-out problems are also mixed by weight; when one environment runs out, the others continue.
    """

    Options = MixtureOptions

    def __init__(self, tokenizer: Tokenizer, seed: int, **args: Any) -> None:
        """Raises EnvironmentSetupError, naming the environment, if one can't be built."""
        parts = MixtureOptions.read(args).environments
        self._seed = seed
        self._names = tuple(parts)
        self.inner: dict[str, Environment] = {
            name: make_inner(f"environment.args.environments.{name}", part.kind, part.args, tokenizer, seed)
            for name, part in parts.items()
        }
        self._counts = [part.weight for part in parts.values()]
        self._cycle = lru_cache(maxsize=2)(self._shuffled)

    def problem(self, index: int) -> Problem:
        """In each cycle every environment gets its share, in an order that depends on the seed and the cycle."""
        cycle, place = divmod(index, sum(self._counts))
        order = self._cycle(cycle)
        part, earlier = order[place], order[:place].count(order[place])
        name = self._names[part]
        return _prefixed(name, self.inner[name].problem(cycle * self._counts[part] + earlier))

    def held_out(self, count: int) -> Sequence[Problem]:
        remaining = {name: iter(environment.held_out(count)) for name, environment in self.inner.items()}
        chosen: list[Problem] = []
        order = [self._names[part] for part in spread(self._counts)]
        while remaining and len(chosen) < count:
            for name in order:
                problem = next(remaining[name], None) if name in remaining else None
                if problem is not None:
                    chosen.append(_prefixed(name, problem))
                else:
                    remaining.pop(name, None)
        return chosen[:count]

    async def rollout(self, problem: Problem, client: GenerationClient) -> Rollout:
        name, inner = _unprefixed(problem)
        rollout = await self.inner[name].rollout(inner, client)
        return _with_prefixed_metrics(name, rollout)

    async def score_group(self, problem: Problem, rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
        name, inner = _unprefixed(problem)
        environment = self.inner[name]
        if not isinstance(environment, ScoresGroups):
            return rollouts
        own = []
        for rollout in rollouts:
            metrics = {key.removeprefix(f"{name}/"): value for key, value in rollout.metrics.items()}
            del metrics["reward"]
            own.append(msgspec.structs.replace(rollout, metrics=metrics))
        return [_with_prefixed_metrics(name, rollout) for rollout in await environment.score_group(inner, own)]

    def _shuffled(self, cycle: int) -> list[int]:
        order = spread(self._counts)
        random.Random(f"mixture/{self._seed}/{cycle}").shuffle(order)
        return order


def spread(counts: Sequence[int]) -> list[int]:
    """The number of the environment at each place of a cycle, spaced as evenly as possible."""
    positions = [((rank + 0.5) / count, part) for part, count in enumerate(counts) for rank in range(count)]
    return [part for _, part in sorted(positions)]


def _prefixed(name: str, problem: Problem) -> Problem:
    return Problem(id=f"{name}/{problem.id}", payload={"environment": name, "problem": problem.payload})


def _unprefixed(problem: Problem) -> tuple[str, Problem]:
    """The name of the environment, and its own problem."""
    name = str(problem.payload["environment"])
    return name, Problem(id=problem.id.removeprefix(f"{name}/"), payload=problem.payload["problem"])


def _with_prefixed_metrics(name: str, rollout: Rollout) -> Rollout:
    metrics = {f"{name}/{key}": value for key, value in {"reward": rollout.reward, **rollout.metrics}.items()}
    return msgspec.structs.replace(rollout, metrics=metrics)
