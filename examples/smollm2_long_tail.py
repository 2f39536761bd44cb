"""Counting from one number to another, for `smollm2_long_tail.yaml`: answers that differ in length by a factor of a hundred.

The prompt is `All numbers from 18 to 23: 18, 19,` and the answer ` 20, 21, 22, 23`. How many numbers are missing is
lognormal: half of the time at most 5, once in a hundred 80 or more. An answer may be a little longer than the right one, so
that lengths are long-tailed from the first step on, whatever the model writes.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Sequence

from pipelinerl.environments import SingleTurn
from pipelinerl.interfaces import GenerationClient
from pipelinerl.types import Problem, Rollout, Turn

MOST = 120
SPARE_TOKENS = 6


class Counting(SingleTurn):
    """Half of the reward is for the share of the numbers that come before the first mistake, half for a line without any."""

    def problem(self, index: int) -> Problem:
        return draw(random.Random(f"{self.seed}/{index}"), str(index), held_out=False)

    def held_out(self, count: int) -> Sequence[Problem]:
        rng = random.Random("held out")
        return [draw(rng, f"held-out/{number}", held_out=True) for number in range(count)]

    def prompt(self, problem: Problem) -> str:
        first, last = problem.payload["first"], problem.payload["last"]
        return f"All numbers from {first} to {last}: {first}, {first + 1},"

    def reward(self, problem: Problem, text: str) -> float:
        asked, line = answer(problem).split(","), text.partition("\n")[0]
        said = line.split(",")
        right = next((place for place, (a, b) in enumerate(zip(asked, said, strict=False)) if a != b.rstrip()), len(said))
        return 0.5 * min(right, len(asked)) / len(asked) + 0.5 * (line.rstrip() == answer(problem))

    async def rollout(self, problem: Problem, client: GenerationClient) -> Rollout:
        prompt_ids = tuple(self.tokenizer.encode(self.prompt(problem)))
        most = len(self.tokenizer.encode(answer(problem))) + SPARE_TOKENS
        completion = await client.generate(prompt_ids, max_tokens=most)
        text = self.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        turn = Turn(prompt_ids=prompt_ids, completion=completion, text=text)
        return Rollout(turns=(turn,), reward=self.reward(problem, text))


def answer(problem: Problem) -> str:
    """The numbers after the first two, which are in the prompt."""
    return ",".join(f" {number}" for number in range(problem.payload["first"] + 2, problem.payload["last"] + 1))


def draw(rng: random.Random, name: str, *, held_out: bool) -> Problem:
    while True:
        first = rng.randrange(1, 100)
        last = first + 1 + min(MOST, math.ceil(rng.lognormvariate(math.log(5), 1.2)))
        if (zlib.crc32(f"{first} {last}".encode()) % 10 == 0) == held_out:  # some pairs are never trained on
            return Problem(id=name, payload={"first": first, "last": last})
