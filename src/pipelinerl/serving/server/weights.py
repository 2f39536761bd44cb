"""Weight updates, one at a time: read or received and verified beside the engine, taken by it between two tokens."""

from __future__ import annotations

import asyncio
import contextlib
import stat
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipelinerl.errors import WeightUpdateError
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.models.state import checksum, first_names
from pipelinerl.serving.server.engine_thread import EngineThread, Holding
from pipelinerl.serving.server.http import RefusedError, unavailable
from pipelinerl.serving.wire import ProcessGroupRequest, WeightUpdateRequest
from pipelinerl.types import UpdateReceipt
from pipelinerl.weights.broadcast import CollectiveWeightReceiver

# ------------------------------------------------------------------------------------------------------------------------
# Reading a whole set of weights from a safetensors file, so that the engine need only copy them.
#
# Done beside the engine, in another thread: everything that could be wrong with a file is found before the engine sees it.


_HEADER_BYTES = 64 << 20


def allowed_file(path: str, directories: Sequence[Path]) -> Path:
    """The file that `path` leads to, links followed. Raises RefusedError unless it is a regular one in `directories`."""
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
    """The weights in the file, in memory of their own, proven to be what `request` says and to fit `held`.

    `held` are the engine's own tensors, of which only names, types, shapes and ties are looked at. A tied name may be
    missing in the file. Raises RefusedError for the path, WeightUpdateError for what is in the file.
    """
    path = allowed_file(request.path or "", directories)
    most = sum(tensor.nbytes for tensor in held.values()) + _HEADER_BYTES
    if (size := path.stat().st_size) > most:
        raise WeightUpdateError(f"{path} has {size} bytes, the engine's weights at most {most}: it is another model's")
    try:
        tensors = _read(path, held)
    except (OSError, SafetensorError) as error:
        raise WeightUpdateError(f"can't read the weights in {path}: {error}") from error
    found = checksum(tensors)
    if found != request.checksum:
        raise WeightUpdateError(
            f"the weights in {path} have the checksum {found}, not {request.checksum} as was said: nothing was changed"
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
            # A copy: whatever happens to the file afterwards does not reach the engine.
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
    problems = [
        f"{len(wrong)} {what} ({', '.join(wrong[:8])}{', ...' if len(wrong) > 8 else ''})"
        for what, wrong in (("missing", missing), ("unknown", unknown))
        if wrong
    ]
    if problems:
        raise WeightUpdateError("the weights do not fit the model: " + "; ".join(problems))


def _check_kind(name: str, tensor: Tensor, held: Tensor) -> None:
    """Raises WeightUpdateError unless the tensor has the type and shape of the engine's, as its checksum does."""
    if (tensor.dtype, tensor.shape) != (held.dtype, held.shape):
        raise WeightUpdateError(
            f"{name} is {_kind(tensor)}, in the engine it is {_kind(held)}: nothing was changed (types: see --dtype)"
        )


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


T = TypeVar("T")

TIMEOUT_S = 300.0
"""For reading, and again for the engine to take it: a step, the copy, and recomputing the KV cache if asked to."""
LOOK_S = 0.002


class WeightUpdates:
    """`held` are the engine's own tensors; files are read from `directories` alone.

    Whatever brings weights (a file, a broadcast) ends in `apply`. `paused_s` adds up the pauses.
    """

    def __init__(self, engine: EngineThread, held: Mapping[str, Tensor], directories: Sequence[Path]) -> None:
        self._engine = engine
        self._held = held
        self._directories = directories
        self._one_at_a_time = asyncio.Lock()
        self._last: UpdateReceipt | None = None
        self._group: CollectiveWeightReceiver | None = None
        self.paused_s = 0.0

    async def join(self, request: ProcessGroupRequest) -> None:
        """Become one of the receivers of the trainer's broadcasts; a group that was joined before is left.

        Raises WeightUpdateError if the group is not formed in time.
        """
        async with self._one_at_a_time:
            await self._leave()
            group = CollectiveWeightReceiver(
                request.host,
                request.port,
                request.index,
                engine=request.name or self._engine.name,
                receivers=request.receivers,
                join_timeout_s=request.timeout_s,
                device=next(iter(self._held.values())).device,
            )
            try:
                await asyncio.to_thread(group.wait_joined, request.timeout_s)
            except WeightUpdateError:
                await asyncio.to_thread(group.close)
                raise
            self._group = group

    async def close(self) -> None:
        """Leave the process group, if there is one."""
        async with self._one_at_a_time:
            await self._leave()

    async def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            await asyncio.to_thread(group.close)

    async def take(self, request: WeightUpdateRequest) -> UpdateReceipt:
        """The engine's receipt. What the engine holds already is not read again: an answer that was lost can be asked for.

        Raises RefusedError (path, version, no group, no engine, no answer in time) and WeightUpdateError (what came).
        """
        async with self._one_at_a_time:
            holding = self._engine.holding
            if (request.version, request.checksum) == holding:
                receipt = self._receipt_of(holding)
                if request.path is None:
                    self._answer_for(receipt)
                return receipt
            self._check_version(request.version, holding.version)
            if request.path is None:
                return await self._take_broadcast(request)
            reading = asyncio.to_thread(read_update, request, self._directories, self._held)
            return await self.apply(await _within_bound(reading, "reading the file"))

    async def _take_broadcast(self, request: WeightUpdateRequest) -> UpdateReceipt:
        """Wait until the update has come whole, take it, and answer the sender as well."""
        group = self._group
        if group is None:
            raise RefusedError(
                "bad_request", "no `path`, and no process group to receive from: POST /init_process_group", param="path"
            )
        update = await _within_bound(_arrival(group), "the broadcast")
        try:
            if (update.version, update.checksum) != (request.version, request.checksum):
                raise WeightUpdateError(
                    f"version {update.version} (checksum {update.checksum}) was broadcast, not {request.version} "
                    f"({request.checksum}): nothing was changed"
                )
            check_fit(update.tensors, self._held)
            receipt = await self.apply(update)
        except (WeightUpdateError, RefusedError) as error:
            receipt = self._receipt_of(self._engine.holding)
            group.acknowledge(msgspec.structs.replace(receipt, version=update.version, error=str(error)))
            raise
        group.acknowledge(receipt)
        return receipt

    def _answer_for(self, receipt: UpdateReceipt) -> None:
        """Answer a broadcast of what the engine holds already: the weights that its model was loaded with."""
        group = self._group
        with contextlib.suppress(WeightUpdateError):  # whatever became of the group, these are the weights
            if group is not None and group.offered() == receipt.version and group.poll() is not None:
                group.acknowledge(receipt)

    async def apply(self, update: WeightUpdate) -> UpdateReceipt:
        """Give the engine an update that was verified."""
        receipt = await _within_bound(asyncio.wrap_future(self._engine.update(update)), "the engine's next token")
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

    def _check_version(self, version: int, newest: int) -> None:
        """Versions rise; only the first update may have the version that the model was loaded as."""
        if version < newest or (version == newest and self._engine.progress().weight_updates):
            raise RefusedError(
                "stale_version",
                f"version {version} does not follow version {newest}, which this server holds (start servers anew for "
                "another run)",
                param="version",
            )


async def _arrival(group: CollectiveWeightReceiver) -> WeightUpdate:
    """The next update that comes. Raises WeightUpdateError if the sender is gone, or it came damaged."""
    while (update := group.poll()) is None:
        await asyncio.sleep(LOOK_S)
    return update


async def _within_bound(work: Awaitable[T], what: str) -> T:
    try:
        return await asyncio.wait_for(work, TIMEOUT_S)
    except TimeoutError as error:
        raise unavailable(f"the weight update waited {TIMEOUT_S:g} s for {what}, and was given up") from error
