"""Writes the folders of checkpoints, which `checkpoint` reads and keeps."""

from __future__ import annotations

import base64
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from pipelinerl.checkpoint import HIDDEN, CheckpointState, install, keep_latest, write_state
from pipelinerl.errors import CheckpointError, first_line
from pipelinerl.files import sync
from pipelinerl.models.loading import quiet
from pipelinerl.models.state import write_safetensors


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
    state: CheckpointState,
    *,
    model: Any,
    tokenizer: Any,
    optimizer: Callable[[Path], object],
    keep: int = 2,
    check: Callable[[], object] = lambda: None,
) -> Callable[[], Path]:
    """Write the files of `directory/step_XXXXXXXX`. What is returned does the rest, and may be called in another thread.

    The rest is what takes long without computing: it waits until the files, and the records of the run, are on the disk.
    Then it gives the folder its name, deletes all but the last `keep` checkpoints, and returns the folder. It must end
    before the next checkpoint.

    `model` and `tokenizer` are written with their `save_pretrained(folder)`. `optimizer` writes its state to the folder
    as `OPTIMIZER_FILE`. `check`: see `_model_written`.

    Both raise CheckpointError if it can't be written (full disk, no permission); existing checkpoints are then unchanged.
    """
    hidden, target = _model_written(directory, state.version, model, tokenizer, check)
    with removed_on_failure(hidden, target):
        optimizer(hidden)

    def finish() -> Path:
        with removed_on_failure(hidden, target):
            write_state(hidden, state)
            records = (*directory.parent.glob("*.jsonl"), *directory.parent.glob("rollouts/*.jsonl"))
            for path in (*records, *directory.parent.glob("rollouts"), directory.parent):
                sync(path)  # a checkpoint must not survive without the records that led to it
            sync_tree(hidden)
            install(hidden, target)
        keep_latest(directory, keep)
        return target

    return finish


def save_weights(
    directory: Path, *, version: int, model: Any, tokenizer: Any, check: Callable[[], object] = lambda: None
) -> Path:
    """Write `directory/step_XXXXXXXX` with only model and tokenizer, for evaluation. A machine crash may lose it.

    `load_checkpoint` verifies it like a checkpoint. Raises CheckpointError if it can't be written.
    """
    hidden, target = _model_written(directory, version, model, tokenizer, check)
    with removed_on_failure(hidden, target):
        write_state(hidden, CheckpointState(version=version))
        install(hidden, target)
    return target


def _model_written(
    directory: Path, version: int, model: Any, tokenizer: Any, check: Callable[[], object]
) -> tuple[Path, Path]:
    """A new hidden folder with model and tokenizer, and the name that it will have.

    `check` raises PipelineRLError if nothing may be written. It comes after the folder was made: a later session removes the
    folder, so what is then written in it can't be installed.
    """
    from transformers import modeling_utils  # noqa: PLC0415 - takes seconds

    target = directory / f"step_{version:08d}"
    hidden = directory / f"{HIDDEN}{target.name}-{secrets.token_hex(4)}"
    with removed_on_failure(hidden, target), quiet(), ExitStack() as stack:
        directory.mkdir(exist_ok=True)  # a run directory that was removed stays so
        hidden.mkdir()
        check()
        stack.callback(setattr, modeling_utils, "safe_save_file", modeling_utils.safe_save_file)
        modeling_utils.safe_save_file = write_safetensors
        model.save_pretrained(hidden)
        tokenizer.save_pretrained(hidden)
    return hidden, target


@contextmanager
def removed_on_failure(hidden: Path, target: Path) -> Iterator[None]:
    """Delete the hidden folder if what is inside fails. Raises CheckpointError."""
    try:
        yield
    except (OSError, SafetensorError, ValueError) as error:  # ValueError: a config that save_pretrained refuses
        shutil.rmtree(hidden, ignore_errors=True)
        raise CheckpointError(f"can't write checkpoint {target}: {first_line(error)}") from error
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise


def sync_tree(directory: Path) -> None:
    for path in (*directory.rglob("*"), directory):
        sync(path)
