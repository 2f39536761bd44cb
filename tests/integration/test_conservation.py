"""Every rollout that was started is trained on, dropped for a reason, queued or in progress, whatever goes wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.runs import assert_whole, groups, resume, run, steps, trained, write_environment

pytestmark = pytest.mark.slow

MISBEHAVES = """
def __init__(self, tokenizer, seed):
    super().__init__(tokenizer, seed)
    self.calls = 0

async def rollout(self, problem, client):
    self.calls += 1
    number = self.calls
    rollout = await super().rollout(problem, client)
    match number % 16:
        case 3:
            raise ValueError("the verifier crashed")
        case 5:
            return "garbage"
        case 7:
            return Rollout(turns=rollout.turns, reward=math.nan)
        case 9:
            await asyncio.Event().wait()
        case 13:
            return Rollout(turns=(), reward=1.0)
    return rollout
"""
# On a busy machine, rollouts that do nothing wrong exceed the short timeout too.
TIMEOUTS = {"actor__rollout_timeout_s": 1.0, "actor__max_failure_fraction": 1.0}


def test_an_environment_that_fails_in_every_way(tmp_path: Path) -> None:
    """The run goes on with what works; each failure is counted by its reason, in the summary and in the groups."""
    kind = write_environment(tmp_path, MISBEHAVES)
    run(tmp_path / "r", environment__kind=kind, trainer__steps=16, **TIMEOUTS)  # seconds, so that some expire
    counts = assert_whole(tmp_path / "r")
    assert counts["status"] == "finished"
    assert counts["rollouts_dropped"].keys() == {"raised", "bad_rollout", "timeout"}
    in_groups: dict[str, int] = {}
    for group in groups(tmp_path / "r"):
        assert group.started == 4 == len(group.rollouts) + sum(group.dropped.values())
        for reason, count in group.dropped.items():
            in_groups[reason] = in_groups.get(reason, 0) + count
    assert all(count <= counts["rollouts_dropped"][reason] for reason, count in in_groups.items())
    assert "ValueError: the verifier crashed" in (tmp_path / "r" / "logs" / "embedded.log").read_text()


@pytest.mark.parametrize("kind", ["pipeline", "conventional", "async"])
def test_overlong_completions_are_dropped_and_replaced(kind: str, tmp_path: Path) -> None:
    """Whatever is dropped out of a round, too: more is generated, and the run does not wait for ever."""
    settings = {"preprocess__overlong": "drop", "actor__max_tokens": 12, "trainer__steps": 4, "schedule__kind": kind}
    run(tmp_path / "r", **settings, schedule__steps_per_round=1 if kind == "pipeline" else 2)
    counts = assert_whole(tmp_path / "r")
    assert counts["status"] == "finished"
    assert counts["rollouts_dropped"]["overlong"] > 0
    ids = {rollout.id for group in groups(tmp_path / "r") for rollout in group.rollouts}
    assert {sample.id for record in trained(tmp_path / "r") for sample in record.samples} < ids


DROP_OLDEST = {"stream__when_full": "drop_oldest", "stream__capacity": 4, "engine__slots": 32}


@pytest.mark.parametrize("stream", ["memory", "files"])
def test_a_stream_that_drops_its_oldest_groups(stream: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer with a turn only now and then falls behind; what the stream replaces is counted."""
    from pipelinerl.trainer.trainer import Trainer

    turns, pump = [0], Trainer.pump

    def now_and_then(trainer: Trainer) -> bool:
        turns[0] += 1
        return pump(trainer) if turns[0] % 50 == 0 else False

    monkeypatch.setattr(Trainer, "pump", now_and_then)
    run(tmp_path / "r", stream__kind=stream, trainer__steps=3, **DROP_OLDEST)
    counts = assert_whole(tmp_path / "r")
    assert counts["rollouts_dropped"]["stream_full"] > 0
    assert counts["rollouts_dropped"]["stream_full"] % 4 == 0, "whole groups"


@pytest.mark.parametrize("max_lag", [0, 1])
def test_no_token_is_older_than_max_lag(max_lag: int, tmp_path: Path) -> None:
    """Also after a resume."""
    settings = {"schedule__max_lag": max_lag, "trainer__steps": 3, "engine__slots": 64}
    run(tmp_path / "r", **settings)
    assert_whole(tmp_path / "r")
    resume(tmp_path / "r", trainer__steps=6)
    assert_whole(tmp_path / "r")
    assert len(steps(tmp_path / "r")) == 6
    assert max(step.lag_max for step in steps(tmp_path / "r") if step.lag_max is not None) <= max_lag
    assert max(sample.lag_max for record in trained(tmp_path / "r") for sample in record.samples) <= max_lag


def test_batches_of_a_low_effective_sample_size_are_refused(tmp_path: Path) -> None:
    """A large learning rate and many steps in flight: the guard trips, waits for fresh data, and the run still ends."""
    settings = {"trainer__learning_rate": 2e-2, "trainer__ess_threshold": 0.9, "engine__slots": 64, "trainer__steps": 4}
    settings["stream__capacity"] = 64  # without the limit of the stock, which keeps data fresh
    run(tmp_path / "r", **settings)
    counts = assert_whole(tmp_path / "r")
    assert counts["status"] == "finished"
    assert counts["rollouts_dropped"]["ess_guard"] >= 16
    assert steps(tmp_path / "r")[-1].ess_guard_trips >= 1
    assert min(step.ess for step in steps(tmp_path / "r") if step.ess is not None) >= 0.9
