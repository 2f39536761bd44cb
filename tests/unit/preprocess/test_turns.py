from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.errors import RolloutError
from pipelinerl.preprocess.preprocessor import join_turns
from pipelinerl.types import Segment, Turn, VersionSpan, spans_from_versions
from tests.unit.group_parts import turn


def test_a_turn_that_continues_extends_the_segment_with_context_and_completion() -> None:
    joined = join_turns([turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 50, 51], [6]), turn([1, 2, 3, 4, 50, 51, 6], [7])])
    assert joined.segments == (Segment(token_ids=(1, 2, 3, 4, 50, 51, 6, 7), sampled=((2, 4), (6, 7), (7, 8))),)


@pytest.mark.parametrize(
    "second_prompt",
    [[1, 2, 3, 9, 5], [1, 2, 3], [9], [0, 1, 2, 3, 4], [1, 2, 3, 40]],
    ids=["changed", "shorter", "unrelated", "shifted", "retokenised"],
)
def test_a_prompt_that_does_not_continue_starts_a_new_segment(second_prompt: list[int]) -> None:
    joined = join_turns([turn([1, 2], [3, 4], [-0.1, -0.2]), turn(second_prompt, [7], [-0.3])])
    assert joined.segments == (
        Segment(token_ids=(1, 2, 3, 4), sampled=((2, 4),)),
        Segment(token_ids=(*second_prompt, 7), sampled=((len(second_prompt), len(second_prompt) + 1),)),
    )
    assert joined.behaviour_logprobs == (-0.1, -0.2, -0.3)


def test_empty_completions_leave_context_only_where_something_is_sampled_after_it() -> None:
    joined = join_turns([turn([1], []), turn([1, 2], [3]), turn([1, 2, 3, 4], []), turn([9], [])])
    assert joined.segments == (Segment(token_ids=(1, 2, 3), sampled=((2, 3),)),)


IDS = st.lists(st.integers(0, 5), max_size=5)  # few different ids, so that chance continuations happen


@st.composite
def rollouts(draw: st.DrawFn) -> list[Turn]:
    """Turns of which some continue the one before, some do not, with lengths from zero up."""
    turns: list[Turn] = []
    for _ in range(draw(st.integers(0, 5))):
        before = [*turns[-1].prompt_ids, *turns[-1].completion.token_ids] if turns and draw(st.booleans()) else []
        prompt = before + draw(IDS) or [0]
        completion = draw(IDS)
        size = len(completion)
        logprobs = draw(st.lists(st.floats(-30, 0), min_size=size, max_size=size))
        versions = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
        turns.append(turn(prompt, completion, logprobs, versions))
    return turns


@given(rollouts())
@settings(max_examples=200)
def test_what_is_trained_on_is_exactly_what_was_sampled(turns: list[Turn]) -> None:
    joined = join_turns(turns)
    sampled = [segment.token_ids[i] for segment in joined.segments for i in segment.sampled_positions]
    completions = [item.completion for item in turns]
    assert sampled == [i for completion in completions for i in completion.token_ids]
    assert list(joined.behaviour_logprobs) == [logprob for completion in completions for logprob in completion.logprobs]
    assert spans_from_versions(joined.versions) == spans_from_versions(
        span.version
        for completion in completions
        for span in completion.weight_versions
        for _ in range(span.start, span.end)
    )


@given(rollouts())
@settings(max_examples=200)
def test_every_sampled_token_sees_exactly_the_ids_it_was_sampled_after(turns: list[Turn]) -> None:
    joined = join_turns(turns)
    contexts = [segment.token_ids[:i] for segment in joined.segments for i in segment.sampled_positions]
    expected = [
        item.prompt_ids + item.completion.token_ids[:i] for item in turns for i in range(len(item.completion.token_ids))
    ]
    assert contexts == expected


def with_completion(**changes: object) -> Turn:
    good = turn([1], [2, 3])
    return msgspec.structs.replace(good, completion=msgspec.structs.replace(good.completion, **changes))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (turn([], [1]), "empty prompt"),
        (with_completion(logprobs=(-0.1,)), "2 tokens but 1 log-probabilities"),
        (with_completion(weight_versions=(VersionSpan(0, 0, 1),)), "do not cover 2 tokens"),
        (with_completion(weight_versions=()), "do not cover 2 tokens"),
        (with_completion(weight_versions=(VersionSpan(0, 0, 1), VersionSpan(1, 0, 2))), "do not cover 2 tokens"),
        (with_completion(weight_versions=(VersionSpan(-1, 0, 2),)), "negative weight version"),
        (with_completion(token_ids=(), logprobs=()), "do not cover 0 tokens"),
        (with_completion(token_ids=(2, -3)), "negative token id"),
        (turn([-1], [2]), "negative token id"),
        (with_completion(logprobs=(-0.1, math.nan)), "not a log-probability"),
        (with_completion(logprobs=(-0.1, -math.inf)), "not a log-probability"),
        (with_completion(logprobs=(-0.1, 0.5)), "not a log-probability"),
    ],
)
def test_nonsense_is_a_rollout_error(bad: Turn, message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        join_turns([turn([7], [8]), bad])
