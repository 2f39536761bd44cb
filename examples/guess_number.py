"""A task of several turns: guess a number, and get `higher` or `lower`. Sampled token ids are reused, never encoded again.

pipelinerl train examples/guess_number.yaml
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from pipelinerl.environments.chat.conversation import Conversation
from pipelinerl.environments.single_turn import Task
from pipelinerl.interfaces import GenerationClient, Tokenizer
from pipelinerl.types import Problem, Rollout


class GuessNumber(Task):
    """Reward: 1 / number of guesses, 0 if the number is not found. A tenth of the numbers is held out for evaluation."""

    def __init__(self, tokenizer: Tokenizer, seed: int, *, highest: int = 100, max_turns: int = 7) -> None:
        super().__init__(tokenizer, seed)
        self.highest, self.max_turns = highest, max_turns
        numbers = list(range(1, highest + 1))
        random.Random(highest).shuffle(numbers)  # the held-out numbers do not depend on the run's seed
        self.held, self.training = numbers[: highest // 10], numbers[highest // 10 :]

    def problem(self, index: int) -> Problem:
        number = random.Random(f"{self.seed}/{index}").choice(self.training)
        return Problem(id=str(index), payload={"number": number})

    def held_out(self, count: int) -> Sequence[Problem]:
        return [Problem(id=f"held-out/{number}", payload={"number": number}) for number in self.held[:count]]

    async def rollout(self, problem: Problem, client: GenerationClient) -> Rollout:
        number = problem.payload["number"]
        rules = f"I am thinking of a whole number from 1 to {self.highest}. Guess it; I will say higher or lower."
        messages: list[Any] = [{"role": "user", "content": f"{rules} Answer with a number and nothing else."}]
        conversation = Conversation(client)
        for guesses in range(1, self.max_turns + 1):
            answer = await conversation.ask(messages, max_tokens=16)
            found = re.search(r"\d{1,9}", answer.text)
            guess = int(found[0]) if found else None
            if guess == number:
                return Rollout(turns=conversation.turns, reward=1 / guesses, metrics={"guesses": guesses})
            reply = "not a number" if guess is None else "higher" if number > guess else "lower"
            messages += [answer.message, {"role": "user", "content": reply}]
        return Rollout(turns=conversation.turns, reward=0.0, metrics={"guesses": self.max_turns})
