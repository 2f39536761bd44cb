"""Environments made of other environments: a mixture by weight, and a filter by difficulty."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import msgspec
from pydantic import Field, Strict

from pipelinerl.config.schema import Share
from pipelinerl.environments.data import ProblemSet, Split, read_rows
from pipelinerl.environments.options import Files, Inner, Options, bounds_of, listed
from pipelinerl.environments.registry import make_inner
from pipelinerl.errors import EnvironmentSetupError
from pipelinerl.interfaces import Environment, GenerationClient, ScoresGroups, Tokenizer
from pipelinerl.types import Problem, Rollout

# ---- several environments in one run, each with a fixed share of the problems

LONGEST_CYCLE = 10_000


class Weighted(Inner, frozen=True):
    """An environment and its relative weight."""

    weight: int | float = 1


class MixtureOptions(Options, frozen=True):
    environments: Annotated[dict[str, Weighted], Field(min_length=1)]
    """The environments by name: `{words: {kind: math, weight: 3, args: {...}}, numbers: {kind: countdown, weight: 1}}`."""

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
        self._counts = whole_weights([part.weight for part in parts.values()])
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
        own = [_with_own_metrics(name, rollout) for rollout in rollouts]
        return [_with_prefixed_metrics(name, rollout) for rollout in await environment.score_group(inner, own)]

    def _shuffled(self, cycle: int) -> list[int]:
        order = spread(self._counts)
        random.Random(f"mixture/{self._seed}/{cycle}").shuffle(order)
        return order


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


def _with_own_metrics(name: str, rollout: Rollout) -> Rollout:
    own = {key.removeprefix(f"{name}/"): value for key, value in rollout.metrics.items()}
    own.pop("reward", None)
    return msgspec.structs.replace(rollout, metrics=own)


# ---- only the problems whose measured pass rate is within bounds

MAX_SEARCHED = 300_000
"""How many problems of an inner environment without epochs are searched for the ids in the file."""


class PassRate(msgspec.Struct, frozen=True):
    """One line of a file of pass rates. Other fields are ignored."""

    id: str
    attempts: int
    passes: int


class DifficultyFilterOptions(Options, frozen=True):
    environment: Inner
    """`{kind: ..., args: {...}}`, the same as in the measurement, including the run's seed."""
    pass_rates: Files
    """Files of lines `{"id": ..., "attempts": ..., "passes": ...}`. Lines with the same id are added up. Problems that were
    not measured are not trained on."""
    pass_rate_between: Annotated[tuple[Share, Share], Strict(False)] = (0.05, 0.95)
    """The lowest and highest pass rate, both included."""

    def model_post_init(self, _: Any) -> None:
        bounds_of("pass_rate_between", self.pass_rate_between)


class DifficultyFilter(ProblemSet):
    """The problems of `environment` whose measured pass rate is within bounds, each once per epoch.

    A group whose attempts all succeed, or all fail, has zero advantage and teaches nothing. Which problems these are depends
    on the model. So pass rates are measured with the model to be trained: `pipelinerl eval --training` writes
    `pass_rates.jsonl`.

    The pass rates come from a file and do not follow the rewards of the run, because `problem` must stay a pure function of
    the index. `actor.online_filter` follows the model: it skips indices.

    Held-out problems are not filtered, so evaluation does not depend on which problems are trained on.
    """

    Options = DifficultyFilterOptions

    def __init__(self, tokenizer: Tokenizer, seed: int, **args: Any) -> None:
        """Raises EnvironmentSetupError if the file is invalid, is for another environment, or leaves no problem."""
        options = DifficultyFilterOptions.read(args)
        low, high = options.pass_rate_between
        names = listed(options.pass_rates)
        measured = read_pass_rates([Path(name).expanduser() for name in names])
        inner = options.environment
        self._inner = make_inner("environment.args.environment", inner.kind, inner.args, tokenizer, seed)
        self.inner = {"": self._inner}
        wanted = {name for name, rate in measured.items() if low <= rate.passes / rate.attempts <= high}
        if not wanted:
            rates = sorted(rate.passes / rate.attempts for rate in measured.values())
            raise EnvironmentSetupError(
                f"none of the {len(rates)} problems in {', '.join(names)} has a pass rate between {low:g} and "
                f"{high:g}: they go from {rates[0]:g} to {rates[-1]:g}"
            )
        # The name is part of the seed of the order, so it keeps the kind's former name.
        super().__init__(Split(self._find(wanted, ", ".join(names)), []), f"curriculum/{seed}")

    def held_out(self, count: int) -> Sequence[Problem]:
        return self._inner.held_out(count)

    async def rollout(self, problem: Problem, client: GenerationClient) -> Rollout:
        return await self._inner.rollout(problem, client)

    async def score_group(self, problem: Problem, rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
        return await self._inner.score_group(problem, rollouts) if isinstance(self._inner, ScoresGroups) else rollouts

    def _find(self, wanted: set[str], where: str) -> list[Problem]:
        """The problems with these ids, in one epoch, or where there are no epochs, among the first `MAX_SEARCHED`."""
        epoch: int | None = getattr(self._inner, "training_count", None)
        found: dict[str, Problem] = {}
        for problem in map(self._inner.problem, range(epoch or MAX_SEARCHED)):
            if problem.id in wanted and found.setdefault(problem.id, problem).payload != problem.payload:
                raise EnvironmentSetupError(f"two different problems have the id {problem.id!r}: rename one of their files")
            if len(found) == len(wanted) and not epoch:
                break
        if missing := wanted - found.keys():
            raise EnvironmentSetupError(
                f"{len(missing)} of the {len(wanted)} problems chosen from {where} are not among the training problems of "
                f"environment.args.environment (for example {min(missing)!r}). Were they measured with other arguments or "
                "another seed?"
            )
        return [found[name] for name in sorted(found)]


def read_pass_rates(paths: Sequence[Path]) -> dict[str, PassRate]:
    """The pass rates by problem id. Raises EnvironmentSetupError, naming file and line, for an invalid one."""
    measured: dict[str, PassRate] = {}
    for path in paths:
        for number, row in read_rows(path):
            try:
                rate = msgspec.convert(row, PassRate)
            except msgspec.ValidationError as error:
                raise EnvironmentSetupError(
                    f'{path}:{number} is not a pass rate, {{"id": ..., "attempts": ..., "passes": ...}}: {error}'
                ) from error
            if not 0 <= rate.passes <= rate.attempts or rate.attempts < 1:
                raise EnvironmentSetupError(
                    f"{path}:{number}: {rate.passes} passes in {rate.attempts} attempts is impossible"
                )
            before = measured.get(rate.id, PassRate(rate.id, 0, 0))
            measured[rate.id] = PassRate(rate.id, before.attempts + rate.attempts, before.passes + rate.passes)
    if not measured:
        raise EnvironmentSetupError(f"{', '.join(map(str, paths))} has no pass rates")
    return measured
