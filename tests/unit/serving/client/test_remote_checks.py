"""What an answer must be, and tokens that come once whatever is sent again."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from pipelinerl.serving.client.adapter import find_fault
from pipelinerl.serving.client.engine import Ticket
from pipelinerl.types import Completion, GenerationRequest, SamplingParams, TokenEvent, VersionSpan

REQUEST = GenerationRequest(id="r", prompt_ids=(1,), sampling=SamplingParams(max_tokens=4, stop_token_ids=(9,)))
FULL = Completion(
    request_id="r",
    token_ids=(3, 4, 5, 6),
    logprobs=(-0.5, -1.0, 0.0, -2.0),
    weight_versions=(VersionSpan(2, 0, 3), VersionSpan(4, 3, 4)),
    finish_reason="length",
)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"token_ids": (3, 4, 5, 9), "finish_reason": "stop"},
        {"token_ids": (3, 4, 5, 6), "finish_reason": "cancelled"},
        {"token_ids": (), "logprobs": (), "weight_versions": (), "finish_reason": "cancelled"},
    ],
)
def test_what_can_be_the_answer(changes: dict[str, object]) -> None:
    assert find_fault(msgspec.structs.replace(FULL, **changes), REQUEST, 10) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"request_id": "other"}, "request 'other'"),
        ({"logprobs": (-0.5, -1.0, 0.0)}, "4 tokens and 3"),
        ({"logprobs": (-0.5, -1.0, 0.0, float("nan"))}, "log-prob"),
        ({"logprobs": (-0.5, -1.0, 0.0, 0.1)}, "log-prob"),
        ({"token_ids": (3, 4, 5, 10)}, "vocabulary of 10"),
        ({"weight_versions": (VersionSpan(2, 0, 3),)}, "cover"),
        ({"token_ids": (3, 9, 5, 6)}, "after a stop token"),
        ({"token_ids": (3, 4, 5, 9)}, "length"),
        ({"finish_reason": "stop"}, "not a stop token"),
        ({"token_ids": (), "logprobs": (), "weight_versions": (), "finish_reason": "stop"}, "not a stop token"),
        ({"token_ids": (3,), "logprobs": (-1.0,), "weight_versions": (VersionSpan(0, 0, 1),)}, "after 1 of 4"),
    ],
)
def test_what_can_not(changes: dict[str, object], words: str) -> None:
    fault = find_fault(msgspec.structs.replace(FULL, **changes), REQUEST, 10)
    assert fault is not None
    assert words in fault


def test_more_tokens_than_asked_for_can_not() -> None:
    request = msgspec.structs.replace(REQUEST, sampling=SamplingParams(max_tokens=3))
    assert find_fault(FULL, request, 10) == "it has 4 tokens, more than the limit of 3"


EVENTS = [TokenEvent("r.7", i, FULL.token_ids[i], FULL.logprobs[i], (2, 2, 2, 4)[i]) for i in range(4)]


async def ticket_of(passed: list[TokenEvent]) -> Ticket:
    return Ticket("1", REQUEST, passed.append)


@pytest.mark.parametrize("taken", [(0, 1, 2), (0, 2), ()])
def test_tokens_of_streams_that_have_gaps_are_passed_on_once_and_in_order(taken: tuple[int, ...]) -> None:
    passed: list[TokenEvent] = []
    ticket = asyncio.run(ticket_of(passed))
    for index in taken:
        ticket.take(EVENTS[index])
    assert ticket.complete(FULL)
    assert passed == [msgspec.structs.replace(event, request_id="r") for event in EVENTS]


def test_a_completion_of_other_tokens_is_noticed() -> None:
    passed: list[TokenEvent] = []
    ticket = asyncio.run(ticket_of(passed))
    ticket.take(msgspec.structs.replace(EVENTS[0], version=1))
    assert not ticket.complete(FULL)
    assert len(passed) == 1
