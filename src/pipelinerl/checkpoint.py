"""Checkpoints: everything that the next optimizer step depends on, in one folder that is written atomically.

    checkpoints/step_00000010/
        config.json, model.safetensors, tokenizer...   Hugging Face layout: AutoModelForCausalLM.from_pretrained(folder)
        adapter/                                       for a run with `model.lora`: the trained adapter, in peft's layout
        optimizer.safetensors                          moments and step counts by parameter name
        state.json                                     version, RNG, positions, counters, size and checksum of each file

A checkpoint is written into a hidden folder, synced to disk, and renamed. A failure before the rename (a full disk, a
kill) leaves the existing checkpoints unchanged. Nothing is pickled.

`weights/step_00000010/` (`save_weights`) omits what only a resume needs: no optimizer, no RNG, no fsync. It is cheap enough
to be written often, for evaluations after the run.
"""

from __future__ import annotations

import base64
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from pipelinerl.checkpoint_folders import (
    HIDDEN,
    files_in,
    folder_name,
    install,
    keep_latest,
    make,
    record_of,
    sync_records,
    sync_tree,
)
from pipelinerl.checkpoint_state import STATE_FILE, CheckpointState, encode_state, read_state
from pipelinerl.errors import CheckpointError
from pipelinerl.models.loading import quiet
from pipelinerl.models.state import write_safetensors

OPTIMIZER_FILE = "optimizer.safetensors"


class Checkpoint(msgspec.Struct, frozen=True):
    """A verified checkpoint on disk. `path` is also the folder to load model and tokenizer from."""

    path: Path
    state: CheckpointState

    def optimizer_state(self) -> dict[str, Tensor]:
        """The optimizer's tensors, which are read when they are used. Raises CheckpointError."""
        try:
            found: dict[str, Tensor] = load_file(self.path / OPTIMIZER_FILE)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"can't read the optimizer's state in {self.path}: {_first_line(error)}") from error
        return found

    def restore_rng(self) -> None:
        restore_rng(self.state.rng)


def rng_state() -> dict[str, str]:
    """The states of torch's generators, for `write_checkpoint`: the CPU's and, if CUDA is in use, each GPU's."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states |= {f"cuda:{i}": torch.cuda.get_rng_state(i) for i in range(torch.cuda.device_count())}
    return {device: base64.b64encode(bytes(state.tolist())).decode() for device, state in states.items()}


def restore_rng(states: Mapping[str, str]) -> None:
    """Restore what `rng_state` returned. Generators of GPUs that this machine does not have are skipped."""
    for device, encoded in states.items():
        state = torch.frombuffer(bytearray(base64.b64decode(encoded)), dtype=torch.uint8)
        if device == "cpu":
            torch.set_rng_state(state)
        elif torch.cuda.is_available() and torch.device(device).index < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, device)


def write_checkpoint(
    directory: Path,
    *,
    version: int,
    model: Any,
    tokenizer: Any,
    optimizer: Callable[[Path], object],
    rng: Mapping[str, str],
    positions: Mapping[str, Any],
    counters: Mapping[str, Any],
    session: str = "",
    keep: int = 2,
    check: Callable[[], object] = lambda: None,
) -> Callable[[], Path]:
    """Write the files of `directory/step_XXXXXXXX`. What is returned does the rest, and may be called in another thread.

    The rest is what takes long without computing: it waits until the files, and the records of the run, are on the disk.
    Then it gives the folder its name, deletes all but the last `keep` checkpoints, and returns the folder. It must end
    before the next checkpoint.

    `model` and `tokenizer` are written with their `save_pretrained(folder)`. `optimizer` writes its state to the folder
    as `OPTIMIZER_FILE`.

    Both raise CheckpointError if it can't be written (full disk, no permission); existing checkpoints are then unchanged.
    """
    state = CheckpointState(
        version=version, rng=dict(rng), positions=dict(positions), counters=dict(counters), session=session
    )
    target, hidden = _folders_of(directory, version)
    with _removed_on_failure(hidden, target):
        make(hidden, check)
        _write_model(hidden, model, tokenizer)
        optimizer(hidden)

    def finish() -> Path:
        with _removed_on_failure(hidden, target):
            _write_state(hidden, state)
            sync_records(directory.parent)
            sync_tree(hidden)
            install(hidden, target)
        keep_latest(directory, None, keep)
        return target

    return finish


def save_weights(
    directory: Path,
    *,
    version: int,
    model: Any,
    tokenizer: Any,
    check: Callable[[], object] = lambda: None,
) -> Path:
    """Write `directory/step_XXXXXXXX` with only model and tokenizer, for evaluation. A machine crash may lose it.

    `load_checkpoint` verifies it like a checkpoint. Raises CheckpointError if it can't be written.
    """
    target, hidden = _folders_of(directory, version)
    with _removed_on_failure(hidden, target):
        make(hidden, check)
        _write_model(hidden, model, tokenizer)
        _write_state(hidden, CheckpointState(version=version))
        install(hidden, target)
    return target


def _folders_of(directory: Path, version: int) -> tuple[Path, Path]:
    """The folder of this version, and the hidden one in which it is written."""
    target = directory / folder_name(version)
    return target, directory / f"{HIDDEN}{target.name}-{secrets.token_hex(4)}"


@contextmanager
def _removed_on_failure(hidden: Path, target: Path) -> Iterator[None]:
    """Delete the hidden folder if what is inside fails. Raises CheckpointError."""
    try:
        yield
    except (OSError, SafetensorError, ValueError) as error:  # ValueError: a config that save_pretrained refuses
        shutil.rmtree(hidden, ignore_errors=True)
        raise CheckpointError(f"can't write checkpoint {target}: {_first_line(error)}") from error
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise


def _write_model(folder: Path, model: Any, tokenizer: Any) -> None:
    from transformers import modeling_utils  # noqa: PLC0415 - takes seconds

    with quiet(), ExitStack() as stack:
        stack.callback(setattr, modeling_utils, "safe_save_file", modeling_utils.safe_save_file)
        modeling_utils.safe_save_file = write_safetensors
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _write_state(folder: Path, state: CheckpointState) -> None:
    """Must be called last: the file has the checksums of all other files in the folder."""
    files = {str(path.relative_to(folder)): record_of(path) for path in files_in(folder)}
    (folder / STATE_FILE).write_bytes(encode_state(msgspec.structs.replace(state, files=files)))


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint's state and verify all of its files. Raises CheckpointError (see `read_state`)."""
    return Checkpoint(path, read_state(path))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
