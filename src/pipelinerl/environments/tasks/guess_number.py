"""Guess a number in several turns. Sampled token ids are reused as they are, never encoded again."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from pipelinerl.environments.chat.conversation import Conversation
from pipelinerl.environments.chat.messages import ChatMessage
from pipelinerl.environments.options import Arguments, AtLeastOne, Options
from pipelinerl.environments.prompts import chat_messages, check_chat, check_template_options, encode_prompt, try_prompt
from pipelinerl.interfaces import GenerationClient, Tokenizer
from pipelinerl.types import Problem, Rollout

_INTEGER = re.compile(r"\d{1,9}")


class GuessNumberOptions(Options, frozen=True):
    highest: Annotated[int, Field(ge=10)] = 100
    """The numbers are from 1 to this. A tenth of them is held out for evaluation."""
    max_turns: AtLeastOne = 7
    """How many guesses an attempt has."""
    max_tokens: AtLeastOne = 16
    """Longest guess."""
    chat: bool | None = None
    """Whether to use the model's chat template. null: if the model has one."""
    template_options: Arguments | None = None
    """Options of the model's chat template, such as `{enable_thinking: false}`."""


class GuessNumber:
    """The reply to each guess is `higher` or `lower`. Reward: 1 / number of guesses, 0 if the number is not found."""

    Options = GuessNumberOptions

    def __init__(self, tokenizer: Tokenizer, seed: int, **args: Any) -> None:
        self._options = options = GuessNumberOptions.read(args)
        self.max_tokens = options.max_tokens
        self._chat = check_chat(tokenizer, options.chat)
        self._template = check_template_options(tokenizer, options.template_options, chat=self._chat)
        self._tokenizer = tokenizer
        self._seed = seed
        numbers = list(range(1, options.highest + 1))
        random.Random(f"guess/{options.highest}").shuffle(numbers)  # the held-out numbers do not depend on the run's seed
        self._held_out, self._training = numbers[: options.highest // 10], numbers[options.highest // 10 :]
        rules = f"I am thinking of a whole number from 1 to {options.highest}. Guess it; I will say higher or lower."
        self._rules = f"{rules} Answer with a number and nothing else." if self._chat else f"{rules}\nGuess:"
        try_prompt(tokenizer, chat_messages("", self._rules) if self._chat else self._rules, self._template)

    def problem(self, index: int) -> Problem:
        number = random.Random(f"guess/{self._seed}/{index}").choice(self._training)
        return Problem(id=f"guess/{index}", payload={"number": number})

    def held_out(self, count: int) -> Sequence[Problem]:
        return [Problem(id=f"guess/held-out/{number}", payload={"number": number}) for number in self._held_out[:count]]

    async def rollout(self, problem: Problem, client: GenerationClient) -> Rollout:
        number, limit = int(problem.payload["number"]), self.max_tokens
        conversation = Conversation(client, template_options=self._template)
        messages: list[ChatMessage] = [*chat_messages("", self._rules)]
        prompt_ids = () if self._chat else encode_prompt(self._tokenizer, self._rules)
        for guesses in range(1, self._options.max_turns + 1):
            if self._chat:
                answer = await conversation.ask(messages, max_tokens=limit)
            else:
                answer = await conversation.continue_from(prompt_ids, max_tokens=limit)
            guess = guess_in(answer.text)
            if guess == number:
                return Rollout(turns=conversation.turns, reward=1 / guesses, metrics={"guesses": guesses})
            reply = "not a number" if guess is None else "higher" if number > guess else "lower"
            if self._chat:
                messages += [answer.message, {"role": "user", "content": reply}]
            else:
                added = self._tokenizer.encode(f"\n{reply}\nGuess:", add_special_tokens=False)
                prompt_ids = (*prompt_ids, *answer.completion.token_ids, *added)
        return Rollout(turns=conversation.turns, reward=0.0, metrics={"guesses": self._options.max_turns})


def guess_in(text: str) -> int | None:
    """The first whole number in a text; None if there is none."""
    match = _INTEGER.search(text)
    return int(match.group()) if match else None
