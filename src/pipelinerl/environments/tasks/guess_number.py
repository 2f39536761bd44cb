"""Guess a number in several turns. Sampled token ids are reused as they are, never encoded again."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from pipelinerl.environments.prompts import Message, encode_prompt, encode_reply, has_chat_template, try_prompt
from pipelinerl.errors import EnvironmentSetupError
from pipelinerl.interfaces import GenerationClient, Tokenizer
from pipelinerl.types import Problem, Rollout, Turn

_INTEGER = re.compile(r"\d{1,9}")


class GuessNumber:
    """The number is between 1 and `highest`; the reply to each guess is `higher` or `lower`.

    Reward: 1 / number of guesses, 0 if it isn't found in `max_turns`. A tenth of the numbers is held out for evaluation.
    `chat`: use the model's chat template (default: if it has one).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int,
        *,
        highest: int = 100,
        max_turns: int = 7,
        max_tokens: int = 16,
        chat: bool | None = None,
    ) -> None:
        """Raises EnvironmentSetupError for arguments out of range."""
        for name, value, least in (("highest", highest, 10), ("max_turns", max_turns, 1), ("max_tokens", max_tokens, 1)):
            if value < least:
                raise EnvironmentSetupError(f"environment.args.{name} of guess_number must be at least {least}, not {value}")
        if chat and not has_chat_template(tokenizer):
            raise EnvironmentSetupError("environment.args.chat is true, but the model's tokenizer has no chat template")
        self._tokenizer = tokenizer
        self._seed = seed
        self._highest = highest
        self._max_turns = max_turns
        self._max_tokens = max_tokens
        self._chat = has_chat_template(tokenizer) if chat is None else chat
        numbers = list(range(1, highest + 1))
        random.Random(f"guess/{highest}").shuffle(numbers)  # the held-out numbers do not depend on the run's seed
        self._held_out, self._training = numbers[: highest // 10], numbers[highest // 10 :]
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
        for _ in range(self._max_turns):
            completion = await client.generate(prompt_ids, max_tokens=self._max_tokens)
            text = self._tokenizer.decode(completion.token_ids, skip_special_tokens=True)
            turns.append(Turn(prompt_ids=prompt_ids, completion=completion, text=text))
            guess = guess_in(text)
            if guess == number:
                return Rollout(turns=tuple(turns), reward=1 / len(turns), metrics={"guesses": len(turns)})
            prompt_ids = (*prompt_ids, *completion.token_ids, *self._feedback(completion.token_ids, guess, number))
        return Rollout(turns=tuple(turns), reward=0.0, metrics={"guesses": len(turns)})

    def _first_prompt(self) -> str | Sequence[Message]:
        rules = f"I am thinking of a whole number from 1 to {self._highest}. Guess it; I will say higher or lower."
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
