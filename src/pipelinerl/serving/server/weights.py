"""Weight updates, one at a time: read or received and verified while the engine runs, then applied between two tokens."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipelinerl.errors import WeightUpdateError
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.models.state import checksum, first_names, summary_of
from pipelinerl.serving.epochs import Epochs, StaleEpochError
from pipelinerl.serving.server.engine_thread import EngineThread, Holding
from pipelinerl.serving.server.http import RefusedError, unavailable
from pipelinerl.serving.wire import ProcessGroupRequest, WeightUpdateRequest
from pipelinerl.types import UpdateReceipt
from pipelinerl.weights.broadcast.receiver import BroadcastReceiver

# ---- reading and checking a safetensors file, in a thread beside the engine's
# Every error of a file is found before the engine is involved; the engine only copies the tensors.


_HEADER_BYTES = 64 << 20


def allowed_file(path: str, directories: Sequence[Path]) -> Path:
    """Resolve `path`, following links. Raises RefusedError unless it is a regular file in one of `directories`."""
    try:
        found = Path(path).resolve(strict=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise RefusedError("bad_request", f"can't find the weights {path!r}: {error}", param="path") from error
    if not any(found.is_relative_to(directory.resolve()) for directory in directories):
        allowed = ", ".join(map(str, directories)) or "none"
        raise RefusedError(
            "bad_request", f"{path!r} is not in a directory for weights (--weights-dir: {allowed})", param="path"
        )
    if not stat.S_ISREG(found.stat().st_mode):
        raise RefusedError("bad_request", f"{path!r} is not a regular file", param="path")
    return found


def read_update(request: WeightUpdateRequest, directories: Sequence[Path], held: Mapping[str, Tensor]) -> WeightUpdate:
    """Read the file's weights into new memory, and verify that they match `request` and fit `held`.

    `held`: the engine's own tensors; only their names, types, shapes and ties are used. A tied name may be missing in the
    file. Raises RefusedError for an invalid path, WeightUpdateError for invalid contents.
    """
    path = allowed_file(request.path or "", directories)
    limit = sum(tensor.nbytes for tensor in held.values()) + _HEADER_BYTES
    if (size := path.stat().st_size) > limit:
        raise WeightUpdateError(f"{path} has {size} bytes, the engine's weights at most {limit}: it is of another model")
    try:
        tensors = _read(path, held)
    except (OSError, SafetensorError) as error:
        raise WeightUpdateError(f"can't read the weights in {path}: {error}") from error
    found = checksum(tensors)
    if found != request.checksum:
        raise WeightUpdateError(
            f"the weights in {path} have the checksum {found}, not {request.checksum} as announced: nothing was changed"
        )
    return WeightUpdate(request.version, found, tensors)


def _read(path: Path, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    firsts = first_names(held)
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        _check_names(names, firsts)
        tensors: dict[str, Tensor] = {}
        for name, first in firsts.items():
            if name not in names:
                continue
            tensor = file.get_tensor(name)
            _check_kind(name, tensor, held[name])
            known = tensors.get(first)
            if known is not None and not torch.equal(known, tensor):
                raise WeightUpdateError(f"{first} and {name} are tied in the model but not equal in {path}")
            # Copied, so that later changes of the file do not affect the engine.
            tensors[name] = tensors.setdefault(first, tensor.clone() if known is None else known)
    return {name: tensors[first] for name, first in firsts.items()}


def check_fit(tensors: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> None:
    """Raises WeightUpdateError unless these are all the engine's tensors, with their types and shapes."""
    _check_names(set(tensors), first_names(held))
    for name, tensor in tensors.items():
        _check_kind(name, tensor, held[name])


def _check_names(names: set[str], firsts: Mapping[str, str]) -> None:
    present = {firsts[name] for name in names & firsts.keys()}
    missing = sorted(name for name, first in firsts.items() if first not in present)
    unknown = sorted(names - firsts.keys())
    if problems := summary_of("missing", missing) + summary_of("unknown", unknown):
        raise WeightUpdateError("the weights do not fit the model: " + "; ".join(problems))


def _check_kind(name: str, tensor: Tensor, held: Tensor) -> None:
    """Raises WeightUpdateError unless the tensor has the type and shape of the engine's; both are part of the checksum."""
    if (tensor.dtype, tensor.shape) != (held.dtype, held.shape):
        raise WeightUpdateError(
            f"{name} is {_kind(tensor)}, in the engine it is {_kind(held)}: nothing was changed (types: see --model.dtype)"
        )


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


T = TypeVar("T")

TIMEOUT_S = 300.0
"""For reading or receiving, and again for applying: one step, the copy, and recomputing the KV cache if configured."""
POLL_S = 0.002


class WeightUpdates:
    """Applies weight updates from files or the trainer's broadcast. `paused_s`: the sum of all pauses.

    `held`: the engine's own tensors. Files are read only from `directories`. `on_new_epoch` is called after the first
    weights of an epoch were applied. No request is open then but those that came after them.
    """

    def __init__(
        self, engine: EngineThread, held: Mapping[str, Tensor], directories: Sequence[Path], on_new_epoch: Callable[[], None]
    ) -> None:
        self._engine, self._held, self._directories = engine, held, directories
        self._on_new_epoch = on_new_epoch
        self._lock = asyncio.Lock()
        self._last: UpdateReceipt | None = None
        self._group: BroadcastReceiver | None = None
        self._epochs = Epochs()
        self._anew = False  # no weights of this epoch have been applied yet
        self.paused_s = 0.0

    async def join(self, request: ProcessGroupRequest) -> None:
        """Join the trainer's broadcast as a receiver; leaves a group that was joined before.

        Raises WeightUpdateError if the group is not formed in time, RefusedError for an epoch that was replaced; both leave
        the group as it was.
        """
        async with self._lock:
            begins = self._begins(request)
            group = BroadcastReceiver(
                request.host,
                request.port,
                request.key,
                request.index,
                engine=request.name or self._engine.name,
                join_timeout_s=request.timeout_s,
                device=next(iter(self._held.values())).device,
            )
            try:
                await asyncio.to_thread(group.wait_joined, request.timeout_s)
            except BaseException:  # also if the client has gone
                await asyncio.to_thread(group.close)
                raise
            await self._leave()
            self._group = group
            if begins:
                self._epochs.begin(request.run, request.epoch)
                self._anew = True

    async def close(self) -> None:
        """Leave the process group, if there is one."""
        async with self._lock:
            await self._leave()

    async def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            await asyncio.to_thread(group.close)

    async def take(self, request: WeightUpdateRequest) -> UpdateReceipt:
        """Read or receive the update and apply it; returns the engine's receipt.

        If the engine already holds these weights, returns their receipt again: a client may repeat a request whose answer
        was lost. Raises RefusedError (epoch, path, version, no group, no engine, timeout) and WeightUpdateError (invalid
        weights).
        """
        async with self._lock:
            begins = self._begins(request)
            anew = begins or self._anew
            receipt = await self._take(request, None if begins else self._group, anew=anew)
            if begins:
                self._epochs.begin(request.run, request.epoch)
                await self._leave()  # what the group has received before is not applied any more
            if anew:
                self._anew = False
                self._on_new_epoch()
            return receipt

    async def _take(self, request: WeightUpdateRequest, group: BroadcastReceiver | None, *, anew: bool) -> UpdateReceipt:
        """`group`: of the request's epoch. `anew`: the epoch's first weights may have any version, and end all requests."""
        holding = self._engine.holding
        if (request.version, request.checksum) == holding and not (anew and self._engine.open_requests):
            return self._receipt_of(holding)
        if not anew:
            self._check_version(request.version, holding.version)
        if request.path is None:
            return await self._apply_broadcast(request, group, anew=anew)
        reading = asyncio.to_thread(read_update, request, self._directories, self._held)
        return await self._apply(await _with_timeout(reading, "reading the file"), anew=anew)

    async def _apply_broadcast(
        self, request: WeightUpdateRequest, group: BroadcastReceiver | None, *, anew: bool
    ) -> UpdateReceipt:
        """Wait until the broadcast has arrived, and apply it."""
        if group is None:
            raise RefusedError(
                "bad_request", "no `path`, and no process group to receive from: POST /init_process_group", param="path"
            )
        update = await _with_timeout(_next_broadcast(group), "the broadcast")
        if (update.version, update.checksum) != (request.version, request.checksum):
            raise WeightUpdateError(
                f"version {update.version} (checksum {update.checksum}) was broadcast, not {request.version} "
                f"({request.checksum}): nothing was changed"
            )
        check_fit(update.tensors, self._held)
        return await self._apply(update, anew=anew)

    async def _apply(self, update: WeightUpdate, *, anew: bool) -> UpdateReceipt:
        """Apply a verified update to the engine."""
        applying = asyncio.wrap_future(self._engine.update(update, anew=anew))
        receipt = await _with_timeout(applying, "the engine's next token")
        self._last = receipt
        self.paused_s += receipt.pause_s
        return receipt

    def _receipt_of(self, holding: Holding) -> UpdateReceipt:
        last = self._last
        if last is not None and (last.version, last.checksum) == holding:
            return last
        progress = self._engine.progress()
        return UpdateReceipt(
            engine=self._engine.name,
            version=holding.version,
            checksum=holding.checksum,
            pause_s=0.0,
            sequences_in_flight=progress.in_progress,
        )

    def _begins(self, request: ProcessGroupRequest | WeightUpdateRequest) -> bool:
        """Whether the request begins an epoch, once it has succeeded. Raises RefusedError for an epoch that was replaced."""
        try:
            return self._epochs.begins(request.run, request.epoch)
        except StaleEpochError as error:
            raise RefusedError("stale_epoch", str(error), param="epoch") from error

    def _check_version(self, version: int, newest: int) -> None:
        """Raises RefusedError unless the version increases. Only the first update may repeat the loaded model's version."""
        if version < newest or (version == newest and self._engine.progress().weight_updates):
            raise RefusedError(
                "stale_version",
                f"version {version} is not newer than version {newest}, which this server holds; another session "
                "has an `epoch` of its own",
                param="version",
            )


async def _next_broadcast(group: BroadcastReceiver) -> WeightUpdate:
    """Wait until an update has arrived. Raises WeightUpdateError if the sender is gone or the update arrived damaged."""
    while (update := group.newest()) is None:
        await asyncio.sleep(POLL_S)
    return update


async def _with_timeout(work: Awaitable[T], what: str) -> T:
    try:
        return await asyncio.wait_for(work, TIMEOUT_S)
    except TimeoutError as error:
        raise unavailable(f"the weight update timed out: it waited {TIMEOUT_S:g} s for {what}") from error
