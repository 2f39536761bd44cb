"""What tests of environments share: a model that says what it is told to, and errors of one line."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from pipelinerl.errors import PipelineRLError
from pipelinerl.interfaces import Environment
from pipelinerl.types import Completion, FinishReason, Problem, Rollout
from tests.unit.scripted_engine import STOP, CharTokenizer

TOKENIZER = CharTokenizer()


class SayingClient:
    """Answers each request with the next of `texts`, up to `max_tokens`; remembers the prompts."""

    def __init__(self, *texts: str, finish_reason: FinishReason = "stop", tokenizer: CharTokenizer = TOKENIZER) -> None:
        self.tokenizer = tokenizer
        self._texts = list(texts)
        self._reason: FinishReason = finish_reason
        self.completions: list[Completion] = []
        self.prompts: list[str] = []
        self.limits: list[int | None] = []

    async def generate(self, prompt_ids: Sequence[int], *, max_tokens: int | None = None) -> Completion:
        self.prompts.append(TOKENIZER.decode(prompt_ids))
        self.limits.append(max_tokens)
        ids = [*TOKENIZER.encode(self._texts.pop(0)), *([STOP] if self._reason == "stop" else [])]
        cut = max_tokens is not None and len(ids) > max_tokens
        completion = Completion(
            request_id=str(len(self.prompts)),
            token_ids=tuple(ids[:max_tokens]),
            logprobs=(0.0,) * len(ids[:max_tokens]),
            weight_versions=(),
            finish_reason="length" if cut else self._reason,
        )
        self.completions.append(completion)
        return completion

    def stream(self, prompt_ids: Sequence[int], *, max_tokens: int | None = None):
        raise NotImplementedError


def play(environment: Environment, problem: Problem, *texts: str, **options: Any) -> tuple[Rollout, SayingClient]:
    """One rollout with a model that says `texts` in turn, whose turns are exactly the completions."""
    client = SayingClient(*texts, **options)
    rollout = asyncio.run(environment.rollout(problem, client))
    assert [turn.completion for turn in rollout.turns] == client.completions
    return rollout, client


def rollout(environment: Environment, problem: Problem, *texts: str, finish_reason: FinishReason = "stop") -> Rollout:
    return play(environment, problem, *texts, finish_reason=finish_reason)[0]


@contextmanager
def one_line(kind: type[PipelineRLError], said: str = "", *, match: str | None = None) -> Iterator[None]:
    """The code raises an error of this kind. Its message is one line that contains `said`, and the pattern `match`."""
    with pytest.raises(kind, match=match) as caught:
        yield
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
