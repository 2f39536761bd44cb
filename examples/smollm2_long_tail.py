"""Counting down, for `smollm2_long_tail.yaml`: answers that differ in length by a factor of a hundred.

The prompt is `Countdown from 7 to 1: 7, 6,` and the answer ` 5, 4, 3, 2, 1`. The count of missing numbers is lognormal:
half of the time at most 5, one time in a hundred 160 or more. An answer may be only a little longer than the right one,
so that lengths are long-tailed from the first step on, regardless of what the model writes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from pipelinerl.environments import SingleTurn
from pipelinerl.interfaces import GenerationClient
from pipelinerl.types import Problem, Rollout, Turn

MOST = 200
SPARE_TOKENS = 6


class Countdown(SingleTurn):
    """Reward 1 if the first line is the answer, with or without a full stop, else 0.

    Multiples of 4 are held out for evaluations: training never counts down from one of them.
    """

    def problem(self, index: int) -> Problem:
        return draw(random.Random(f"{self.seed}/{index}"), str(index), held_out=False)

    def held_out(self, count: int) -> Sequence[Problem]:
        rng = random.Random("held out")
        return [draw(rng, f"held-out/{number}", held_out=True) for number in range(count)]

    def prompt(self, problem: Problem) -> str:
        first = problem.payload["first"]
        return f"Countdown from {first} to 1: {first}, {first - 1},"

    def reward(self, problem: Problem, text: str) -> float:
        return float(text.partition("\n")[0].rstrip(" .") == answer(problem))

    async def rollout(self, problem: Problem, client: GenerationClient) -> Rollout:
        prompt_ids = tuple(self.tokenizer.encode(self.prompt(problem)))
        most = len(self.tokenizer.encode(answer(problem))) + SPARE_TOKENS
        completion = await client.generate(prompt_ids, max_tokens=most)
        text = self.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        turn = Turn(prompt_ids=prompt_ids, completion=completion, text=text)
        return Rollout(turns=(turn,), reward=await self.call_reward(problem, text))


def answer(problem: Problem) -> str:
    """The numbers after the first two, which are in the prompt."""
    return ",".join(f" {number}" for number in range(problem.payload["first"] - 2, 0, -1))


def draw(rng: random.Random, name: str, *, held_out: bool) -> Problem:
    while True:
        first = 2 + min(MOST, math.ceil(rng.lognormvariate(math.log(5), 1.5)))
        if (first % 4 == 0) == held_out:
            return Problem(id=name, payload={"first": first})
