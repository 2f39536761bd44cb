"""Weights that arrive at an engine server, our own or vLLM: in files, or by the trainer's broadcast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipelinerl.errors import StaleEpochError, WeightUpdateError
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.serving.wire import ProcessGroupRequest, WeightUpdateRequest
from pipelinerl.weights.broadcast.receiver import BroadcastReceiver
from pipelinerl.weights.layout import decode_layout
from pipelinerl.weights.receiving import require_intact


class IncomingWeights:
    """The updates of one server, verified before the model is changed, and the session that they are of.

    `device`: where the server computes. Files are read only below `directories`. Not thread-safe.
    """

    def __init__(self, device: torch.device, directories: Sequence[Path] = ()) -> None:
        self.directories = directories
        self._device = device
        self._group: BroadcastReceiver | None = None
        self._session = ("", 0)  # run and epoch
        self._latest: dict[str, int] = {}  # epochs by run

    def begins(self, request: ProcessGroupRequest | WeightUpdateRequest) -> bool:
        """Whether the request begins a session, once it has succeeded.

        A session begins if it is later than all others of its run; otherwise, and if it is not the current one, raises
        StaleEpochError. A client that is no run begins nothing.
        """
        if not request.run or (request.run, request.epoch) == self._session:
            return False
        if request.epoch <= self._latest.get(request.run, 0):
            raise StaleEpochError("a later session updates the weights of this server: nothing was changed")
        return True

    def connect(self, request: ProcessGroupRequest, name: str = "") -> BroadcastReceiver:
        """Begin to join the trainer's broadcast. The caller waits for it, then calls `join`, or closes the receiver."""
        self.begins(request)
        return BroadcastReceiver(request, self._device, name)

    def join(self, request: ProcessGroupRequest, group: BroadcastReceiver) -> None:
        """Receive from this group from now on. A group that was joined before is left."""
        self.close()
        self._group = group
        if self.begins(request):
            self._begin(request)

    def fetch(self, request: WeightUpdateRequest, firsts: Mapping[str, str] | None = None) -> WeightUpdate:
        """The update, which is in its file or has been received. Raises WeightUpdateError if it is not what was announced.

        `firsts`: see `models.state.first_names`; a tied name may be missing in a file.
        """
        begins = self.begins(request)
        if request.path is not None:
            tensors = read_file(self._allowed(request.path))
            for name, first in (firsts or {}).items():
                if name not in tensors and first in tensors:
                    tensors[name] = tensors[first]
            require_intact(tensors, request.version, request.checksum)
            return WeightUpdate(request.version, request.checksum, tensors)
        group = None if begins else self._group
        if group is None:
            raise WeightUpdateError("no file is named, and no broadcast was joined yet")
        if (update := group.newest()) is None:
            raise WeightUpdateError(f"version {request.version} has not been broadcast")
        if (update.version, update.checksum) != (request.version, request.checksum):
            raise WeightUpdateError(
                f"version {update.version} (checksum {update.checksum}) was broadcast, not {request.version} "
                f"({request.checksum})"
            )
        return update

    def applied(self, request: WeightUpdateRequest) -> None:
        """Note that the model has the weights. What was received in a group of an earlier session is not used any more."""
        if self.begins(request):
            self._begin(request)
            self.close()

    def close(self) -> None:
        """Leave the group, if one was joined."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _begin(self, request: ProcessGroupRequest | WeightUpdateRequest) -> None:
        self._latest[request.run] = request.epoch
        self._session = (request.run, request.epoch)

    def _allowed(self, path: str) -> Path:
        """The file, after links. Raises WeightUpdateError unless it is a regular file below one of the directories."""
        try:
            found = Path(path).resolve(strict=True)
        except (OSError, ValueError, RuntimeError) as error:
            raise WeightUpdateError(f"can't find the weights {path!r}: {error}") from error
        if not any(found.is_relative_to(directory.resolve()) for directory in self.directories):
            allowed = ", ".join(map(str, self.directories)) or "none"
            raise WeightUpdateError(f"{path!r} is not below a directory for weights (--weights-dir: {allowed})")
        if not found.is_file():
            raise WeightUpdateError(f"{path!r} is not a regular file")
        return found


def read_file(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, memory-mapped. Raises WeightUpdateError if it can't be read."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is not a mapping
            layout = (file.metadata() or {}).get("layout")
        if layout is not None:
            tensors = {name: tensors[first] for name, first in decode_layout(layout).first_names().items()}
    except (OSError, SafetensorError, KeyError) as error:
        raise WeightUpdateError(f"the weights in {path} can't be read: {error}") from error
    return tensors
