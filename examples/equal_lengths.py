"""A task whose completions all have the same length, for `compare_equal_lengths.yaml`: a pipeline has no tail to fill.

The prompt is a pair of numbers, `84,36:`, and the answer is its first digit, repeated. An answer that ends early is
continued until it has `tokens` tokens, so that every rollout takes exactly the same number of decode steps.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from pipelinerl.environments import SingleTurn
from pipelinerl.interfaces import GenerationClient, Tokenizer
from pipelinerl.types import Problem, Rollout, Turn


class EqualLengths(SingleTurn):
    """The reward is the share of the tokens that are the prompt's first digit."""

    def __init__(self, tokenizer: Tokenizer, seed: int, tokens: int = 36) -> None:
        super().__init__(tokenizer, seed)
        self.tokens = tokens

    def problem(self, index: int) -> Problem:
        a, b = random.Random(f"{self.seed}/{index}").sample(range(10, 100), 2)
        return Problem(id=str(index), payload={"a": a, "b": b})

    def prompt(self, problem: Problem) -> str:
        return f"{problem.payload['a']},{problem.payload['b']}:"

    def reward(self, problem: Problem, text: str) -> float:
        return text.count(str(problem.payload["a"])[0]) / self.tokens

    def held_out(self, count: int) -> Sequence[Problem]:
        pairs = (random.Random(f"held out/{number}").sample(range(10, 100), 2) for number in range(count))
        return [Problem(id=f"held-out/{number}", payload={"a": a, "b": b}) for number, (a, b) in enumerate(pairs)]

    async def rollout(self, problem: Problem, client: GenerationClient) -> Rollout:
        ids = list(self.tokenizer.encode(self.prompt(problem)))
        turns: list[Turn] = []
        text, left = "", self.tokens
        while left > 0:
            completion = await client.generate(ids, max_tokens=left)
            said = self.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
            turns.append(Turn(prompt_ids=tuple(ids), completion=completion, text=said))
            ids += completion.token_ids
            text, left = text + said, left - len(completion.token_ids)
        return Rollout(turns=tuple(turns), reward=await self.call_reward(problem, text))
