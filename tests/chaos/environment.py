"""An environment around the run's own, in which a share of the attempts goes wrong."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from pipelinerl.config.schema import ShareBelowOne
from pipelinerl.environments.options import Inner, Options
from pipelinerl.environments.registry import make_inner
from pipelinerl.interfaces import GenerationClient, Tokenizer
from pipelinerl.types import Problem, Rollout

TROUBLES = ("raise", "hang", "compute", "leak", "nonsense")
LEAKED_BYTES = 1 << 20
COMPUTES_S = 0.3


class TroubledOptions(Options, frozen=True):
    inner: Inner
    """The environment."""
    share: ShareBelowOne = 0.05
    """Share of the attempts that go wrong."""
    chaos_seed: int = 0
    """Which attempts, and how."""


class Troubled:
    """Attempts at the problems of another environment. Some raise, wait for ever, hold up the engine, keep memory for
    good, or return a reward that is no number. Which ones is a function of the seed and of the number of the attempt.
    """

    Options = TroubledOptions

    def __init__(self, tokenizer: Tokenizer, seed: int, **args: Any) -> None:
        options = TroubledOptions.read(args)
        self._inner = make_inner("environment.args.inner", options.inner.kind, options.inner.args, tokenizer, seed)
        self._share, self._seed = options.share, options.chaos_seed
        self._attempts = 0
        self._leaked: list[bytearray] = []

    def problem(self, index: int) -> Problem:
        return self._inner.problem(index)

    def held_out(self, count: int) -> Sequence[Problem]:
        return self._inner.held_out(count)

    async def rollout(self, problem: Problem, client: GenerationClient) -> Rollout:
        self._attempts += 1
        draw = random.Random(f"{self._seed}/{self._attempts}")
        trouble = draw.choice(TROUBLES) if draw.random() < self._share else None
        rollout = await self._inner.rollout(problem, client)
        match trouble:
            case "raise":
                raise RuntimeError("an environment in trouble")
            case "hang":
                await asyncio.Event().wait()
            case "compute":
                time.sleep(COMPUTES_S)
            case "leak":
                self._leaked.append(bytearray(LEAKED_BYTES))
            case "nonsense":
                return msgspec.structs.replace(rollout, reward=math.nan)
        return rollout
