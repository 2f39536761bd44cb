"""The trainer's queue: order, lag bound, conservation, and positions that a resumed run continues from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.checkpoint import QueueCounts, QueuePosition
from pipelinerl.config.schema import PreprocessConfig
from pipelinerl.errors import StreamError
from pipelinerl.preprocess.preprocessor import prepare
from pipelinerl.trainer.queue import SampleQueue
from pipelinerl.types import DroppedRollout, Group, GroupLedger, Rollout
from tests.unit.group_parts import GroupStream, group, turn


def make_group(index: int, size: int = 3, versions: Sequence[int] = (0, 0), rewards: Sequence[float] | None = None) -> Group:
    """`versions` of the tokens of every rollout; rollout k has k tokens more, of the last version."""
    rollouts = []
    for attempt in range(size):
        tokens = [*versions, *[versions[-1]] * attempt]
        reward = float(attempt) if rewards is None else rewards[attempt]
        name = f"{index}/{attempt}"
        turns = (turn((1, 2), range(len(tokens)), -1.0, tokens, name=name),)
        rollouts.append(Rollout(turns=turns, reward=reward, id=name, attempt=attempt))
    return group(index, rollouts)


@dataclass
class Setup:
    """A queue over a list of groups, of which the first may be gone."""

    groups: Sequence[Group]
    config: PreprocessConfig = field(default_factory=PreprocessConfig)
    by_index: bool = False

    def queue(self, position: QueuePosition | None = None, counts: QueueCounts | None = None) -> SampleQueue:
        self.reader = GroupStream(partial(prepare, config=self.config))
        for each in self.groups:
            self.reader.write(each)
        queue = SampleQueue(self.reader, by_index=self.by_index, position=position, counts=counts)
        if position is not None:
            self.reader.read(position.offset)  # a resumed stream starts at its committed offset
        return queue


def pull_all(queue: SampleQueue) -> None:
    while queue.pull():
        pass


def ids(samples: Sequence[object] | None) -> list[str]:
    assert samples is not None
    return [sample.id for sample in samples]  # type: ignore[attr-defined]


@pytest.mark.parametrize("by_index", [False, True])
def test_samples_are_taken_in_the_order_of_completion_or_of_their_groups(by_index: bool) -> None:
    order = [2, 0, 3, 1]
    queue = Setup([make_group(index) for index in order], by_index=by_index).queue()
    assert queue.queued == 0
    for _ in range(3):
        assert queue.pull()
    assert ids(queue.take(4)) == (["0/0", "0/1", "0/2", "2/0"] if by_index else ["2/0", "2/1", "2/2", "0/0"])
    assert queue.pull()
    assert not queue.pull()
    rest = ["1/0", "1/1", "1/2", "2/1", "2/2", "3/0"] if by_index else ["0/1", "0/2", "3/0", "3/1", "3/2", "1/0"]
    assert ids(queue.take(6)) == rest


def test_a_sample_with_a_token_that_is_too_old_is_dropped_at_hand_or_when_it_comes() -> None:
    groups = [make_group(0, versions=(0, 3)), make_group(1, versions=(1, 3)), make_group(2, versions=(0, 3))]
    queue = Setup(groups).queue()
    queue.pull()
    queue.pull()
    queue.require(1, "stale")
    assert queue.dropped == {"stale": 3}
    found = [(one.id, one.reason, one.tokens) for one in queue.take_dropped()]
    assert found == [("0/0", "stale", 2), ("0/1", "stale", 3), ("0/2", "stale", 4)]
    assert queue.take_dropped() == []
    queue.pull()
    assert queue.dropped == {"stale": 6}
    assert ids(queue.take(3)) == ["1/0", "1/1", "1/2"]
    assert queue.queued == 0
    assert queue.position().ledger.below == 1, "group 0 is dealt with, and 1 is in hand"


def test_the_latest_requirement_is_the_one_that_holds() -> None:
    queue = Setup([make_group(0, versions=(0, 0)), make_group(1, versions=(4, 4))]).queue()
    queue.require(5, "ess_guard")
    queue.pull()
    queue.require(0, "stale")
    queue.pull()
    assert queue.dropped == {"ess_guard": 3}
    assert queue.queued == 3


def test_what_the_preprocessor_drops_is_counted_with_its_length() -> None:
    config = PreprocessConfig(zero_advantage="drop")
    queue = Setup([make_group(0, rewards=(1.0, 1.0, 1.0)), make_group(1, rewards=(0.0, 2.0, 1.0))], config=config).queue()
    pull_all(queue)
    assert queue.dropped == {"zero_advantage": 4}
    expected = [("0/0", 2), ("0/1", 3), ("0/2", 4), ("1/2", 4)]
    assert queue.take_dropped() == [DroppedRollout(name, "zero_advantage", tokens, 1.0) for name, tokens in expected]
    assert queue.outstanding == queue.queued == 2
    assert 0 in {*range(queue.position().ledger.below)}
    assert queue.sampled_length_mean == 3.0, "the mean is over all that came in, dropped or not"


def test_a_group_that_is_delivered_twice_is_trained_on_once() -> None:
    queue = Setup([make_group(0), make_group(0), make_group(1), make_group(0)]).queue()
    queue.pull()
    queue.mark_trained(queue.take(1))
    queue.pull()
    assert queue.queued == 2, "while the first copy is open"
    queue.mark_trained(queue.take(2))
    pull_all(queue)
    assert queue.queued == 3, "only group 1"
    queue.mark_trained(queue.take(3))
    assert queue.counts == QueueCounts(trained=6, dropped={})


def test_two_groups_of_one_index_are_an_error() -> None:
    queue = Setup([make_group(0), make_group(0, size=4)]).queue()
    queue.pull()
    with pytest.raises(StreamError, match="two groups of index 0 came"):
        queue.pull()


Action = st.one_of(
    st.just(("pull", 0)), st.tuples(st.sampled_from(["train", "refuse"]), st.integers(1, 5)), st.just(("resume", 0))
)


@given(
    sizes=st.lists(st.integers(0, 4), max_size=12),
    ages=st.lists(st.integers(0, 6), min_size=12, max_size=12),
    flat=st.sets(st.integers(0, 11)),
    actions=st.lists(Action, max_size=40),
    oldest=st.sampled_from([0, 4, 6]),
    by_index=st.booleans(),
)
@settings(max_examples=200)
def test_every_rollout_ends_in_exactly_one_place_over_any_number_of_resumes(  # noqa: PLR0917 - hypothesis names them
    sizes: list[int], ages: list[int], flat: set[int], actions: list[tuple[str, int]], oldest: int, by_index: bool
) -> None:
    """Trains, refuses and resumes at random; then checks what became of each rollout, and that the counts agree."""
    groups = [
        make_group(i, size, versions=(ages[i], ages[i]), rewards=[1.0] * size if i in flat else None)
        for i, size in reversed(list(enumerate(sizes)))
    ]
    setup = Setup(groups, PreprocessConfig(zero_advantage="drop"), by_index)
    queue = setup.queue()
    queue.require(oldest, "stale")
    trained: list[str] = []
    for action, count in actions:
        if action == "pull":
            queue.pull()
        elif action == "resume":
            position = msgspec.json.decode(msgspec.json.encode(queue.position()), type=QueuePosition)
            queue = setup.queue(position, queue.counts)
            queue.require(oldest, "stale")
        elif samples := queue.take(min(count, queue.queued)):
            assert min(v for sample in samples for v in sample.versions) >= oldest
            if action == "train":
                queue.mark_trained(samples)
                trained += ids(samples)
            else:
                queue.drop(samples, "ess_guard")
    assert len(set(trained)) == len(trained) == queue.trained
    pull_all(queue)
    rollouts = sum(sizes)
    assert queue.trained + sum(queue.dropped.values()) + queue.outstanding == rollouts
    assert queue.outstanding == queue.queued
    while queue.queued:
        queue.mark_trained(queue.take(1))
    assert queue.position() == QueuePosition(offset=len(groups), ledger=GroupLedger(len(groups)))
