"""The reward of an answer: what one user function returns, or the weighted sum of several.

A function is called in a process of the pool. An `async def` function, such as a judge behind an API, runs in the event loop
of the generation process instead, where many of its calls can wait at the same time.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from pipelinerl.environments.single_turn import Judgement
from pipelinerl.environments.user.code import (
    CALLED_AS,
    TOTAL,
    Signature,
    describe,
    described,
    find_function,
    finite_number,
    is_away,
    refusal,
    retried,
    score_of,
    split_signature,
    try_out,
)
from pipelinerl.environments.user.pool import FunctionPool, Limits
from pipelinerl.errors import EnvironmentSetupError, RolloutError


class Functions:
    """Calls user functions by name: in processes with limits, or in this one if they are `async def` or not `isolate`d."""

    def __init__(
        self,
        specs: dict[str, str],
        rewards: Mapping[str, Signature],
        *,
        isolate: bool,
        workers: int,
        concurrency: int,
        limits: Limits,
        retries: int = 0,
    ) -> None:
        """`rewards`: the signatures of those that may have another trainer's. Raises EnvironmentSetupError."""
        self._specs, self._concurrency, self._timeout_s = dict(specs), concurrency, limits.timeout_s
        self._retries = retries
        self._pool = FunctionPool(specs if isolate else {}, rewards=rewards, workers=workers, limits=limits)
        found = try_out(self._pool.describe(), 2 * limits.start_timeout_s, "its start") if isolate else {}
        own = [name for name in specs if not isolate or found[name][0]]
        self._own = {name: find_function(specs[name], allow_async=True, reward=rewards.get(name)) for name in own}
        found |= {name: described(function) for name, function in self._own.items()}
        self.notes = tuple(f"reward {specs[name]}: called {CALLED_AS[one]}" for name, (_, one) in found.items() if one)
        """The functions that are called as another trainer calls them."""
        if len(own) == len(specs):
            self._pool.close()
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    @property
    def any_async(self) -> bool:
        return any(map(inspect.iscoroutinefunction, self._own.values()))

    @property
    def any_pooled(self) -> bool:
        return self._own.keys() != self._specs.keys()

    def check_signature(self, name: str, *arguments: Any) -> bool:
        """Check that an `async def` function takes these arguments. Returns False for another function.

        Such a function isn't tried: a call may cost money, and what it opens belongs to the event loop that it runs in.
        Raises EnvironmentSetupError.
        """
        function = self._own.get(name)
        if not inspect.iscoroutinefunction(function):
            return False
        if wrong := refusal(inspect.signature(function), self._specs[name], *arguments):
            raise EnvironmentSetupError(wrong)
        return True

    async def call(self, name: str, *arguments: Any) -> Any:
        """What the function returns; called again if a server that it asks is away. Raises as `FunctionPool.call`."""
        return await retried(partial(self._call, name, *arguments), self._retries)

    async def _call(self, name: str, *arguments: Any) -> Any:
        if name not in self._own:
            return await self._pool.call(name, *arguments)
        if inspect.iscoroutinefunction(self._own[name]):
            return await self._wait_for(name, *arguments)
        try:
            return self._own[name](*arguments)
        except Exception as error:
            raise self._raised(name, error) from error

    async def _wait_for(self, name: str, *arguments: Any) -> Any:
        limit = asyncio.timeout(self._timeout_s)
        async with self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._concurrency)):
            try:
                async with limit:
                    return await self._own[name](*arguments)
            except Exception as error:
                if limit.expired():
                    what = f"{name} ({Path(self._specs[name]).name})"
                    raise TimeoutError(f"{what}: it took longer than {self._timeout_s:g} s") from None
                raise self._raised(name, error) from error

    def _raised(self, name: str, error: Exception) -> Exception:
        return (ConnectionError if is_away(error) else RuntimeError)(f"{name}: {describe(error, self._specs[name])}")


class NamedReward(NamedTuple):
    spec: str
    weight: float
    signature: Signature


def named_rewards(reward: str | Mapping[str, float] | Sequence[str]) -> dict[str, NamedReward]:
    """The functions by the name that errors and metrics use: of several functions, each one's own.

    Raises EnvironmentSetupError if two functions have the same name.
    """
    if isinstance(reward, str):
        signature, spec = split_signature(reward)
        return {TOTAL: NamedReward(spec, 1.0, signature)}
    weights = reward.items() if isinstance(reward, Mapping) else [(spec, 1.0) for spec in reward]
    split = [(*split_signature(named), weight) for named, weight in weights]
    named = {spec.rpartition(":")[2]: NamedReward(spec, weight, signature) for signature, spec, weight in split}
    if len(named) < len(reward):
        raise EnvironmentSetupError("environment.args.reward: two functions have the same name; rename one of them")
    return named


async def weighted_sum(functions: Functions, weights: Mapping[str, float], *arguments: Any) -> Judgement:
    """The sum of what the functions return, times their weights. Of several functions, each value is also a metric.

    Raises RolloutError if one returns neither a finite number nor a dict with one.
    """
    calls = [asyncio.ensure_future(functions.call(name, *arguments)) for name in weights]
    try:
        values = await asyncio.gather(*calls)
    finally:
        for call in calls:
            call.cancel()
    scores = [Judgement(*score_of(value, name)) for name, value in zip(weights, values, strict=True)]
    metrics = {name: score.reward for name, score in zip(weights, scores, strict=True)} if len(weights) > 1 else {}
    for name, score in zip(weights, scores, strict=True):
        if known := metrics.keys() & score.metrics.keys():
            raise RolloutError(f"{name} returned the metric {min(known)!r}, which another function has too")
        metrics |= score.metrics
    return Judgement(sum(weights[name] * score.reward for name, score in zip(weights, scores, strict=True)), metrics)


def group_values(value: object, name: str, count: int) -> list[float]:
    """What a function returned for the `count` answers of a group. Raises RolloutError for anything but finite numbers."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != count:
        raise RolloutError(f"{name} returned {value!r:.60}, not a list of {count} numbers")
    return [finite_number(entry, f"{name}[{number}]") for number, entry in enumerate(value)]
