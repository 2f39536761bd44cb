"""The online difficulty filter: which problems it skips, how often, and what it reads from the records of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipelinerl.actor.difficulty import OnlineFilter
from pipelinerl.config.load import load_config
from pipelinerl.config.schema import OnlineFilterConfig
from pipelinerl.errors import ConfigError, RunDirectoryError
from pipelinerl.types import GroupLedger, Rollout
from tests.unit.group_parts import group

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
