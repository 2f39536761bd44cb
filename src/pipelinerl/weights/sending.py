"""The trainer's end of every transfer of weights: copies of named tensors, offers to engines, and their receipts."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from pipelinerl.errors import ReplacedError, WeightUpdateError
from pipelinerl.files import remedy
from pipelinerl.hub import wire
from pipelinerl.interfaces import Messages
from pipelinerl.models.state import checksum, device_checksum, digests_of, not_finite, on_gpu
from pipelinerl.types import Encoding, UpdateReceipt, WeightTransfer
from pipelinerl.weights.layout import Layout, layout_of, make_buffer, pin_all

_POLL_S = 0.0005


class Sender(ABC):
    """A `WeightSender`. `transfer` is the latest complete one; `digests` has one for each tensor of the latest update.

    Engines are known by number. One that has died is not waited for until the process that replaces it asks for
    weights; that one gets the newest.
    """

    def __init__(
        self,
        hub: Messages,
        engines: int,
        *,
        encoding: Encoding = "full",
        timeout_s: float = 120.0,
        give_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """`encoding`: delta is for a broadcast. `timeout_s`: how long to wait for answers.

        `give_up` returns True when the run is ending, and engines may be gone: the sender then neither waits nor sends.
        """
        self.transfer: WeightTransfer | None = None
        self.digests: Mapping[str, str] = {}
        self._hub, self._encoding, self._timeout_s, self._give_up = hub, encoding, timeout_s, give_up
        self._answered = dict.fromkeys(range(engines), 0)  # number of the update
        self._names = {engine: f"number {engine}" for engine in range(engines)}
        self._layout: Layout | None = None
        self._sent: wire.Offer | None = None
        self._offered = 0  # number of the update that engines may take
        self._begin_s = self._sent_s = 0.0  # time.monotonic
        self._path = ""  # of the file that the update is in, if it has a name
        self._inbox: list[UpdateReceipt] = []
        self._problem: str | None = None
        hub.handle(wire.EngineAnswer, self._on_answer)

    def send(self, version: int, tensors: Mapping[str, Tensor], adapter: Mapping[str, Tensor] | None = None) -> str:
        """Copy the tensors and offer the copies. Returns their checksum, or "" if the run is ending.

        With the encoding adapter, only the tensors of `adapter` are copied, which `tensors` are the result of.

        Versions must rise, and names, types, shapes and tying must not change; otherwise raises WeightUpdateError. Also
        raises it if an engine did not acknowledge the previous update in time, or holds other weights.
        """
        if self._sent is not None and version <= self._sent.version:
            raise WeightUpdateError(f"weight versions must rise: {version} was sent after {self._sent.version}")
        moved = adapter if adapter and self._encoding == "adapter" else tensors
        layout, source = layout_of(moved), next(iter(moved.values())).device if on_gpu(moved) else None
        if self._layout not in (None, layout):
            raise WeightUpdateError("the weights differ from those of earlier updates in names, types, shapes or tying")
        copies = self._buffer(layout, source) if self._wait_for_answers() else None
        if copies is None:
            return ""
        self._begin_s = time.monotonic()
        with torch.no_grad():
            for name in dict.fromkeys(layout.first_names().values()):
                copies[name].copy_(moved[name], non_blocking=moved[name].is_cuda)
        for device in {tensor.device for tensor in moved.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        self.digests = digests_of(copies if moved is tensors else tensors)
        self._layout, self._sent_s = layout, time.monotonic()
        self._sent = wire.Offer(
            number=self._sent.number + 1 if self._sent else 1,
            version=version,
            checksum=checksum(tensors, self.digests),
            adapter="" if moved is tensors else checksum(copies),
            device_checksum="" if source is None or not_finite(tensors) else device_checksum(tensors),
            path=self._path,
        )
        self._publish(self._sent)
        return self._sent.checksum

    def unanswered(self) -> Sequence[str]:
        """The engines that have not acknowledged the last update. While there are any, `send` would wait."""
        self._hub.take()
        sent = self._sent.number if self._sent else 0
        return [self._names[engine] for engine, answered in self._answered.items() if wire.DEAD < answered < sent]

    def receipts(self) -> Sequence[UpdateReceipt]:
        """Receipts since the last call. Raises WeightUpdateError if an engine does not hold exactly what was sent."""
        self._hub.take()
        self._raise_problem()
        receipts, self._inbox = self._inbox, []
        return receipts

    @abstractmethod
    def _buffer(self, layout: Layout, source: torch.device | None) -> Mapping[str, Tensor] | None:
        """Memory for the next update; nobody reads it any more. None if the run is ending.

        `source`: the GPU of the tensors, if they are on one.
        """

    def _publish(self, offer: wire.Offer) -> None:
        """Make the update available: by default it is, as soon as the copies are made."""
        size, time_s = 0 if self._layout is None else self._layout.buffer_bytes, time.monotonic() - self._begin_s
        encoding: Encoding = "adapter" if offer.adapter else "full"
        self._offer(offer, WeightTransfer(version=offer.version, bytes=size, time_s=time_s, encoding=encoding))

    def _offer(self, offer: wire.Offer, transfer: WeightTransfer) -> None:
        self.transfer, self._offered = transfer, offer.number
        self._hub.send(offer)

    def _wait_for_answers(self) -> bool:
        """Wait until all engines have acknowledged the previous update. False if `give_up` returned True meanwhile."""
        if not self._wait_while(self.unanswered, self._timeout_s):
            return False
        if missing := self.unanswered():
            assert self._sent is not None  # noqa: S101 - nothing can be missing before the first update
            raise WeightUpdateError(
                f"engine {', '.join(missing)} did not answer weights of version {self._sent.version} in the "
                f"{time.monotonic() - self._sent_s:.1f} s since they were sent (bound: {self._timeout_s:g} s)"
            )
        return True

    def _wait_while(self, pending: Callable[[], object], bound_s: float = inf) -> bool:
        """Wait for at most `bound_s`. False if `give_up` returned True meanwhile. Raises the errors of engines."""
        deadline_s = time.monotonic() + bound_s
        while pending() and time.monotonic() < deadline_s:
            self._hub.take()
            if self._give_up():
                return False
            self._raise_problem()
            time.sleep(_POLL_S)
        self._raise_problem()
        return True

    def _on_answer(self, answer: wire.EngineAnswer) -> None:
        """Note an engine's answer. One that asks gets the last update, and is waited for from now on."""
        engine, sent = answer.engine, self._sent
        self._answered[engine] = answer.number
        if sent is None:
            return
        if answer.number == wire.ASKS and self._offered == sent.number:
            self._hub.send(msgspec.structs.replace(sent, engine=engine))
        elif answer.number == sent.number and answer.receipt is not None:
            self._names[engine] = f"number {engine} ({answer.receipt.engine})"
            self._problem = self._problem or answer.receipt.problem(sent.version, sent.checksum)
            self._inbox.append(answer.receipt)

    def _raise_problem(self) -> None:
        if self._problem is not None:
            raise WeightUpdateError(self._problem)


class MemoryWeightSender(Sender):
    """Sends within one process: a `Receiver` takes `tensors` itself. A new update replaces one that was not taken yet."""

    def __init__(self, hub: Messages) -> None:
        super().__init__(hub, 1)
        self._copies: Mapping[str, Tensor] = {}

    def tensors(self, _: wire.Offer) -> Mapping[str, Tensor]:
        return self._copies

    def close(self) -> None:
        """Nothing to release."""

    def _buffer(self, layout: Layout, source: torch.device | None) -> Mapping[str, Tensor]:
        del source
        self._copies = self._copies or layout.views(torch.empty(layout.buffer_bytes, dtype=torch.uint8))
        return self._copies

    def _wait_for_answers(self) -> bool:
        self._raise_problem()
        return True


class SharedWeightSender(Sender):
    """Writes to a file in memory that embedded engines map, or to the files of a folder that engine servers read.

    A file stays mapped as long as views of it exist.
    """

    def __init__(self, file: int | WeightFolder, hub: Messages, engines: int, **options: Any) -> None:
        """`file`: the descriptor of a file in memory, which the caller owns, or a folder, which `close` removes.

        `options`: see `Sender`.
        """
        super().__init__(hub, engines, **options)
        self._file = file
        self._copies: deque[tuple[str, dict[str, Tensor]]] = deque()  # with the paths of their files
        self._unpin: list[Callable[[], object]] = []

    def close(self) -> None:
        """Release the buffers. Embedded engines can still take the last update. Servers are waited for: they read a file."""
        if isinstance(self._file, WeightFolder):
            with suppress(WeightUpdateError, ReplacedError):  # `receipts` reports failures; `close` does not
                self._wait_for_answers()
            self._file.close()
        for unpin in self._unpin:
            unpin()
        self._copies.clear()

    def _buffer(self, layout: Layout, source: torch.device | None) -> Mapping[str, Tensor]:
        if not self._copies:
            size = layout.buffer_bytes
            try:
                files = {"": self._file} if isinstance(self._file, int) else self._file.open(size)
                self._copies = deque((path, make_buffer(fd, layout)) for path, fd in files.items())
            except OSError as error:
                raise WeightUpdateError(
                    f"no room for a copy of the weights ({size / 1e6:.0f} MB): {error.strerror or error}; {remedy(error)}"
                ) from error
            if source is not None:
                self._unpin = [pin_all(tensors, source) for _, tensors in self._copies]
        self._copies.rotate()
        self._path, tensors = self._copies[0]
        return tensors

    def _publish(self, offer: wire.Offer) -> None:
        if offer.path:
            os.close(os.open(offer.path, os.O_RDWR))  # has a network file system write it, before other machines read it
        super()._publish(offer)


COPIES = 2
"""The previous update stays until the new one is acknowledged, for a server that is started again meanwhile."""
_PREFIX = "pipelinerl-weights-"
_LOCK = "lock"


class WeightFolder:
    """A private directory with the files of one sender, removed at the end, or after a crash by the next one beside it.

    `parents`: candidate locations, preferred first; the first with room for all files is used. The directory is locked while
    this process lives.
    """

    def __init__(self, *parents: Path) -> None:
        self._parents = parents
        self._directory: Path | None = None
        self._fds: list[int] = []

    def open(self, size: int) -> dict[str, int]:
        """Make `COPIES` empty files, each of which will have about `size` bytes: descriptors by path. Raises OSError."""
        for parent in self._parents:
            if os.access(parent, os.W_OK | os.X_OK) and shutil.disk_usage(parent).free > COPIES * size:
                break
        else:
            where = ", ".join(map(str, self._parents))
            raise OSError(errno.ENOSPC, f"no room for {COPIES} copies in any of: {where}")
        for left in parent.glob(f"{_PREFIX}*"):
            _remove_if_abandoned(left)
        name = f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        unlocked = parent / f".{name}"  # until it is locked: a name that the glob of other processes does not match
        unlocked.mkdir(mode=0o700)
        fcntl.flock(self._new_file(unlocked / _LOCK), fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._directory = directory = unlocked.rename(parent / name)
        paths = [directory / f"{number}.safetensors" for number in range(COPIES)]
        return {str(path): self._new_file(path) for path in paths}

    def close(self) -> None:
        """Remove the directory and its files."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        while self._fds:
            os.close(self._fds.pop())

    def _new_file(self, path: Path) -> int:
        self._fds.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        return self._fds[-1]


def _remove_if_abandoned(directory: Path) -> None:
    """Remove a directory whose owner has exited, which frees its lock. A directory that can't be opened is left alone."""
    try:
        fd = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory, ignore_errors=True)
    except BlockingIOError:
        pass
    finally:
        os.close(fd)
