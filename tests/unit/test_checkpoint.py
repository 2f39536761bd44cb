"""Checkpoints: complete, verified, loadable by transformers, and never half there."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from pipelinerl import checkpoint
from pipelinerl.checkpoint import (
    CheckpointState,
    QueueCounts,
    QueuePosition,
    TrainerCounters,
    best_version,
    by_version,
    latest_checkpoint,
    load_checkpoint,
    remove_unfinished,
)
from pipelinerl.errors import CheckpointError
from pipelinerl.trainer.saving import restore_rng, rng_state, write_checkpoint
from pipelinerl.trainer.step import Learner
from pipelinerl.types import GroupLedger
from tests.limits import small_files
from tests.parity.models import tiny_llama
from tests.unit.trainer.test_trainer_step import learner as learner_of
from tests.unit.trainer.test_trainer_step import make_samples


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="b")


SIZES: dict[str, Any] = {"vocab_size": 23, "tie_word_embeddings": True}
SAMPLES = make_samples(tiny_llama(**SIZES), 4, version=0)


def make_learner(hidden_size: int = 16) -> Learner:
    return learner_of(tiny_llama(hidden_size=hidden_size, **SIZES))


def save(directory: Path, version: int, learner: Learner | None = None, *, trained: int = 12, keep: int = 2) -> Path:
    learner = learner or make_learner()
    state = CheckpointState(
        version=version,
        rng=rng_state(),
        positions=QueuePosition(offset=7, settled_ids=("1/0",), ledger=GroupLedger(2, {4})),
        counters=TrainerCounters(queue=QueueCounts(trained=trained, dropped={"stale": 2})),
    )
    parts: Any = {"model": learner.model, "tokenizer": make_tokenizer(), "optimizer": learner.save_optimizer}
    return write_checkpoint(directory, state, keep=keep, **parts)()


def test_records_are_durable_before_the_checkpoint_that_follows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [tmp_path / "metrics.jsonl", tmp_path / "rollouts" / "trained.jsonl"]
    for path in records:
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}\n")
    target = tmp_path / "checkpoints" / "step_00000010"
    synced = []

    def note(fd: int) -> None:
        synced.append((Path(os.readlink(f"/proc/self/fd/{fd}")), target.exists()))

    monkeypatch.setattr(os, "fsync", note)
    save(tmp_path / "checkpoints", 10)
    assert {(path, False) for path in records} <= set(synced)
    assert (target.parent, True) in synced


def test_transformers_loads_the_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    learner = make_learner()
    learner.step(SAMPLES, version=0)
    path = save(tmp_path, 1, learner)
    assert capfd.readouterr() == ("", ""), "saving is silent"
    assert "pipelinerl" not in (path / "config.json").read_text(), "training's attention is not the model's"
    loaded = AutoModelForCausalLM.from_pretrained(path)
    for (name, a), (other, b) in zip(learner.model.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(a, b)
    assert loaded.generate(torch.tensor([[1, 2]]), max_new_tokens=2, pad_token_id=0).shape[0] == 1
    assert AutoTokenizer.from_pretrained(path).encode("a") == [0]


def test_a_resumed_step_is_bitwise_the_step_that_would_have_followed(tmp_path: Path) -> None:
    learner = make_learner()
    for version in range(3):
        learner.step(SAMPLES, version=version)
    path = save(tmp_path, 3, learner)
    expected_draw = torch.rand(3)
    learner.step(SAMPLES, version=3)

    restored = load_checkpoint(path)
    resumed = learner_of(AutoModelForCausalLM.from_pretrained(restored.path).eval())
    resumed.optimizer.load_state(restored.optimizer_state())
    restore_rng(restored.state.rng)
    assert torch.equal(torch.rand(3), expected_draw)
    resumed.step(SAMPLES, version=3)
    for a, b in zip(learner.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def evaluated(run_dir: Path, *points: tuple[int, float | None]) -> None:
    with (run_dir / "evaluations.jsonl").open("a") as file:
        for version, reward in points:
            record = {"when": "online", "version": version - 1, "version_mean": version + 0.25, "reward_mean": reward}
            file.write(json.dumps({**record, "time_s": 1.0, "problems": 4}) + "\n")


def test_the_best_by_held_out_reward_is_kept_until_there_is_a_better_one(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    assert best_version(tmp_path, [1, 2]) is None, "there are no evaluations"
    evaluated(tmp_path, (0, 0.1), (1, 0.3), (2, 0.7), (3, None), (4, 0.5))
    for version in (1, 2, 3, 4, 5):
        save(directory, version, keep=1)
    assert list(by_version(directory)) == [2, 5]
    assert latest_checkpoint(tmp_path) == directory / "step_00000005", "what a resume continues from"
    evaluated(tmp_path, (6, 0.7))
    save(directory, 6, keep=1)
    save(directory, 7, keep=1)
    assert list(by_version(directory)) == [6, 7], "as good as the older one"
    with (tmp_path / "evaluations.jsonl").open("a") as file:
        file.write('{"version": 2, "rew')  # the run was killed
    assert best_version(tmp_path, [6, 7]) == 6


def test_the_latest_is_found_by_number(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    directory = tmp_path / "checkpoints"
    for version in (9, 123_456_789):
        save(directory, version)
    (directory / "step_00000099.txt").write_text("a note")
    (directory / ".unfinished-step_00000500-aa").mkdir()
    assert latest_checkpoint(tmp_path) == directory / "step_123456789"
    remove_unfinished(directory)
    assert not list(directory.glob(".*"))


def test_a_checkpoint_is_replaced_and_a_kill_between_the_renames_loses_nothing(tmp_path: Path) -> None:
    save(tmp_path, 4, trained=1).rename(tmp_path / "step_00000004.old")
    (path,) = by_version(tmp_path).values()
    assert load_checkpoint(path).state.counters.queue.trained == 1
    save(tmp_path, 5)
    assert [p.name for p in by_version(tmp_path).values()] == ["step_00000004.old", "step_00000005"]
    for trained in (2, 3):
        save(tmp_path, 4, trained=trained)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000004", "step_00000005"]
        assert load_checkpoint(tmp_path / "step_00000004").state.counters.queue.trained == trained


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "config.json", "tokenizer.json", "state.json"]
)
@pytest.mark.parametrize("damage", ["flip", "cut", "missing"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, damage: str) -> None:
    learner = make_learner()
    learner.step(SAMPLES, version=0)
    file = save(tmp_path, 1, learner) / name
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 0x01
    file.write_bytes(data[:-3] if damage == "cut" else data)
    if damage == "missing":
        file.unlink()
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")) as caught:
        load_checkpoint(file.parent)
    assert "\n" not in str(caught.value)


def test_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, 1)
    monkeypatch.setattr(checkpoint, "FORMAT", 2)
    with pytest.raises(CheckpointError, match="format 1; this version reads format 2"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("limit", "written"), [(600, set()), (60_000, {"config.json"}), (150_000, {"config.json", "model.safetensors"})]
)
def test_a_full_disk_leaves_the_last_checkpoint_as_it_was(tmp_path: Path, limit: int, written: set[str]) -> None:
    learner = make_learner(hidden_size=64)
    learner.step(SAMPLES, version=0)
    first = save(tmp_path, 1, learner)
    sizes = {name: (first / name).stat().st_size for name in ("config.json", "model.safetensors", "optimizer.safetensors")}
    assert {name for name, size in sizes.items() if size <= limit} == written
    with small_files(limit), pytest.raises(CheckpointError) as caught:
        save(tmp_path, 2, learner)
    assert str(caught.value).startswith(f"can't write checkpoint {tmp_path / 'step_00000002'}:")
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    load_checkpoint(tmp_path / "step_00000001")


def test_a_folder_that_was_half_deleted_is_not_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    monkeypatch.setattr(shutil, "rmtree", lambda path, ignore_errors=False: (Path(path) / "state.json").unlink())
    save(tmp_path, 3, keep=1)
    assert list(by_version(tmp_path)) == [3]
