"""Guess a number in several turns. Sampled token ids are reused as they are, never encoded again."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta

from pipelinerl.environments.options import AtLeastOne, Options
from pipelinerl.environments.prompts import Message, check_chat, encode_prompt, encode_reply, try_prompt
from pipelinerl.interfaces import GenerationClient, Tokenizer
from pipelinerl.types import Problem, Rollout, Turn

_INTEGER = re.compile(r"\d{1,9}")


class GuessNumberOptions(Options, kw_only=True):
    highest: Annotated[int, Meta(ge=10)] = 100
    """The numbers are from 1 to this. A tenth of them is held out for evaluation."""
    max_turns: AtLeastOne = 7
    """How many guesses an attempt has."""
    max_tokens: AtLeastOne = 16
    """Longest guess."""
    chat: bool | None = None
    """Whether to use the model's chat template. null: if the model has one."""


class GuessNumber:
    """The reply to each guess is `higher` or `lower`. Reward: 1 / number of guesses, 0 if the number is not found."""

    Options = GuessNumberOptions

    def __init__(self, tokenizer: Tokenizer, seed: int, **args: Any) -> None:
        self._options = options = GuessNumberOptions.read(args)
        self._chat = check_chat(tokenizer, options.chat)
        self._tokenizer = tokenizer
        self._seed = seed
        numbers = list(range(1, options.highest + 1))
        random.Random(f"guess/{options.highest}").shuffle(numbers)  # the held-out numbers do not depend on the run's seed
        self._held_out, self._training = numbers[: options.highest // 10], numbers[options.highest // 10 :]
        try_prompt(tokenizer, self._first_prompt())

    def problem(self, index: int) -> Problem:
        number = random.Random(f"guess/{self._seed}/{index}").choice(self._training)
        return Problem(id=f"guess/{index}", payload={"number": number})

    def held_out(self, count: int) -> Sequence[Problem]:
        return [Problem(id=f"guess/held-out/{number}", payload={"number": number}) for number in self._held_out[:count]]

    async def rollout(self, problem: Problem, client: GenerationClient) -> Rollout:
        number = int(problem.payload["number"])
        prompt_ids = encode_prompt(self._tokenizer, self._first_prompt())
        turns: list[Turn] = []
        for _ in range(self._options.max_turns):
            completion = await client.generate(prompt_ids, max_tokens=self._options.max_tokens)
            text = self._tokenizer.decode(completion.token_ids, skip_special_tokens=True)
            turns.append(Turn(prompt_ids=prompt_ids, completion=completion, text=text))
            guess = guess_in(text)
            if guess == number:
                return Rollout(turns=tuple(turns), reward=1 / len(turns), metrics={"guesses": len(turns)})
            prompt_ids = (*prompt_ids, *completion.token_ids, *self._feedback(completion.token_ids, guess, number))
        return Rollout(turns=tuple(turns), reward=0.0, metrics={"guesses": len(turns)})

    def _first_prompt(self) -> str | Sequence[Message]:
        rules = f"I am thinking of a whole number from 1 to {self._options.highest}. Guess it; I will say higher or lower."
        if self._chat:
            content = f"{rules} Answer with a number and nothing else."
            return [{"role": "user", "content": content}]
        return f"{rules}\nGuess:"

    def _feedback(self, completion_ids: Sequence[int], guess: int | None, number: int) -> tuple[int, ...]:
        answer = "not a number" if guess is None else "higher" if number > guess else "lower"
        if self._chat:
            return encode_reply(self._tokenizer, completion_ids, answer)
        return tuple(self._tokenizer.encode(f"\n{answer}\nGuess:", add_special_tokens=False))


def guess_in(text: str) -> int | None:
    """The first whole number in a text; None if there is none."""
    match = _INTEGER.search(text)
    return int(match.group()) if match else None
