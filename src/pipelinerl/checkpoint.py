"""Checkpoints: everything that the next optimizer step depends on, in one folder that is written atomically.

    checkpoints/step_00000010/
        config.json, model.safetensors, tokenizer...   Hugging Face layout: AutoModelForCausalLM.from_pretrained(folder)
        adapter/                                       for a run with `model.lora`: the trained adapter, in peft's layout
        optimizer.safetensors                          moments and step counts by parameter name
        state.json                                     version, RNG, position, counters, size and checksum of each file

A checkpoint is written into a hidden folder, synced to disk, and renamed; a folder that is deleted is renamed first. So a
folder with a version's name is always whole, and a failure before the rename (a full disk, a kill) leaves the existing
checkpoints unchanged. Nothing is pickled.

`weights/step_00000010/` omits what only a resume needs: no optimizer, no RNG, no fsync. It is cheap enough to be written
often, for evaluations after the run.

`trainer.saving` writes both.

Does not import torch: the launcher plans a resume by `state.json`.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash
from safetensors import SafetensorError

from pipelinerl.errors import INVALID_DATA, CheckpointError, RunDirectoryError, first_line
from pipelinerl.files import sync
from pipelinerl.metrics.evaluations import EvaluationRecord
from pipelinerl.metrics.reading import read_lines
from pipelinerl.types import GroupLedger

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1
STATE_FILE = "state.json"
OPTIMIZER_FILE = "optimizer.safetensors"
WEIGHTS_FOLDER = "weights"
"""Folder in a run directory that `trainer.saving.save_weights` writes to."""
HIDDEN = ".unfinished-"
# A checkpoint that is replaced by one of the same version is named `.old` between the two renames.
_NAME = re.compile(r"step_(\d{8,})(\.old)?")
_ADVICE = "; delete this checkpoint to resume from the one before"


class FileRecord(msgspec.Struct, frozen=True):
    size: int
    checksum: str

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        """Raises OSError."""
        with open(path, "rb") as file:
            checksum = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
            return cls(file.tell(), checksum)


class QueuePosition(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer's position in the stream.

    All groups before `offset` are retired. `settled_ids` are the retired rollouts of groups that are only partly retired.
    `ledger` holds the indices of all groups that are fully retired.
    """

    offset: int = 0
    settled_ids: tuple[str, ...] = ()
    ledger: GroupLedger = msgspec.field(default_factory=GroupLedger)


class QueueCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Rollouts that left the queue over the whole run. `dropped_tokens`: the sampled tokens of the dropped ones."""

    trained: int = 0
    dropped: dict[str, int] = {}
    dropped_tokens: dict[str, int] = {}


class TrainerCounters(msgspec.Struct, kw_only=True):
    """Totals over the whole run, including the time before a resume."""

    queue: QueueCounts = QueueCounts()
    micro_batches: int = 0
    tokens_trained: int = 0
    ess_guard_trips: int = 0


class CheckpointState(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a checkpoint besides the model and the optimizer's moments.

    `rng` is the state of torch's generators by device, in base64. `files` lists all other files in the folder.
    """

    version: int
    rng: dict[str, str] = {}
    positions: QueuePosition = msgspec.field(default_factory=QueuePosition)
    counters: TrainerCounters = msgspec.field(default_factory=TrainerCounters)
    files: dict[str, FileRecord] = {}
    format: int = FORMAT


class Checkpoint(msgspec.Struct, frozen=True):
    """A verified checkpoint on disk. `path` is also the folder to load model and tokenizer from."""

    path: Path
    state: CheckpointState

    def optimizer_state(self) -> dict[str, Tensor]:
        """The optimizer's tensors, which are read when they are used. Raises CheckpointError."""
        from safetensors.torch import load_file  # noqa: PLC0415 - loads torch

        try:
            found: dict[str, Tensor] = load_file(self.path / OPTIMIZER_FILE)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"can't read the optimizer's state in {self.path}: {first_line(error)}") from error
        return found


# ---- reading


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint's state and verify all of its files.

    Raises CheckpointError naming the file that is missing, damaged, or in another format.
    """
    state = _read_state(path / STATE_FILE)
    for name, record in state.files.items():
        try:
            actual = FileRecord.of(path / name)
        except OSError as error:
            raise CheckpointError(f"checkpoint {path}: can't read {name}: {error.strerror}{_ADVICE}") from error
        if actual != record:
            raise CheckpointError(
                f"checkpoint {path}: {name} is damaged ({actual.size} bytes, checksum {actual.checksum}; "
                f"expected {record.size} bytes, checksum {record.checksum}){_ADVICE}"
            )
    return Checkpoint(path, state)


class _Envelope(msgspec.Struct, frozen=True):
    checksum: str
    state: msgspec.Raw


def _read_state(path: Path) -> CheckpointState:
    try:
        envelope = msgspec.json.decode(path.read_bytes(), type=_Envelope)
        encoded = bytes(envelope.state)
        if xxhash.xxh3_128_hexdigest(encoded) != envelope.checksum:
            raise CheckpointError(f"checkpoint file {path} is damaged: its checksum is not {envelope.checksum}{_ADVICE}")
        found = msgspec.json.decode(encoded, type=dict[str, Any]).get("format")
        if found != FORMAT:
            raise CheckpointError(f"checkpoint file {path} has format {found}; this version reads format {FORMAT}")
        return msgspec.json.decode(encoded, type=CheckpointState)
    except OSError as error:
        raise CheckpointError(f"checkpoint {path.parent}: can't read {path.name}: {error.strerror}{_ADVICE}") from error
    except INVALID_DATA as error:
        raise CheckpointError(f"checkpoint file {path} is damaged: {error}{_ADVICE}") from error


# ---- writing: see `trainer.saving`


def write_state(folder: Path, state: CheckpointState) -> None:
    """Must be called last: the file has the checksums of all other files in the folder."""
    files = {str(path.relative_to(folder)): FileRecord.of(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    files.pop(STATE_FILE, None)
    encoded = msgspec.json.encode(msgspec.structs.replace(state, files=files))
    envelope = _Envelope(xxhash.xxh3_128_hexdigest(encoded), msgspec.Raw(encoded))
    (folder / STATE_FILE).write_bytes(msgspec.json.encode(envelope))


def install(hidden: Path, target: Path) -> None:
    """Give a folder its name; it may replace one of the same version."""
    replaced = target.with_name(target.name + ".old")
    if target.exists():
        if replaced.exists():
            _remove(replaced)
        os.rename(target, replaced)
    try:
        os.rename(hidden, target)
    except OSError:  # the hidden folder is gone
        if replaced.exists():
            os.rename(replaced, target)
        raise
    sync(target.parent)
    if replaced.exists():
        _remove(replaced)


# ---- the checkpoints of a run


def by_version(directory: Path) -> dict[int, Path]:
    """Version -> checkpoint, ascending; empty if the directory does not exist.

    An `.old` one is included if its replacement does not exist yet.
    """
    if not directory.is_dir():
        return {}
    paths = sorted(directory.iterdir(), reverse=True)  # `step_X.old` comes before `step_X`, which overrides it
    return dict(sorted({int(match[1]): path for path in paths if (match := _NAME.fullmatch(path.name))}.items()))


def saved_versions(run_dir: Path) -> dict[int, Path]:
    """Version -> folder with its weights, ascending: the run's checkpoints and its `weights/` folders."""
    return dict(sorted((by_version(run_dir / WEIGHTS_FOLDER) | by_version(run_dir / "checkpoints")).items()))


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The newest checkpoint in `run_dir/checkpoints`, or None."""
    return next(reversed(by_version(run_dir / "checkpoints").values()), None)


def best_version(run_dir: Path, saved: Iterable[int]) -> int | None:
    """The version in `saved` with the highest held-out reward. None without evaluations.

    A version has the reward of the evaluation whose mean version is nearest. Of equal rewards, the version nearer to its
    evaluation is better, then the newer version.
    """
    try:
        records = read_lines(run_dir / "evaluations.jsonl", EvaluationRecord)
    except RunDirectoryError:
        return None
    points = [
        (one.version if one.version_mean is None else one.version_mean, one.reward_mean)
        for one in records
        if one.reward_mean is not None
    ]

    def merit(version: int) -> tuple[float, float, int]:
        distance, reward = min((abs(at - version), reward) for at, reward in points)
        return reward, -distance, version

    return max(saved, key=merit, default=None) if points else None


def keep_latest(directory: Path, count: int) -> None:
    """Delete all checkpoints but the last `count` and the best one by held-out reward. Raises CheckpointError."""
    found = by_version(directory)
    kept = {*list(found)[-count:], best_version(directory.parent, found)}
    for path in [path for number, path in found.items() if number not in kept]:
        try:
            _remove(path)
        except OSError as error:
            raise CheckpointError(f"can't delete the old checkpoint {path}: {error.strerror}") from error


def _remove(path: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that a partly deleted one is never read as a checkpoint."""
    hidden = path.with_name(f"{HIDDEN}{path.name}-{secrets.token_hex(4)}")
    os.rename(path, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def remove_unfinished(*directories: Path) -> None:
    """Delete the remains of interrupted writes and deletions.

    Only the launcher does this, before a session: a trainer may be late, and what is there then is of a later session.
    """
    for directory in directories:
        for path in directory.glob(HIDDEN + "*"):
            shutil.rmtree(path, ignore_errors=True)
        for path in directory.glob("step_*.old"):
            if path.with_suffix("").exists():
                _remove(path)
