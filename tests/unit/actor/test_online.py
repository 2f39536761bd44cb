"""What goes on while a run trains: evaluations, when they are due and what they take; which problems the filter skips."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipelinerl.actor.difficulty import OnlineFilter
from pipelinerl.config.load import load_config
from pipelinerl.config.schema import EvaluationConfig, OnlineFilterConfig
from pipelinerl.errors import ConfigError, RunDirectoryError
from pipelinerl.metrics.evaluations import EvaluationRecord
from pipelinerl.types import GroupLedger, Rollout
from tests.unit.actor.test_actor import Harness
from tests.unit.group_parts import group


class Watched:
    """A harness whose actor evaluates online."""

    def __init__(self, environment=None, *, every=2, share=0.25, slots=8, **options):
        evaluation = EvaluationConfig(problems=6, every=every, share=share)
        self.harness = Harness(environment, slots=slots, evaluation=evaluation, **options)
        self.evaluations = self.harness.evaluations
        self.most = 0

    @property
    def done(self) -> list[EvaluationRecord]:
        return [record for record, _ in self.harness.evaluated]

    def at(self, version: int) -> None:
        self.harness.engine.version = version

    async def iterate(self, times: int) -> None:
        for _ in range(times):
            await self.harness.iterate(1)
            self.most = max(self.most, len(self.asked()) - self.evaluations.answered)

    def asked(self) -> list[str]:
        return [request.id for request in self.harness.engine.requests if request.id.startswith("evaluation")]


async def test_it_goes_on_between_rollouts_in_its_share_of_the_slots():
    watched = Watched(groups=40)
    await watched.iterate(3)
    assert watched.asked() == []
    watched.at(2)
    await watched.iterate(8)
    watched.at(3)
    assert "evaluates since version 2" in watched.evaluations.status
    await watched.iterate(60)
    ((evaluation, answers),) = watched.harness.evaluated
    assert (evaluation.name, evaluation.when, evaluation.version) == ("v2", "online", 2)
    assert (evaluation.reward_mean, evaluation.failed, evaluation.skipped) == (1.0, {}, 0)
    assert [problem.problem_id for problem in answers] == [f"h{n}" for n in range(6)]
    assert watched.most == 2
    assert (evaluation.version_min, evaluation.version_max, evaluation.completion_length_mean) == (2, 3, 6)
    spanning = [problem for problem in answers if len(problem.weight_versions) == 2]
    assert spanning, "weights are not held back by it"
    assert watched.harness.progress().evaluations == {"v2": 1.0}
    progress = watched.harness.progress()
    assert progress.rollouts_started == progress.rollouts_handed_over == 80
    assert watched.harness.state.outstanding == 80
    assert len(watched.harness.read()) == 40


def test_rollouts_are_drawn_with_the_numbers_they_have_without_it():
    def requests(every):
        watched = Watched(groups=6, every=every)

        async def main():
            watched.at(2)
            await watched.iterate(80)

        asyncio.run(main())
        found = {request.id: request for request in watched.harness.engine.requests}
        return {name: request for name, request in found.items() if name.startswith("g")}

    assert requests(every=1) == requests(every=50)


async def test_due_at_every_multiple_that_is_passed_and_never_two_at_once(caplog):
    caplog.set_level(logging.WARNING)
    watched = Watched(every=5, reached=7, until=40, groups=0)
    for version in (7, 9):
        watched.at(version)
        await watched.iterate(2)
    assert watched.asked() == [], "that of version 5 has taken place"
    watched.at(11)
    await watched.iterate(1)
    watched.at(23)
    await watched.iterate(30)
    watched.at(26)
    await watched.iterate(30)
    watched.at(40)
    await watched.iterate(2)
    assert [(evaluation.version, evaluation.skipped) for evaluation in watched.done] == [(11, 1), (26, 0)]
    assert "the evaluation due at version 23 is skipped: evaluates since version 11: 0 of 6" in caplog.text
    assert watched.harness.progress().evaluations == {"v26": 1.0}


async def test_training_does_not_wait_for_one_at_its_end(caplog):
    caplog.set_level(logging.WARNING)
    watched = Watched(groups=2)
    watched.at(4)
    await watched.iterate(3)
    await watched.harness.actor.stop()
    assert watched.done == []
    assert watched.harness.engine.in_progress == 0
    assert sorted(watched.asked()) == sorted(
        request for request in watched.harness.engine.cancelled if request.startswith("evaluation")
    )
    await watched.harness.actor.stop()
    await watched.harness.actor.evaluate("after")
    assert [(evaluation.name, evaluation.skipped) for evaluation in watched.done] == [("after", 1)]
    assert "cancelled because training is over" in caplog.text


async def test_one_that_ends_with_training_is_not_given_up():
    watched = Watched(groups=0, every=1, share=1.0)
    evaluations = watched.evaluations
    assert evaluations.advance(3)
    for _ in range(20):
        await asyncio.sleep(0)
        await watched.harness.groups.context.engine.advance()
    evaluations.end()
    assert [(evaluation.version, evaluation.skipped) for evaluation in watched.done] == [(3, 0)]
    assert (evaluations.answered, evaluations.running) == (6, 0)


SOLVED, FAILED, MIXED = [1.0, 1.0], [0.0, 0.0], [0.0, 1.0]


def made(seed: int = 0, **config: float) -> OnlineFilter:
    return OnlineFilter(OnlineFilterConfig(**config), seed)


def test_a_problem_is_skipped_more_often_with_each_group_of_equal_rewards_and_always_comes_back() -> None:
    skips = made(keep=0.5, at_least=0.1)
    turns = range(10_000)
    for number, (rewards, expected) in enumerate(
        [(None, 1.0), (SOLVED, 0.5), (FAILED, 0.25), (SOLVED, 0.125), *[(SOLVED, 0.1)] * 3]
    ):
        if rewards:
            skips.observe(number, "p", rewards)
        found = [skips.decide(index, "p") for index in turns]
        assert found.count(None) / len(turns) == pytest.approx(expected, abs=0.02)
        assert {skip.probability for skip in found if skip} <= {expected}, "what is recorded is what was drawn with"
    skips.observe(9, "p", MIXED)
    assert not any(skips.decide(index, "p") for index in turns)
    assert not any(skips.decide(index, "another") for index in turns)


def recorded(index: int, problem: str, rewards: list[float]) -> bytes:
    rollouts = [Rollout(turns=(), reward=reward) for reward in rewards]
    return msgspec.json.encode(group(index, rollouts, problem)) + b"\n"


def test_only_groups_that_a_resume_keeps_are_read_and_of_two_with_the_same_index_the_later_one(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    made().read(path, GroupLedger(), 0)  # there are none yet
    before = [recorded(0, "p", SOLVED), recorded(1, "q", SOLVED), recorded(2, "r", SOLVED), recorded(1, "q", MIXED)]
    now = [recorded(2, "r", FAILED), recorded(3, "p", SOLVED)]
    path.write_bytes(b"".join([*before, *now]) + b'{"index":4,')
    skips = made(keep=0.01, at_least=0.01)
    skips.read(path, GroupLedger(2), len(b"".join(before)))
    p, q, r = ({skips.decide(index, problem) for index in range(20)} - {None} for problem in "pqr")
    assert [(skip.equal_groups, skip.last_group) for skip in (*p, *q, *r)] == [(2, 3), (1, 2)]
    assert [skip.reward_mean for skip in (*p, *r)] == [1.0, 0.0]
    path.write_bytes(recorded(0, "p", SOLVED) + b"{}\n")
    with pytest.raises(RunDirectoryError, match=r"damaged records: .*rollouts\.jsonl, line 2: "):
        made().read(path, GroupLedger(), 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["--engine.processes=2"], "set engine.processes to 1"),
        (["--launch.kind=ray"], "launch.kind to processes"),
        (["--stream.when_full=drop_oldest"], "set stream.when_full to block"),
    ],
)
def test_what_it_cannot_work_with_is_refused(settings: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"actor\.online_filter: .*{message}"):
        load_config(None, ["--actor.online_filter={}", *settings])
