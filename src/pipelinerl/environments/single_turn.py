"""Base of tasks with one question and one answer: subclasses say what is asked and what an answer is worth."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from pipelinerl.environments.prompts import Message, encode_prompt, text_decoder
from pipelinerl.interfaces import GenerationClient, Tokenizer
from pipelinerl.types import Problem, Rollout, Turn

REMEMBERED_PROMPTS = 64


class SingleTurn(ABC):
    """A subclass defines `problem`, `prompt` and `reward`, and `held_out` if it is to be evaluated.

    Constructor arguments of a subclass (after `tokenizer` and `seed`) are `environment.args` of the run file.
    """

    max_tokens: int | None = None
    """Longest completion that makes sense here; None or anything above `actor.max_tokens`: that."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.tokenizer = tokenizer
        self.seed = seed
        self._decode = text_decoder(tokenizer)
        self._prompt_ids: dict[str, tuple[int, ...]] = {}

    @abstractmethod
    def problem(self, index: int) -> Problem:
        """The training problem number `index`; a pure function of it (and of `self.seed`)."""

    @abstractmethod
    def prompt(self, problem: Problem) -> str | Sequence[Message]:
        """What the model is asked: a text for it to continue, or chat messages."""

    @abstractmethod
    def reward(self, problem: Problem, text: str) -> float:
        """What the answer `text` (without special tokens) is worth."""

    def held_out(self, count: int) -> Sequence[Problem]:  # noqa: ARG002 - for subclasses to use
        """The first `count` evaluation problems, which `problem` never gives. None by default."""
        return ()

    async def rollout(self, problem: Problem, client: GenerationClient) -> Rollout:
        prompt_ids = self._encoded(self.prompt(problem))
        completion = await client.generate(prompt_ids, max_tokens=self.max_tokens)
        text = self._decode(completion.token_ids)
        turn = Turn(prompt_ids=prompt_ids, completion=completion, text=text)
        return Rollout(turns=(turn,), reward=self.reward(problem, text))

    def _encoded(self, prompt: str | Sequence[Message]) -> tuple[int, ...]:
        """The prompt's ids; encoding takes longer than all else here, and the attempts of a group share a prompt."""
        key = prompt if isinstance(prompt, str) else repr(prompt)
        ids = self._prompt_ids.get(key)
        if ids is None:
            while len(self._prompt_ids) >= REMEMBERED_PROMPTS:
                del self._prompt_ids[next(iter(self._prompt_ids))]
            ids = self._prompt_ids[key] = encode_prompt(self.tokenizer, prompt)
        return ids
