"""The folders of checkpoints in a run directory: their names, and how they appear and disappear. Does not import torch.

A folder is written under a hidden name, synced to disk, and renamed. One that is deleted is renamed first. So a folder with
a version's name is always whole.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import xxhash

from pipelinerl.errors import CheckpointError
from pipelinerl.files import sync

WEIGHTS_FOLDER = "weights"
"""Folder in a run directory that `checkpoint.save_weights` writes to."""
HIDDEN = ".unfinished-"

# A checkpoint that is replaced by one of the same version is named `.old` between the two renames.
_NAME = re.compile(r"step_(\d{8,})(\.old)?")


class FileRecord(msgspec.Struct, frozen=True):
    size: int
    checksum: str


def folder_name(version: int) -> str:
    return f"step_{version:08d}"


def checkpoints(directory: Path) -> list[Path]:
    """The checkpoints in `directory`, oldest first. An `.old` one is included if its replacement does not exist yet."""
    return list(by_version(directory).values())


def by_version(directory: Path) -> dict[int, Path]:
    """Version -> checkpoint, ascending; empty if the directory does not exist."""
    if not directory.is_dir():
        return {}
    found: dict[int, Path] = {}
    for path in sorted(directory.iterdir(), reverse=True):  # `step_X.old` comes before `step_X`, which overrides it
        if match := _NAME.fullmatch(path.name):
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def saved_versions(run_dir: Path) -> dict[int, Path]:
    """Version -> folder with its weights, ascending: the run's checkpoints and its `weights/` folders."""
    return dict(sorted((by_version(run_dir / WEIGHTS_FOLDER) | by_version(run_dir / "checkpoints")).items()))


class _Evaluated(msgspec.Struct):
    """What is read of `metrics.evaluations.EvaluationRecord`."""

    version: int
    reward_mean: float | None = None
    version_mean: float | None = None


def best_version(run_dir: Path, saved: Iterable[int]) -> int | None:
    """The version in `saved` with the highest held-out reward. None without evaluations.

    A version has the reward of the evaluation whose mean version is nearest. Of equal rewards, the version nearer to its
    evaluation is better, then the newer version.
    """
    try:
        lines = (run_dir / "evaluations.jsonl").read_bytes().splitlines()
    except OSError:
        return None
    points: list[tuple[float, float]] = []
    for line in lines:
        with suppress(msgspec.MsgspecError):  # the last line of a run that was killed
            one = msgspec.json.decode(line, type=_Evaluated)
            if one.reward_mean is not None:
                points.append((one.version if one.version_mean is None else one.version_mean, one.reward_mean))

    def merit(version: int) -> tuple[float, float, int]:
        distance, reward = min((abs(at - version), reward) for at, reward in points)
        return reward, -distance, version

    return max(saved, key=merit, default=None) if points else None


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The newest checkpoint in `run_dir/checkpoints`, or None."""
    found = checkpoints(run_dir / "checkpoints")
    return found[-1] if found else None


def keep_latest(directory: Path, version: int | None, count: int, *, spared_every: int = 0) -> None:
    """Delete folders, except the last `count` (up to `version`), the best one by held-out reward, and versions that
    `spared_every` divides (0: none).

    Raises CheckpointError if that fails.
    """
    delete(superfluous(directory, version, count, spared_every=spared_every))


def superfluous(directory: Path, version: int | None, count: int, *, spared_every: int = 0) -> list[Path]:
    """The folders that `keep_latest` deletes."""
    found = by_version(directory)
    kept = {number for number in found if spared_every and number % spared_every == 0}
    known = [number for number in found if version is None or number <= version]
    kept.update(known[-count:])
    if (best := best_version(directory.parent, known)) is not None:
        kept.add(best)
    return [path for number, path in found.items() if number not in kept]


def make(hidden: Path, check: Callable[[], object]) -> None:
    """Make a hidden folder, and remove unfinished ones. `check` raises PipelineRLError if that is not allowed.

    The check comes last: a later session removes the folder, so what is then written in it can't be installed.
    """
    hidden.parent.mkdir(exist_ok=True)  # a run directory that was removed stays so
    remove_unfinished(hidden.parent)
    hidden.mkdir()
    check()


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
    remove_unfinished(target.parent)


def delete(paths: Sequence[Path]) -> None:
    for path in paths:
        try:
            _remove(path)
        except OSError as error:
            raise CheckpointError(f"can't delete the old checkpoint {path}: {error.strerror}") from error


def _remove(path: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that a partly deleted one is never read as a checkpoint."""
    hidden = path.with_name(f"{HIDDEN}{path.name}-{secrets.token_hex(4)}")
    os.rename(path, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def remove_unfinished(directory: Path) -> None:
    """Delete the remains of interrupted writes and deletions in `directory`."""
    for path in directory.glob(HIDDEN + "*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in directory.glob("step_*.old"):
        if path.with_suffix("").exists():
            _remove(path)


def sync_records(run_dir: Path) -> None:
    """Make the lines that all processes have written so far durable: a checkpoint must not survive without them."""
    for path in (*run_dir.glob("*.jsonl"), *run_dir.glob("rollouts/*.jsonl"), *run_dir.glob("rollouts"), run_dir):
        sync(path)


def sync_tree(directory: Path) -> None:
    for path in (*directory.rglob("*"), directory):
        sync(path)


def files_in(directory: Path) -> Sequence[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def record_of(path: Path) -> FileRecord:
    digest = xxhash.xxh3_128()
    size = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            size += len(block)
    return FileRecord(size, digest.hexdigest())
