"""Reading a whole set of weights from a safetensors file, so that the engine need only copy them.

Done beside the engine, in another thread: everything that could be wrong with a file is found before the engine sees it.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipelinerl.errors import WeightUpdateError
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.models.state import checksum, first_names
from pipelinerl.server.refusal import RefusedError
from pipelinerl.wire import WeightUpdateRequest

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
