from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.config.schema import PreprocessConfig
from pipelinerl.errors import RolloutError
from pipelinerl.preprocess import Preprocessor
from pipelinerl.preprocess.preprocessor import advantages
from pipelinerl.types import FinishReason, Rollout, Segment, Turn
from tests.unit.group_parts import group, turn


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
    prepared = Preprocessor(PreprocessConfig(**settings)).process(group(9, measured))
    assert all(sample.metrics == {sample.id: 1.0} and sample.group_index == 9 for sample in prepared.samples)
    assert {sample.id: sample.advantage for sample in prepared.samples} == kept
    assert [sample.finished for sample in prepared.samples] == [
        one.turns[-1].completion.finish_reason == "stop" for one in rollouts if one.id in kept
    ]
    assert prepared.dropped_by_length == dropped
    assert prepared.dropped == {reason: len(lengths) for reason, lengths in dropped.items()}
    assert sorted([*kept, *chain(*prepared.dropped_ids.values())]) == [one.id for one in rollouts]


ROLLOUTS = st.tuples(
    st.sampled_from([0.0, 0.1, 0.5, 1.0]), st.integers(0, 4), st.sampled_from(["stop", "length"]), st.integers(0, 3)
)


CONFIGS = st.builds(
    PreprocessConfig,
    advantage=st.sampled_from(["group_mean", "leave_one_out"]),
    normalize_std=st.booleans(),
    zero_advantage=st.sampled_from(["skip", "keep", "drop"]),
    overlong=st.sampled_from(["keep", "drop"]),
)


@given(st.lists(ROLLOUTS, max_size=8), CONFIGS, st.booleans())
def test_every_rollout_ends_in_a_sample_or_in_one_count(
    attempts: list[tuple[float, int, FinishReason, int]], config: PreprocessConfig, score: bool
) -> None:
    made = [rollout(str(i), *attempt) for i, attempt in enumerate(attempts)]
    prepared = Preprocessor(config, TableScorer() if score else None).process(group(9, made))
    assert len(prepared.samples) + sum(prepared.dropped.values()) == len(made)
    assert [sample.id for sample in prepared.samples] == sorted(sample.id for sample in prepared.samples)
    expected = advantages([item.reward for item in made], baseline=config.advantage, normalize_std=config.normalize_std)
    for sample in prepared.samples:
        assert sample.advantage == expected[int(sample.id)]
        assert sample.sampled_count == len(sample.versions) == sum(len(s.sampled_positions) for s in sample.segments) > 0
        assert (sample.reference_logprobs is not None) == score


def test_the_reference_scores_all_kept_segments_in_one_call() -> None:
    scorer = TableScorer()
    config = PreprocessConfig(overlong="drop")
    prepared = Preprocessor(config, scorer).process(
        group(9, [rollout("a", 1.0, turns=2), rollout("b", 0.0, 9, "length"), rollout("c", 0.0, 2)])
    )
    (segments,) = scorer.calls
    assert segments == [segment for sample in prepared.samples for segment in sample.segments]
    assert [sample.reference_logprobs for sample in prepared.samples] == [
        pytest.approx((-100.0, -100.1, -100.2, -101.0, -101.1, -101.2)),
        pytest.approx((-100.0, -100.1)),
    ]


def test_errors_name_the_group_and_the_rollout() -> None:
    bad = Rollout(id="g9/a3", turns=(Turn(prompt_ids=(), completion=rollout("x", 0).turns[0].completion),), reward=1.0)
    with pytest.raises(RolloutError, match=r"group 9, rollout 'g9/a3': turn 0 \(request x/0\) has an empty prompt"):
        Preprocessor(PreprocessConfig()).process(group(9, [rollout("a", 1.0), bad]))
    with pytest.raises(RolloutError, match="group 9: reward nan"):
        Preprocessor(PreprocessConfig()).process(group(9, [rollout("a", float("nan"))]))
