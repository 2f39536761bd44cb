"""Groups become samples: turns are joined to segments, rewards become advantages, and what is dropped has one reason."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.config.schema import PreprocessConfig
from pipelinerl.errors import RolloutError, UserError
from pipelinerl.preprocess.advantages import advantages
from pipelinerl.preprocess.preprocessor import join_turns, prepare
from pipelinerl.types import FinishReason, Rollout, Segment, Turn, VersionSpan, spans_from_versions
from tests.unit.group_parts import group, turn

Baseline = Literal["group_mean", "leave_one_out"]
BASELINES: list[Baseline] = ["group_mean", "leave_one_out"]


def rollout(name: str, reward: float, length: int = 3, finish: FinishReason = "stop", turns: int = 1) -> Rollout:
    """`turns` unrelated turns, each with a completion of `length` tokens; the last one ends with `finish`."""
    parts = tuple(
        turn(
            (100 + number, 101),
            range(length),
            [-0.1 * (i + 1) for i in range(length)],
            4 + number,
            name=f"{name}/{number}",
            reason=finish if number == turns - 1 else "stop",
        )
        for number in range(turns)
    )
    return Rollout(id=name, reward=reward, turns=parts)


CUT_THEN_FINISHED = rollout("x", 0.0, 2, "length").turns + rollout("y", 0.0, 2).turns


class TableScorer:
    """Scores a sampled token by its id and its segment's first id, and records what it was asked."""

    def __init__(self) -> None:
        self.calls: list[list[Segment]] = []

    def score(self, segments: Sequence[Segment]) -> list[list[float]]:
        self.calls.append(list(segments))
        return [[-float(s.token_ids[0]) - s.token_ids[i] / 10 for i in s.sampled_positions] for s in segments]


SAME = (rollout("a", 0.1, 3), rollout("b", 0.1, 5), rollout("c", 0.1, 3))
MIXED = (rollout("a", 1.0), rollout("b", 0.0, 7, "length"), rollout("c", 0.5))
ENDS = (rollout("a", 1.0, 3, "length", turns=2), Rollout(id="b", reward=0.0, turns=CUT_THEN_FINISHED))
EMPTY = (rollout("a", 1.0), rollout("b", 0.0, length=0), Rollout(id="c", turns=(), reward=0.5))
SEVERAL = (rollout("a", 0.0, 0, "length"), rollout("b", 0.0, 4, "length"), rollout("c", 0.0, 2))


@pytest.mark.parametrize(
    ("settings", "rollouts", "kept", "dropped"),
    [
        ({"zero_advantage": "skip"}, SAME, {"a": 0.0, "b": 0.0, "c": 0.0}, {}),
        ({"zero_advantage": "keep"}, SAME, {"a": 0.0, "b": 0.0, "c": 0.0}, {}),
        ({"zero_advantage": "drop"}, SAME, {}, {"zero_advantage": (3, 5, 3)}),
        ({}, MIXED, {"a": 0.5, "b": -0.5, "c": 0.0}, {}),
        ({"overlong": "drop"}, MIXED, {"a": 0.5, "c": 0.0}, {"overlong": (7,)}),  # advantages are of the whole group
        ({"overlong": "drop"}, ENDS, {"b": -0.5}, {"overlong": (6,)}),  # the last turn decides
        ({}, EMPTY, {"a": 0.5}, {"empty": (0, 0)}),
        (
            {"zero_advantage": "drop", "overlong": "drop"},
            SEVERAL,
            {},
            {"empty": (0,), "overlong": (4,), "zero_advantage": (2,)},
        ),
    ],
)
def test_each_rollout_is_kept_or_dropped_for_one_reason(
    settings: dict[str, Any], rollouts: Sequence[Rollout], kept: dict[str, float], dropped: dict[str, tuple[int, ...]]
) -> None:
    measured = [msgspec.structs.replace(one, metrics={one.id: 1.0}) for one in rollouts]
    prepared = prepare(group(9, measured), PreprocessConfig(**settings))
    assert all(sample.metrics == {sample.id: 1.0} and sample.group_index == 9 for sample in prepared.samples)
    assert {sample.id: sample.advantage for sample in prepared.samples} == kept
    assert [sample.finished for sample in prepared.samples] == [
        one.turns[-1].completion.finish_reason == "stop" for one in rollouts if one.id in kept
    ]
    found = {reason: tuple(one.tokens for one in prepared.dropped if one.reason == reason) for reason in dropped}
    assert found == dropped
    assert sorted([*kept, *(one.id for one in prepared.dropped)]) == [one.id for one in rollouts]


ROLLOUTS = st.tuples(
    st.sampled_from([0.0, 0.1, 0.5, 1.0]), st.integers(0, 4), st.sampled_from(["stop", "length"]), st.integers(0, 3)
)


CONFIGS = st.builds(
    PreprocessConfig,
    advantage=st.sampled_from(BASELINES),
    normalize_std=st.booleans(),
    zero_advantage=st.sampled_from(["skip", "keep", "drop"]),
    overlong=st.sampled_from(["keep", "drop"]),
)


@given(st.lists(ROLLOUTS, max_size=8), CONFIGS, st.booleans())
def test_every_rollout_ends_in_a_sample_or_in_one_count(
    attempts: list[tuple[float, int, FinishReason, int]], config: PreprocessConfig, score: bool
) -> None:
    made = [rollout(str(i), *attempt) for i, attempt in enumerate(attempts)]
    prepared = prepare(group(9, made), config, TableScorer().score if score else None)
    assert len(prepared.samples) + len(prepared.dropped) == len(made)
    assert [sample.id for sample in prepared.samples] == sorted(sample.id for sample in prepared.samples)
    expected = advantages([item.reward for item in made], baseline=config.advantage, normalize_std=config.normalize_std)
    for sample in prepared.samples:
        assert sample.advantage == expected[int(sample.id)]
        assert sample.sampled_count == len(sample.versions) == sum(len(s.sampled_positions) for s in sample.segments) > 0
        assert (sample.reference_logprobs is not None) == score


def test_the_reference_scores_all_kept_segments_in_one_call() -> None:
    scorer = TableScorer()
    finished = group(9, [rollout("a", 1.0, turns=2), rollout("b", 0.0, 9, "length"), rollout("c", 0.0, 2)])
    prepared = prepare(finished, PreprocessConfig(overlong="drop"), scorer.score)
    (segments,) = scorer.calls
    assert segments == [segment for sample in prepared.samples for segment in sample.segments]
    assert [sample.reference_logprobs for sample in prepared.samples] == [
        pytest.approx((-100.0, -100.1, -100.2, -101.0, -101.1, -101.2)),
        pytest.approx((-100.0, -100.1)),
    ]


def test_a_teacher_scores_each_turn_after_its_own_prompt_if_it_has_one() -> None:
    scorer, base = TableScorer(), rollout("a", 1.0, 2, turns=2)
    hinted = msgspec.structs.replace(base.turns[1], teacher_prompt_ids=(7, 8, 9))
    taught = msgspec.structs.replace(base, turns=(base.turns[0], hinted))
    prepared = prepare(group(9, [taught, rollout("b", 0.0, 2)]), PreprocessConfig(), scorer.score)
    (segments,) = scorer.calls
    assert [(one.token_ids, one.sampled) for one in segments] == [
        ((100, 101, 0, 1), ((2, 4),)),
        ((7, 8, 9, 0, 1), ((3, 5),)),
        ((100, 101, 0, 1), ((2, 4),)),
    ]
    assert prepared.samples[0].segments == prepare(group(9, [base]), PreprocessConfig()).samples[0].segments
    with pytest.raises(UserError, match="set it to process"):
        prepare(group(9, [taught]), PreprocessConfig(), scores_prompts=False)
    assert prepared.samples[0].reference_logprobs == pytest.approx((-100.0, -100.1, -7.0, -7.1))


def test_context_between_turns_is_supervised_if_it_has_a_weight() -> None:
    first, second = turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 50, 51], [6])
    other = turn([9], [7])
    made = Rollout(id="a", reward=1.0, turns=(first, second, other))
    for weight, supervised in ((0.0, ()), (0.3, ((4, 6),))):
        (sample, _) = prepare(group(9, [made, rollout("b", 0.0)]), PreprocessConfig(observation_weight=weight)).samples
        assert [one.supervised for one in sample.segments] == [supervised, ()]
        assert (sample.supervised_weight, sample.sampled_count) == (weight, 4)


def test_errors_name_the_group_and_the_rollout() -> None:
    bad = Rollout(id="g9/a3", turns=(Turn(prompt_ids=(), completion=rollout("x", 0).turns[0].completion),), reward=1.0)
    with pytest.raises(RolloutError, match=r"group 9, rollout 'g9/a3': turn 0 \(request x/0\) has an empty prompt"):
        prepare(group(9, [rollout("a", 1.0), bad]), PreprocessConfig())
    with pytest.raises(RolloutError, match="group 9: reward nan"):
        prepare(group(9, [rollout("a", float("nan"))]), PreprocessConfig())


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
