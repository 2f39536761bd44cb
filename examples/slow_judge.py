"""The demo's task with a slow judge, for `slow_judge.yaml`. It imitates agents with tools and model judges.

Tests, searches, web pages and grading models take seconds, sometimes many. A rollout that waits for one needs no engine
slot. A pipeline gives the slot to another rollout. Conventional RL has no other rollout once its round is started, and
waits for the slowest verdict of the round.
"""

from __future__ import annotations

import asyncio
import math
import random

from pipelinerl.environments.tasks.gcd import Gcd
from pipelinerl.errors import EnvironmentSetupError
from pipelinerl.interfaces import GenerationClient, Tokenizer
from pipelinerl.types import Problem, Rollout


class SlowJudge(Gcd):
    """The judge's delay is lognormal: the median is `median_s`, the p99 exp(2.33 * sigma) times that.

    The delay depends only on seed, problem and attempt, so that all schedules have the same delays. `median_s` of 0: no
    delay, for evaluations.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int, median_s: float = 1.0, sigma: float = 1.0) -> None:
        if not (median_s >= 0 and sigma >= 0):
            raise EnvironmentSetupError("environment.args: median_s and sigma must not be negative")
        super().__init__(tokenizer, seed)
        self.median_s = median_s
        self.sigma = sigma

    async def rollout(self, problem: Problem, client: GenerationClient) -> Rollout:
        rollout = await super().rollout(problem, client)
        await asyncio.sleep(self.delay_s(problem, rollout.turns[0].completion.request_id))
        return rollout

    def delay_s(self, problem: Problem, attempt: str) -> float:
        """Seconds until the verdict of `attempt`, which is identified by its request id (`g12.a3.t0`)."""
        if self.median_s == 0:
            return 0.0
        return random.Random(f"{self.seed}/{problem.id}/{attempt}").lognormvariate(math.log(self.median_s), self.sigma)
