"""What tests of environments share: a model of set answers, and errors of one line."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.errors import PipelineRLError
from pipelinerl.interfaces import Environment
from pipelinerl.types import FinishReason, Problem, Rollout
from tests.unit.chat_parts import SamplingClient
from tests.unit.scripted_engine import STOP, CharTokenizer

TOKENIZER = CharTokenizer()
COUNTDOWN = f"{Path(__file__).parents[3]}/examples/countdown.py:Countdown"


def saying(*texts: str, finish_reason: FinishReason = "stop", tokenizer: CharTokenizer = TOKENIZER) -> SamplingClient:
    """A model that says `texts` in turn."""
    return SamplingClient.saying(tokenizer, *texts, end=chr(STOP) if finish_reason == "stop" else "")


def play(environment: Environment, problem: Problem, *texts: str, **options: Any) -> tuple[Rollout, SamplingClient]:
    """One rollout with a model that says `texts` in turn, whose turns are exactly the completions."""
    client = saying(*texts, **options)
    rollout = asyncio.run(environment.rollout(problem, client))
    assert [turn.completion for turn in rollout.turns] == client.completions
    return rollout, client


def rollout(environment: Environment, problem: Problem, *texts: str, finish_reason: FinishReason = "stop") -> Rollout:
    return play(environment, problem, *texts, finish_reason=finish_reason)[0]


@contextmanager
def one_line(kind: type[PipelineRLError], message: str = "", *, match: str | None = None) -> Iterator[None]:
    """The code raises an error of this kind. Its message is one line that contains `message`, and the pattern `match`."""
    with pytest.raises(kind, match=match) as caught:
        yield
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
