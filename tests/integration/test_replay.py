"""A run that is repeated from its records: every bit of its weights, its log-probs, and what differs is named."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipelinerl.checkpoint import CheckpointState, write_state
from pipelinerl.cli import main
from pipelinerl.errors import RunDirectoryError
from pipelinerl.experiments.replay.replay import ReplayResult, replay
from tests.integration.runs import (
    resume,
    run,
    run_processes,
    steps,
    summary,
    trained,
    weights_checksum,
    write_environment,
)

pytestmark = pytest.mark.slow

KL = {"trainer__kl_coefficient": 0.05, "preprocess__zero_advantage": "keep"}
ROLLOUTS = "rollouts/rollouts.jsonl"
TRAINED = "rollouts/trained.jsonl"


def replayed(run_dir: Path, *settings: str, **options: Any) -> ReplayResult:
    return replay(run_dir, settings, **options)


def assert_repeated(run_dir: Path, versions: int, verify: int = 3) -> ReplayResult:
    """Training, to the bit, and generation."""
    result = replayed(run_dir, verify=verify)
    assert result.differences == []
    assert (len(result.compared), result.unrecorded) == (versions, set())
    assert result.steps == summary(run_dir)["version"]
    assert result.generation is not None
    assert result.generation.groups == verify
    assert result.generation.tokens > 0
    return result


@pytest.fixture(scope="module")
def pipelined(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipelined run in one process, resumed once with other settings, in which the ESS guard rejected batches."""
    run_dir = tmp_path_factory.mktemp("replay") / "r"
    run(run_dir, trainer__steps=2, trainer__ess_threshold=0.98, trainer__learning_rate=3e-3, engine__slots=32)
    resume(run_dir, trainer__steps=4, trainer__learning_rate=2e-3)
    assert any(record.refused for record in trained(run_dir))
    return run_dir


@pytest.fixture
def copied(pipelined: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pipelined, tmp_path / "copy"))


# ---- training and generation are repeated


def test_a_resumed_run_is_repeated_with_the_batches_that_the_guard_rejected(pipelined: Path) -> None:
    result = assert_repeated(pipelined, 5)
    assert result.generation is not None
    assert result.generation.drawn == result.generation.tokens


DELTAS = {"weights__kind": "collective", "weights__encoding": "delta"}
ADAPTERS = {"model__lora__rank": 4, "weights__encoding": "adapter", "trainer__learning_rate": 3e-3}
TWO = {"trainer__ranks": 2, "engine__processes": 2}


@pytest.mark.parametrize(
    ("start", "settings", "versions"),
    [
        (run, {"schedule__kind": "conventional", "schedule__steps_per_round": 3, "trainer__steps": 5}, 3),
        (run, {"schedule__kind": "async", "schedule__steps_per_round": 2}, 3),
        pytest.param(run_processes, {"engine__slots": 32}, 5, marks=pytest.mark.exhaustive),
        pytest.param(run_processes, DELTAS, 5, marks=pytest.mark.exhaustive),
        (run_processes, ADAPTERS, 5),
        pytest.param(run_processes, {**ADAPTERS, "weights__kind": "collective", **TWO}, 5, marks=pytest.mark.exhaustive),
        pytest.param(run_processes, {"launch__preprocessor": "process", **KL}, 5, marks=pytest.mark.exhaustive),
        pytest.param(run_processes, {"trainer__ranks": 2, **KL}, 5, marks=pytest.mark.exhaustive),
        pytest.param(run_processes, {"engine__kind": "http", "engine__servers": 2}, 5, marks=pytest.mark.exhaustive),
    ],
    ids=[
        *("conventional, in the middle of a round", "async", "processes", "deltas", "adapters", "adapters, broadcast"),
        *("preprocessor apart", "ranks", "servers"),
    ],
)
def test_every_kind_of_run_is_repeated(start: Any, settings: dict[str, Any], versions: int, tmp_path: Path) -> None:
    start(tmp_path / "r", **{"trainer__steps": 4, **settings})
    sent = {step.update.encoding for step in steps(tmp_path / "r") if step.update is not None}
    assert sent <= {"full", settings.get("weights__encoding", "full")}
    assert (sent == {"adapter"}) == ("model__lora__rank" in settings)
    assert_repeated(tmp_path / "r", versions)


def test_a_resumed_run_with_adapters_and_a_reference_model_is_repeated(tmp_path: Path) -> None:
    run(tmp_path / "r", trainer__steps=2, model__lora__rank=4, trainer__learning_rate=3e-3, **KL)
    resume(tmp_path / "r", trainer__steps=4)
    assert_repeated(tmp_path / "r", 5)


def test_a_run_is_repeated_without_the_steps_that_it_lost(tmp_path: Path) -> None:
    """The record of a step that was taken twice counts as it was taken last."""
    run_dir = tmp_path / "r"
    run(run_dir, trainer__steps=3, trainer__checkpoint_every=2, trainer__learning_rate=3e-3)
    shutil.rmtree(run_dir / "checkpoints" / "step_00000003")
    lost = trained(run_dir)[-1]
    resume(run_dir, trainer__steps=4)
    assert lost != trained(run_dir)[-2]
    assert_repeated(run_dir, 5)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_generation_is_repeated_from_the_versions_that_were_kept(kv: str, tmp_path: Path) -> None:
    """Without training. A switch that is recorded one token too early is noticed."""
    run_dir = tmp_path / "r"
    settings = {"engine__kv_on_update": kv, "engine__slots": 32, "trainer__learning_rate": 5e-3}
    run(run_dir, trainer__weights_every=1, **settings)
    assert len(list((run_dir / "weights").iterdir())) == 5
    result = replayed(run_dir, steps=0, verify=1000)
    assert result.differences == []
    assert result.generation is not None
    assert result.generation.switches >= 10
    assert result.generation.drawn == result.generation.tokens
    changed = change_group(run_dir, _shift_first_switch)
    (difference, *_) = replayed(run_dir, steps=0, verify=1000).differences
    assert f"rollout {changed}, token" in difference
    assert "its log-prob is" in difference


TURNS = """
async def rollout(self, problem, client):
    turns, prompt = [], tuple(self.tokenizer.encode(self.prompt(problem) * 3))
    for _ in range(4):
        done = await client.generate(prompt, max_tokens=12)
        turns.append(Turn(prompt_ids=prompt, completion=done, text=self.tokenizer.decode(done.answer_ids)))
        prompt = (*prompt, *done.token_ids, *self.tokenizer.encode(",12,1"))
    return Rollout(turns=tuple(turns), reward=sum(turn.text.count("1") for turn in turns) / 48)
"""


def test_turns_that_read_entries_of_older_weights_are_repeated(tmp_path: Path) -> None:
    """Of the recorded versions: with others the log-probs differ."""
    run_dir = tmp_path / "r"
    settings = {"engine__slots": 32, "trainer__learning_rate": 5e-3, "trainer__weights_every": 1}
    kind = write_environment(tmp_path, TURNS, ["from pipelinerl.types import Turn"])
    run(run_dir, environment__kind=kind, **settings)
    result = replayed(run_dir, steps=0, verify=1000)
    assert (result.differences, result.exact) == ([], True)
    changed = change_group(run_dir, _read_newer_entries)
    (difference, *_) = replayed(run_dir, steps=0, verify=1000).differences
    assert f"rollout {changed}, turn" in difference


def _read_newer_entries(rollout: dict[str, Any]) -> bool:
    for turn in rollout["turns"][1:]:
        versions = turn["completion"]["prompt_versions"]
        if len(versions) > 1 and versions[0]["end"] > 30:
            versions[0]["end"] = versions[1]["start"] = 1
            return True
    return False


def _shift_first_switch(rollout: dict[str, Any]) -> bool:
    for turn in rollout["turns"]:
        first, *others = turn["completion"]["weight_versions"]
        if others and first["end"] - first["start"] > 1:
            first["end"] -= 1
            others[0]["start"] -= 1
            return True
    return False


# ---- what differs is named


def change_group(run_dir: Path, change: Callable[[dict[str, Any]], bool]) -> str:
    """Apply `change` to the recorded rollouts that were trained on, until it returns True. Returns the rollout's id."""
    ids = {sample.id for record in trained(run_dir) for sample in record.samples}
    groups = read(run_dir / ROLLOUTS)
    for group in groups:
        for rollout in group["rollouts"]:
            if rollout["id"] in ids and change(rollout):
                write(run_dir / ROLLOUTS, groups)
                return str(rollout["id"])
    raise AssertionError("no rollout could be changed")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def _another(field: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], bool]:
    """Changes the first entry of a field of the first completion, or a field of the rollout."""

    def changed(rollout: dict[str, Any]) -> bool:
        if field in rollout:
            rollout[field] = change(rollout[field])
        else:
            values = rollout["turns"][0]["completion"][field]
            values[0] = change(values[0])
        return True

    return changed


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (_another("token_ids", lambda token: token ^ 1), "tokens or versions"),
        (_another("logprobs", lambda value: value - 1e-9), "log-probs"),
        (_another("reward", lambda value: value + 0.25), "advantages"),
    ],
)
def test_a_changed_rollout_is_named_with_its_step(change: Any, what: str, copied: Path) -> None:
    rollout = change_group(copied, change)
    version = next(r.version for r in trained(copied) for sample in r.samples if sample.id == rollout)
    named = f"the batch of step {version} has other {what} than were trained on, in "
    (found,) = (text for text in replayed(copied).differences if text.startswith(named))
    assert rollout in found or what == "advantages"


def test_the_first_version_and_parameter_that_differ_are_named(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Here: since the record says another learning rate than was used, from the second session on."""
    first, second = read(copied / "sessions.jsonl")
    second["config"]["trainer"]["learning_rate"] *= 1.001
    write(copied / "sessions.jsonl", [first, second])
    assert main(["replay", str(copied)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "is not repeated: the weights of version 3 differ from the run's, first in parameter model." in error


def test_a_step_that_differs_is_named_if_its_version_was_not_published(tmp_path: Path) -> None:
    run(tmp_path / "r", schedule__kind="conventional", schedule__steps_per_round=3, trainer__steps=3)
    records = read(tmp_path / "r" / TRAINED)
    records[1]["samples"].reverse()
    write(tmp_path / "r" / TRAINED, records)
    (difference,) = replayed(tmp_path / "r").differences
    assert difference.startswith("step 2 has ")
    assert "; the weights of version 3 differ" in difference


@pytest.mark.parametrize("hidden", [False, True])
def test_a_checkpoint_with_other_weights_is_named(hidden: bool, copied: Path) -> None:
    """Also if its own checksums were made right."""
    checkpoint = copied / "checkpoints" / "step_00000004"
    weights = checkpoint / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    if hidden:
        state = msgspec.convert(json.loads((checkpoint / "state.json").read_text())["state"], CheckpointState)
        write_state(checkpoint, state)
    (difference,) = replayed(copied).differences
    assert str(checkpoint) in difference
    assert ("the run published as version 4" if hidden else "model.safetensors is damaged") in difference


def _one_more_refused(records: list[dict[str, Any]]) -> None:
    record = next(record for record in records if record["refused"])
    record["refused"].append(record["samples"])


@pytest.mark.parametrize(
    ("file", "change", "named"),
    [
        (TRAINED, _one_more_refused, r"the ESS guard accepted a batch of step \d, which the run's rejected"),
        ("metrics.jsonl", lambda steps: steps[2].update(entropy_mean=99.5), "step 3 has entropy_mean "),
        ("metrics.jsonl", lambda steps: steps[2].update(metrics={"made": 1.0, "up": 2.0}), "step 3 has metrics "),
        ("summary.json", lambda one: one[0].update(samples_trained=99), "summary.json has samples_trained 99, the records"),
    ],
)
def test_a_changed_record_is_named(file: str, change: Callable[[Any], None], named: str, copied: Path) -> None:
    path = copied / file
    records = [json.loads(path.read_text())] if path.suffix == ".json" else read(path)
    change(records)
    write(path, records)
    (difference,) = replayed(copied).differences
    assert re.match(named, difference)


# ---- records that can't be replayed


def test_records_that_can_not_be_replayed_are_named(copied: Path) -> None:
    sessions = read(copied / "sessions.jsonl")
    write(copied / "sessions.jsonl", [{**session, "format": 2} for session in sessions])
    with pytest.raises(RunDirectoryError, match="has records of format 2; this version of pipelinerl replays 1"):
        replayed(copied)
    write(copied / "sessions.jsonl", sessions)
    lost = trained(copied)[1].samples[0]
    write(copied / ROLLOUTS, [group for group in read(copied / ROLLOUTS) if group["index"] != lost.group_index])
    with pytest.raises(RunDirectoryError, match=rf"trained on rollout g{lost.group_index}\.a\d+, which is not in"):
        replayed(copied)
    (copied / "sessions.jsonl").unlink()
    with pytest.raises(RunDirectoryError, match=r"it has no sessions\.jsonl"):
        replayed(copied)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps", "99"], "--steps 99: .* took 4"),
        (["--trainer.steps", "3"], "--trainer.steps: not used by this command"),
        (["--trainer.loss", "ppo", "--verify", "1"], "--steps 0 and --verify do not apply"),
        (["--preprocess.zero_advantage", "drop"], "batches have other rollouts"),
        (["--trainer.kl_coefficient", "1"], "--preprocess.zero_advantage: with trainer.kl_coefficient above 0"),
    ],
)
def test_requests_that_make_no_sense_are_refused(
    flags: list[str], message: str, pipelined: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(pipelined), *flags]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error), error


# ---- counterfactuals


def test_a_counterfactual_with_the_runs_own_settings_is_the_run(tmp_path: Path) -> None:
    run(tmp_path / "r", trainer__steps=4, engine__slots=32)
    result = replayed(tmp_path / "r", "--trainer.loss=reinforce", out=tmp_path / "out")
    assert (result.exact, result.settings) == (False, {})
    assert [one.pop("version") for one in result.metrics] == [1, 2, 3, 4]
    assert all(run == again for one in result.metrics for run, again in one.values())
    last = Path("checkpoints") / "step_00000004"
    assert weights_checksum(tmp_path / "r" / last) == weights_checksum(tmp_path / "out" / last)
    assert main(["eval", str(tmp_path / "out"), "--problems", "2", "--attempts", "1"]) == 0


def test_a_counterfactual_trains_on_the_same_batches_with_other_settings(
    pipelined: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--trainer.loss", "ppo", "--correction.token", "tv", "--steps", "4", "--out", str(tmp_path / "out")]
    assert main(["replay", str(pipelined), *flags]) == 0
    assert "with trainer.loss ppo, correction.token tv" in " ".join(capsys.readouterr().out.split())
    result = json.loads((tmp_path / "out" / "replay.json").read_bytes())
    assert result["settings"] == {"trainer.loss": "ppo", "correction.token": "tv"}
    first, *later = result["metrics"]
    assert len(later) == 3
    assert first["ess"][0] == first["ess"][1], "the first batch meets the same weights"
    assert sum(one["grad_norm"][0] != one["grad_norm"][1] for one in later) >= 2, "some have no gradient"
    assert sum(one["masked_fraction"][1] or 0 for one in later) > 0
    assert main(["report", str(tmp_path / "out"), str(pipelined)]) == 0


# ---- a run on another machine


def test_a_run_is_replayed_and_evaluated_elsewhere_without_its_control_files_and_weights(
    pipelined: Path, tmp_path: Path
) -> None:
    left_out = shutil.ignore_patterns("control", "logs", "streams", "checkpoints", "weights")
    there = shutil.copytree(pipelined, tmp_path / "r", ignore=left_out)
    assert_repeated(there, 5)
    assert main(["eval", f"{there}@0", "--problems", "2", "--attempts", "1"]) == 0
