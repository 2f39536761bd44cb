"""The weights of a model as named tensors: reading all of them, their checksum, and copying them back exactly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from pipelinerl.errors import WeightUpdateError


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and persistent buffer under each of its names, in the order of the model's modules.

    Tied parameters appear under every name, as the same storage. Nothing is copied; the tensors are detached.
    """
    weights = {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}
    for name, value in model.state_dict().items():  # adds buffers: state_dict has the persistent ones only
        if isinstance(value, Tensor):
            weights.setdefault(name, value.detach())
    return weights


def compute_dtype(model: nn.Module) -> torch.dtype:
    """The type that the model computes in. A sharded model may have parameters of a wider type."""
    found = getattr(model, "compute_dtype", None)
    return found if isinstance(found, torch.dtype) else next(model.parameters()).dtype


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether a type of floating-point numbers is narrower than float32."""
    return dtype.itemsize < torch.float32.itemsize


def first_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """For each name, the first name of the same tensor: the name itself unless it is a tied alias.

    Raises TypeError for sharded tensors.
    """
    owners: dict[tuple[object, ...], str] = {}
    firsts = {}
    for name, tensor in tensors.items():
        if hasattr(tensor, "full_tensor"):  # a DTensor: all have the same address
            raise TypeError(f"{name} is sharded: gather it first")
        where = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        # Empty tensors and meta tensors have no address that identifies them.
        firsts[name] = owners.setdefault(where, name) if tensor.numel() and not tensor.is_meta else name
    return firsts


def checksum(tensors: Mapping[str, Tensor], digests: Mapping[str, str] | None = None) -> str:
    """Checksum over name, type, shape and bytes of every tensor: 128 bits as 32 hex digits. Independent of the order.

    `digests`: of these tensors (`digests_of`), if the caller has computed them.
    """
    digests = digests_of(tensors) if digests is None else digests
    whole = xxhash.xxh3_128()
    for name in sorted(tensors):
        tensor = tensors[name]
        whole.update(f"{name}\n{tensor.dtype}\n{tuple(tensor.shape)}\n{digests[name]}\n".encode())
    return whole.hexdigest()


def on_gpu(tensors: Mapping[str, Tensor]) -> bool:
    """Whether all tensors are on one GPU."""
    return all(tensor.is_cuda for tensor in tensors.values()) and len({tensor.device for tensor in tensors.values()}) == 1


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """A digest of the bytes of each tensor: 128 bits as 32 hex digits. A tied tensor is read once."""
    firsts = first_names(tensors)
    digests = {name: xxhash.xxh3_128() for name in firsts.values()}
    for name, part in host_parts({name: tensors[name] for name in digests}):
        digests[name].update(part)
    return {name: digests[first].hexdigest() for name, first in firsts.items()}


def host_parts(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Any]]:
    """The bytes of each tensor, in order. From other devices one tensor at a time is copied, from a GPU in several parts."""
    if any(tensor.is_cuda for tensor in tensors.values()):
        from pipelinerl.models.transfers import arriving  # noqa: PLC0415 - only from a GPU

        return arriving((name, bytes_of(tensor)) for name, tensor in tensors.items())
    return ((name, bytes_of(tensor.cpu()).numpy()) for name, tensor in tensors.items())


def bytes_of(tensor: Tensor) -> Tensor:
    """The tensor's bytes, flat: NumPy has no bfloat16. All ranks must call it for a sharded tensor, which it gathers."""
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors with a value that is not finite. A tied tensor has its first name.

    Each tensor is summed, which takes about as long as reading it: the sum is finite only if every value is. Single values
    are checked only if the sum is not finite, since the sum of large finite values may overflow.
    """
    owners = [name for name, first in first_names(tensors).items() if name == first and tensors[name].is_floating_point()]
    if not owners:
        return []
    sums = torch.stack([tensors[name].detach().sum(dtype=torch.float32) for name in owners]).cpu()
    suspects = [owners[index] for index in (~sums.isfinite()).nonzero()[:, 0].tolist()]
    return [name for name in suspects if not bool(tensors[name].isfinite().all())]


def load_weights(model: nn.Module, tensors: Mapping[str, Tensor], *, known_finite: bool = False) -> None:
    """Copy `tensors` into the model's own storage: all of them, or none.

    Names and shapes must be exactly as in `named_weights(model)`, and all values finite (not checked if `known_finite`);
    types and devices are converted. Raises WeightUpdateError, listing all problems, before anything is copied.
    """
    weights = named_weights(model)
    misshapen = [
        f"{name} {tuple(tensors[name].shape)}, the model has {tuple(weight.shape)}"
        for name, weight in weights.items()
        if name in tensors and tensors[name].shape != weight.shape
    ]
    problems = summary_of("missing", sorted(weights.keys() - tensors.keys()))
    problems += summary_of("unknown", sorted(tensors.keys() - weights.keys()))
    problems += summary_of("of another shape", misshapen)
    if not problems:
        problems = summary_of("tied in the model but not equal", _untied(weights, tensors))
        problems += summary_of("with values that are not finite", [] if known_finite else not_finite(tensors))
    if problems:
        raise WeightUpdateError("the weights do not fit the model: " + "; ".join(problems))
    with torch.no_grad():
        for name, first in first_names(weights).items():
            if name == first:
                weights[name].copy_(tensors[name], non_blocking=weights[name].is_cuda)


def _untied(weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> list[str]:
    """Pairs of names that share one tensor in the model but have different contents in `tensors`."""
    sources = first_names(tensors)
    return [
        f"{first} and {name}"
        for name, first in first_names(weights).items()
        if sources[name] != sources[first] and not torch.equal(tensors[name], tensors[first])
    ]


def summary_of(what: str, names: Iterable[str], most: int = 8) -> list[str]:
    """A part of a message: how many names there are, and the first ones. Empty without names."""
    names = list(names)
    shown = ", ".join(names[:most]) + (", ..." if len(names) > most else "")
    return [f"{len(names)} {what} ({shown})"] if names else []
