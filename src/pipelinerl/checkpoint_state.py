"""What a checkpoint says of a run, in its file `state.json`. Does not import torch: the launcher plans a resume by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import xxhash

from pipelinerl.checkpoint_folders import FileRecord, record_of
from pipelinerl.errors import INVALID_DATA, CheckpointError
from pipelinerl.ledger import LedgerRecord

FORMAT = 1
STATE_FILE = "state.json"


class CheckpointState(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a checkpoint besides the model and the optimizer's moments.

    `positions` and `counters` are JSON-like values that are returned to the caller unchanged. `rng` is the state of
    torch's generators by device, in base64. `files` lists all other files in the folder, `session` is the id of the session
    that wrote it.
    """

    version: int
    rng: dict[str, str] = {}
    positions: dict[str, Any] = {}
    counters: dict[str, Any] = {}
    session: str = ""
    files: dict[str, FileRecord] = {}
    format: int = FORMAT


class _Envelope(msgspec.Struct, frozen=True):
    checksum: str
    state: msgspec.Raw


def read_state(path: Path) -> CheckpointState:
    """Read the state of the checkpoint `path` and verify all of its files.

    Raises CheckpointError naming the file that is missing, damaged, or in another format.
    """
    state = _read(path / STATE_FILE)
    for name, record in state.files.items():
        try:
            actual = record_of(path / name)
        except OSError as error:
            raise CheckpointError(f"checkpoint {path}: can't read {name}: {error.strerror}{_ADVICE}") from error
        if actual != record:
            raise CheckpointError(
                f"checkpoint {path}: {name} is damaged ({actual.size} bytes, checksum {actual.checksum}; "
                f"expected {record.size} bytes, checksum {record.checksum}){_ADVICE}"
            )
    return state


_ADVICE = "; delete this checkpoint to resume from the one before"


def encode_state(state: CheckpointState) -> bytes:
    encoded = msgspec.json.encode(state)
    return msgspec.json.encode(_Envelope(_checksum(encoded), msgspec.Raw(encoded)))


def _read(path: Path) -> CheckpointState:
    try:
        envelope = msgspec.json.decode(path.read_bytes(), type=_Envelope)
        encoded = bytes(envelope.state)
        if _checksum(encoded) != envelope.checksum:
            raise CheckpointError(f"checkpoint file {path} is damaged: its checksum is not {envelope.checksum}{_ADVICE}")
        found = msgspec.json.decode(encoded, type=dict[str, Any]).get("format")
        if found != FORMAT:
            raise CheckpointError(f"checkpoint file {path} has format {found}; this version reads format {FORMAT}")
        return msgspec.json.decode(encoded, type=CheckpointState)
    except OSError as error:
        raise CheckpointError(f"checkpoint {path.parent}: can't read {path.name}: {error.strerror}{_ADVICE}") from error
    except INVALID_DATA as error:
        raise CheckpointError(f"checkpoint file {path} is damaged: {error}{_ADVICE}") from error


def _checksum(data: bytes) -> str:
    return xxhash.xxh3_128(data).hexdigest()


# ---- the trainer's part: `positions` and `counters`


class QueuePosition(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer's position in the stream.

    All groups before `offset` are retired. `settled_ids` are the retired rollouts of groups that are only partly retired.
    `ledger` holds the indices of all groups that are fully retired.
    """

    offset: int = 0
    settled_ids: tuple[str, ...] = ()
    ledger: LedgerRecord = LedgerRecord()


class QueueCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Rollouts that left the queue over the whole run. `dropped_tokens`: the sampled tokens of the dropped ones."""

    trained: int = 0
    dropped: dict[str, int] = {}
    dropped_tokens: dict[str, int] = {}


class TrainerCounters(msgspec.Struct, frozen=True, kw_only=True):
    """Totals over the whole run, including the time before a resume."""

    queue: QueueCounts = QueueCounts()
    micro_batches: int = 0
    tokens_trained: int = 0
    ess_guard_trips: int = 0
