"""A run that was stopped goes on: nothing is lost, nothing is trained on twice, and the next step is the same."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file, save_file

from pipelinerl.checkpoint import CheckpointState, write_state
from pipelinerl.cli import main
from pipelinerl.errors import CheckpointError, EnvironmentSetupError, RunDirectoryError, RunInterruptedError
from pipelinerl.report.series import read_summary
from pipelinerl.trainer.trainer import Trainer
from tests.integration.runs import (
    assert_conserved,
    assert_gone_on,
    assert_provenance,
    assert_trained_once,
    flags,
    resume,
    run,
    steps,
    summary,
    trained,
    try_in_this_process,
    weights_checksum,
    write_environment,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"trainer__kl_coefficient": 0.1, "preprocess__zero_advantage": "keep"},
        {"model__lora__rank": 8, "trainer__learning_rate": 3e-3},
    ],
    ids=["default", "KL penalty", "adapters"],
)
def test_the_next_step_after_a_resume_is_the_same(other: dict[str, Any], tmp_path: Path) -> None:
    """On policy, so that nothing is in flight at the checkpoint: to the bit. The reference model is not the checkpoint."""
    settings = {"schedule__kind": "conventional", "trainer__keep_checkpoints": 10, **other}
    run(tmp_path / "straight", trainer__steps=4, trainer__checkpoint_every=3, **settings)
    run(tmp_path / "halves", trainer__steps=2, **settings)
    resume(tmp_path / "halves", trainer__steps=3)
    resume(tmp_path / "halves", trainer__steps=4)
    for version in (3, 4):
        checkpoint = Path("checkpoints") / f"step_{version:08d}"
        assert weights_checksum(tmp_path / "straight" / checkpoint) == weights_checksum(tmp_path / "halves" / checkpoint)
    assert trained(tmp_path / "straight") == trained(tmp_path / "halves")
    assert_gone_on(tmp_path / "halves", 4)


@pytest.mark.parametrize("schedule", ["pipeline", "async"])
def test_a_resume_with_groups_on_their_way(schedule: str, tmp_path: Path) -> None:
    """Batches that are no multiple of a group: some are half trained on when the run stops."""
    rounds = {} if schedule == "pipeline" else {"schedule__steps_per_round": 2}
    settings = {"schedule__kind": schedule, "trainer__batch_size": 10, **rounds}
    run_dir = tmp_path / "r"
    assert_conserved(run(run_dir, trainer__steps=3, **settings))
    for goal in (4, 6):
        assert_conserved(resume(run_dir, trainer__steps=goal))
        assert_trained_once(run_dir)
        assert_provenance(run_dir)
    assert [step.version for step in steps(run_dir)] == list(range(1, 7))
    assert summary(run_dir)["rollouts_trained"] == 60


def test_a_stop_right_after_a_resume_conserves_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The groups in the stream that are dealt with already, or in part, count for what is left of them."""
    run_dir = tmp_path / "r"
    run(run_dir, trainer__steps=3, trainer__batch_size=10, stream__capacity=20, engine__slots=64)

    def interrupted(_trainer: Trainer) -> bool:
        os.kill(os.getpid(), signal.SIGINT)
        return False

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "pump", interrupted)
        with pytest.raises(RunInterruptedError, match="--resume"):
            resume(run_dir, trainer__steps=5)
    assert_conserved(summary(run_dir))
    assert_conserved(resume(run_dir, trainer__steps=5))
    assert_trained_once(run_dir)


def test_a_damaged_checkpoint_is_one_clear_error(tmp_path: Path) -> None:
    run_dir = tmp_path / "r"
    run(run_dir, trainer__steps=2, trainer__checkpoint_every=1)
    weights = run_dir / "checkpoints" / "step_00000002" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged.*delete this checkpoint"):
        resume(run_dir, trainer__steps=4)
    shutil.rmtree(weights.parent)
    assert resume(run_dir, trainer__steps=4)["version"] == 4
    assert_trained_once(run_dir)


def test_a_finished_run_stays_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has nothing to go on with, can't have a goal below what was reached, and no other run may have its folder."""
    run_dir = tmp_path / "r"
    first = run(run_dir, trainer__steps=2)
    before = {name: (run_dir / name).read_bytes() for name in ("summary.json", "config.yaml", "metrics.jsonl")}
    capsys.readouterr()
    assert resume(run_dir) == first
    assert "has reached its goal of 2 steps" in capsys.readouterr().out
    with pytest.raises(RunDirectoryError, match=r"is at version 2, beyond trainer\.steps 1: set"):
        resume(run_dir, trainer__steps=1)
    assert main(["train", *flags(run_dir)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "already has a run" in error
    assert {name: (run_dir / name).read_bytes() for name in before} == before
    (run_dir / "summary.json").write_text("{")
    written = resume(run_dir)
    assert written["version"] == 2
    assert read_summary(run_dir) == written


def test_a_resume_that_fails_leaves_the_settings_and_the_records_as_they_were(tmp_path: Path) -> None:
    run_dir, broken = tmp_path / "r", tmp_path / "broken"
    body = f"""
    def __init__(self, tokenizer, seed):
        super().__init__(tokenizer, seed)
        if open({str(tmp_path / "broken")!r}).read():
            raise ValueError("broken")
    """
    broken.write_text("")
    run(run_dir, trainer__steps=2, environment__kind=write_environment(tmp_path, body))
    names = ("config.yaml", "sessions.jsonl", "metrics.jsonl", "rollouts/trained.jsonl")
    before = {name: (run_dir / name).read_bytes() for name in names}
    broken.write_text("yes")
    with pytest.raises(EnvironmentSetupError, match="broken"):
        resume(run_dir, trainer__steps=4, actor__group_size=2)
    assert {name: (run_dir / name).read_bytes() for name in names} == before
    broken.write_text("")
    resume(run_dir, trainer__steps=4)
    assert_gone_on(run_dir, 4)


def test_a_stream_in_memory_can_not_be_resumed(tmp_path: Path) -> None:
    run(tmp_path / "memory", trainer__steps=1, stream__kind="memory")
    with pytest.raises(RunDirectoryError, match="its stream was in memory"):
        resume(tmp_path / "memory", trainer__steps=2)


def test_a_run_without_a_checkpoint_starts_again_in_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Records of both beginnings are there, and do not mix."""
    run_dir = tmp_path / "r"
    for times in (1, 2):
        (run if times == 1 else resume)(run_dir, trainer__steps=times + 1)
        shutil.rmtree(run_dir / "checkpoints" / f"step_{times + 1:08d}")
    capsys.readouterr()
    counts = resume(run_dir, trainer__steps=2)
    kept = run_dir / "before-2"
    said = f"{run_dir} has no checkpoint: it starts again from the beginning; the records of its first 3 steps are in {kept}"
    assert said in capsys.readouterr().out
    assert (counts["status"], counts["resumed_from"], counts["optimizer_steps"]) == ("finished", None, 2)
    assert_conserved(counts)
    assert_trained_once(run_dir)
    assert [step.version for step in steps(run_dir)] == [1, 2]
    assert [len(steps(run_dir / f"before-{times}")) for times in (1, 2)] == [2, 3]
    assert len(trained(kept)) == 3


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two sessions, in which a group is trained on in part."""
    run_dir = tmp_path_factory.mktemp("records") / "r"
    run(run_dir, trainer__steps=3, trainer__batch_size=10, stream__capacity=20, engine__slots=64)
    resume(run_dir, trainer__steps=5, trainer__learning_rate=2e-3)
    return run_dir


@pytest.mark.parametrize("name", ["metrics.jsonl", "sessions.jsonl", "published.jsonl", "control/plan.json"])
def test_damaged_records_are_one_clear_error(name: str, stopped: Path, tmp_path: Path) -> None:
    run_dir = Path(shutil.copytree(stopped, tmp_path / "r"))
    lines = (run_dir / name).read_bytes().splitlines(keepends=True)
    (run_dir / name).write_bytes(b"".join([lines[0][:40], b"\n", *lines[1:]]))
    with pytest.raises(RunDirectoryError) as raised:
        resume(run_dir, trainer__steps=7)
    assert str(run_dir / name) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_weights_that_the_run_did_not_publish_are_refused(stopped: Path, tmp_path: Path) -> None:
    """Also if all checksums in the checkpoint were made right."""
    run_dir = Path(shutil.copytree(stopped, tmp_path / "r"))
    checkpoint = run_dir / "checkpoints" / "step_00000005"
    tensors = load_file(checkpoint / "model.safetensors")
    next(iter(tensors.values()))[0] += 0.01
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    state = msgspec.json.decode((checkpoint / "state.json").read_bytes())["state"]
    write_state(checkpoint, msgspec.convert(state, CheckpointState))
    published = (run_dir / "published.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=r"version 5 was changed: the run has published other weights .* delete it"):
        resume(run_dir, trainer__steps=7)
    assert (run_dir / "published.jsonl").read_bytes() == published


def test_other_data_is_named_when_a_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    try_in_this_process(monkeypatch)
    run_dir, data, reward = tmp_path / "r", tmp_path / "data.jsonl", tmp_path / "reward.py"
    data.write_text("".join(json.dumps({"prompt": f"{i},{i + 1}:"}) + "\n" for i in range(10, 34)))
    reward.write_text("def reward(completion, example):\n    return float(len(completion))\n")
    args = json.dumps({"data": str(data), "reward": f"{reward}:reward", "isolate": False})
    run(run_dir, trainer__steps=3, environment__kind="function", environment__args=args)
    reward.write_text(reward.read_text() + "\n")
    capsys.readouterr()
    resume(run_dir, trainer__steps=4)
    said = capsys.readouterr().out
    assert f"changed: the content of {reward}\n" in said
    assert "warning: problems that are held out now may have been trained on before\n" in said
    resume(run_dir, trainer__steps=5)
    assert "the content of" not in capsys.readouterr().out


PIPELINE = {"schedule__kind": "pipeline", "schedule__steps_per_round": 1}
ROUNDS_OF_4 = {"schedule__kind": "conventional", "schedule__steps_per_round": 4}
ROUNDS_OF_2 = {"schedule__kind": "conventional", "schedule__steps_per_round": 2}
ASYNC_ROUNDS = {"schedule__kind": "async", "schedule__steps_per_round": 2}


@pytest.mark.parametrize(
    ("before", "after"),
    [(PIPELINE, ROUNDS_OF_2), (ROUNDS_OF_4, ROUNDS_OF_2), (ROUNDS_OF_4, PIPELINE), (PIPELINE, ASYNC_ROUNDS)],
    ids=["pipeline to rounds", "shorter rounds", "rounds to pipeline", "pipeline to async"],
)
def test_a_run_goes_on_under_another_schedule(before: dict[str, object], after: dict[str, object], tmp_path: Path) -> None:
    """In the middle of what was a round, or would be one."""
    run_dir = tmp_path / "r"
    run(run_dir, trainer__steps=3, **before)
    resume(run_dir, trainer__steps=6, **after)
    assert_gone_on(run_dir, 6)
    if after is ROUNDS_OF_2:
        assert [step.lag_max or 0 for step in steps(run_dir)][4:] == [0, 1]
