"""A model for tests of environments that says what it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pipelinerl.interfaces import Environment
from pipelinerl.types import Completion, FinishReason, Problem, Rollout
from tests.unit.scripted_engine import STOP, CharTokenizer

TOKENIZER = CharTokenizer()


class SayingClient:
    """Answers each request with the next of `texts`; remembers the prompts."""

    tokenizer = TOKENIZER

    def __init__(self, *texts: str, finish_reason: FinishReason = "stop") -> None:
        self._texts = list(texts)
        self._reason: FinishReason = finish_reason
        self.completions: list[Completion] = []
        self.prompts: list[str] = []
        self.limits: list[int | None] = []

    async def generate(self, prompt_ids: Sequence[int], *, max_tokens: int | None = None) -> Completion:
        self.prompts.append(TOKENIZER.decode(prompt_ids))
        self.limits.append(max_tokens)
        ids = [*TOKENIZER.encode(self._texts.pop(0)), *([STOP] if self._reason == "stop" else [])]
        completion = Completion(
            request_id=str(len(self.prompts)),
            token_ids=tuple(ids),
            logprobs=(0.0,) * len(ids),
            weight_versions=(),
            finish_reason=self._reason,
        )
        self.completions.append(completion)
        return completion

    def stream(self, prompt_ids: Sequence[int], *, max_tokens: int | None = None):
        raise NotImplementedError


def rollout(environment: Environment, problem: Problem, *texts: str, finish_reason: FinishReason = "stop") -> Rollout:
    client = SayingClient(*texts, finish_reason=finish_reason)
    return asyncio.run(environment.rollout(problem, client))
