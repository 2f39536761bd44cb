"""A CUDA device that does not exist: CPU tensors with a label. Code for GPUs runs on it, with real numbers, without a GPU.

It is as strict as a device, or stricter:

devices      an operation that mixes tensors of the device and of the CPU fails
waits        everything for which the host waits for the device is counted, and fails while a graph is recorded. A copy to
             the device is waited for, too, unless it comes from pinned memory and does not block
late copies  a copy into pinned memory that does not block arrives when an event recorded after it is waited for, or the
             device is; until then the memory holds garbage
graphs       recording notes the operations with their tensors, and has no effect; a replay runs them on the same storage, so
             what Python decided while it recorded stays decided. A pool must not be used after its last graph

Labels belong to storages. A function mode answers for `.device`, strips `device=`, and sees `.numpy()` and `.item()`. A
dispatch mode sees every operation, those of backward passes too, checks what goes in, and labels what comes out. Streams are
one, and numbers are those of the CPU.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from pipelinerl.models import varlen

CUDA = torch.device("cuda", 0)
aten = torch.ops.aten

_MAY_MIX = {
    aten._has_compatible_shallow_copy_type.default,
    aten.copy_.default,
    aten._to_copy.default,
    aten.index.Tensor,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten.lift_fresh.default,
    aten.alias.default,
    aten.detach.default,
}
_WAITS = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.bincount.default,
    aten._unique2.default,
    aten.repeat_interleave.Tensor,
}
_READS = {"item", "tolist", "__bool__", "__float__", "__int__", "__index__"}


class PretendedDevice:
    """The state of the device. `waits` counts by what the host waited for, `operations` by name.

    `most_pinned`: the most bytes of pinned memory that were in use at once.
    """

    def __init__(self) -> None:
        self.waits: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()
        self.recording: list[Any] | None = None
        self.on = True
        self.most_pinned = 0
        self.registered: set[int] = set()
        """Addresses of memory that PyTorch has not allocated, and that is pinned."""
        self._pinned: list[tuple[StorageWeakRef, int]] = []
        self._labels: dict[int, tuple[StorageWeakRef, str]] = {}
        self._arriving: list[tuple[Tensor, Tensor]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._graphs_of_pool: Counter[object] = Counter()

    # ---- labels

    def label(self, tensor: Any) -> str | None:
        if not isinstance(tensor, Tensor):
            return None
        key = tensor.untyped_storage()._cdata
        storage, label = self._labels.get(key, (None, None))
        if storage is not None and storage.expired():
            del self._labels[key]
            return None
        return label or ("pinned" if tensor.untyped_storage().data_ptr() in self.registered else None)

    def is_here(self, tensor: Any) -> bool:
        return self.label(tensor) == "cuda"

    def mark(self, tensor: Tensor, label: str = "cuda") -> Tensor:
        with torch._C.DisableTorchFunction():
            storage = tensor.untyped_storage()
            self._labels[storage._cdata] = (StorageWeakRef(storage), label)
            if label == "pinned":
                in_use = [(pinned, size) for pinned, size in self._pinned if not pinned.expired()]
                self._pinned = [*in_use, (StorageWeakRef(storage), storage.nbytes())]
                self.most_pinned = max(self.most_pinned, sum(size for _, size in self._pinned))
        return tensor

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, tensors are what they are: on the CPU."""
        before, self.on = self.on, False
        try:
            with torch.inference_mode():
                yield
        finally:
            self.on = before

    # ---- waits and copies

    def wait(self, what: str) -> None:
        """The host waits until all is done."""
        if self.recording is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing ({what})")
        self.waits[what] += 1
        self.arrive(list(self._arriving))

    def arrive(self, copies: list[tuple[Tensor, Tensor]]) -> None:
        for copy in copies:
            if any(copy is waiting for waiting in self._arriving):
                self._arriving = [waiting for waiting in self._arriving if waiting is not copy]
                with self.aside():
                    copy[0].copy_(copy[1])

    def copied_late(self, host: Tensor, content: Tensor) -> None:
        with self.aside():
            self._arriving.append((host, content.clone()))
            host.reshape(-1).view(torch.uint8).fill_(0x7B)

    def under_way(self) -> list[tuple[Tensor, Tensor]]:
        return list(self._arriving)

    # ---- graphs

    def begin_recording(self, pool: object) -> None:
        if pool in self._graphs_of_pool and self._graphs_of_pool[pool] <= 0:
            raise RuntimeError("the pool is used again after all its graphs are gone (use_count > 0)")
        self._graphs_of_pool[pool] += 1
        self.recording, self._before = [], {}

    def end_recording(self) -> list[Any]:
        recorded, self.recording = self.recording, None
        assert recorded is not None
        with self.aside():
            for whole, content in self._before.values():
                whole.copy_(content)
        return recorded

    def end_graph(self, pool: object) -> None:
        self._graphs_of_pool[pool] -= 1

    def note(self, func: Any, args: Any, kwargs: Any) -> None:
        """Keep what `func` writes to as it was before the recording."""
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tree_leaves(args[i] if i < len(args) else kwargs.get(argument.name)):
                    key = tensor.untyped_storage()._cdata if isinstance(tensor, Tensor) else None
                    if key is not None and key not in self._before:
                        whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                        self._before[key] = (whole, whole.clone())


class _Operations(TorchDispatchMode):
    """Every operation: its inputs are on one device, and its outputs are there, too."""

    def __init__(self, device: PretendedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device, kwargs = self._device, dict(kwargs or {})
        if not device.on:
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        here = [tensor for tensor in tensors if device.is_here(tensor)]
        made_here = _names_cuda(kwargs.get("device"))
        if made_here:
            kwargs["device"] = torch.device("cpu")
        elsewhere = [tensor for tensor in tensors if tensor.dim() and not device.is_here(tensor)]
        if here and elsewhere and func not in _MAY_MIX:
            raise RuntimeError(f"Expected all tensors to be on the same device: {func}")
        if here and (func in _WAITS or self._indexes_by_mask(func, args)):
            device.wait(func.__name__)
        if func is aten.copy_.default and self._copies_to_host(args, kwargs):
            return args[0]
        if func in (aten.copy_.default, aten._to_copy.default) and elsewhere and (made_here or device.is_here(args[0])):
            self._copies_from_host(elsewhere[0], late=bool(kwargs.get("non_blocking")) or args[2:] == (True,))
        if device.recording is not None:
            device.note(func, args, kwargs)
        out = func(*args, **kwargs)
        if here or made_here:
            device.operations[func.__name__] += 1
            if func not in _WAITS and not (func is aten.copy_.default and not device.is_here(args[0])):
                tree_map_only(Tensor, device.mark, out)
        if device.recording is not None:
            device.recording.append((func, args, kwargs, out))
        return out

    def _indexes_by_mask(self, func: Any, args: Any) -> bool:
        indexing = func in (aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default)
        return indexing and any(isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1])

    def _copies_from_host(self, source: Tensor, *, late: bool) -> None:
        if self._device.recording is not None or not (late and self._device.label(source) == "pinned"):
            self._device.wait("a copy from the host")

    def _copies_to_host(self, args: Any, kwargs: Any) -> bool:
        """Whether this is a copy to the host that has been done here."""
        target, source = args[:2]
        if not self._device.is_here(source) or self._device.is_here(target):
            return False
        if (kwargs.get("non_blocking") or args[2:] == (True,)) and self._device.label(target) == "pinned":
            self._device.copied_late(target.detach(), source.detach())
            return True
        self._device.wait("a copy to the host")
        return False


class _Functions(TorchFunctionMode):
    """Functions that name the device, or that read a tensor's content or place."""

    def __init__(self, device: PretendedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(  # noqa: PLR0911, PLR0912 - a list of cases
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        device, kwargs = self._device, dict(kwargs or {})
        if not device.on or func is torch.device or getattr(func, "__name__", "") == "_parse_to":
            return func(*args, **kwargs)
        name, first = getattr(func, "__name__", ""), args[0] if args else None
        here = device.is_here(first)
        if here and func in _PLACES:
            return _PLACES[func]
        if name == "is_pinned":
            return device.label(first) == "pinned"
        if name == "pin_memory":
            return device.mark(first.clone(), "pinned")
        if name in ("cuda", "cpu"):
            name, func, args = "to", Tensor.to, (first, CUDA if name == "cuda" else torch.device("cpu"))
        if here and name == "numpy" and not kwargs.get("force"):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if here and (name in _READS or name == "numpy"):
            device.wait(name)
            with device.aside():
                return func(*args, **kwargs)
        if name == "mm" and kwargs.pop("out_dtype", None) is not None:
            return torch.mm(args[0].float(), args[1].float(), **kwargs)
        pinned = kwargs.pop("pin_memory", None)
        args, kwargs, names = _without_device(args, kwargs)
        if name == "to" and isinstance(first, Tensor):
            other = args[1] if len(args) > 1 and isinstance(args[1], Tensor) else None
            to_cuda = device.is_here(other) if other is not None else ("cuda" in names or (here and not names))
            late = bool(kwargs.get("non_blocking")) and device.label(first) == "pinned"
            return self._moved(first, [*args[1:], *kwargs.values()], to_cuda=to_cuda, late=late)
        if "cuda" in names and name in ("tensor", "as_tensor"):
            if here:
                return func(*args, **kwargs)
            device.wait("a copy from the host")
            before, device.on = device.on, False
            try:
                return device.mark(func(*args, **kwargs).clone())
            finally:
                device.on = before
        out = func(*args, **kwargs)
        if "cuda" in names:
            return tree_map_only(Tensor, device.mark, out)
        return device.mark(out, "pinned") if pinned else out

    def _moved(self, tensor: Tensor, given: list[Any], *, to_cuda: bool, late: bool) -> Tensor:
        device = self._device
        dtypes = [part if isinstance(part, torch.dtype) else part.dtype for part in given if isinstance(part, _HAVE_DTYPE)]
        dtype = dtypes[0] if dtypes else tensor.dtype
        if to_cuda == device.is_here(tensor):
            return tensor if dtype == tensor.dtype else tensor.to(dtype)
        if not to_cuda or not late or device.recording is not None:
            device.wait("a copy to the host" if not to_cuda else "a copy from the host")
        before, device.on = device.on, False
        try:
            moved = tensor.to(dtype, copy=True)
        finally:
            device.on = before
        return device.mark(moved) if to_cuda else moved


_HAVE_DTYPE = (torch.dtype, Tensor)
_PLACES: dict[Any, Any] = {Tensor.device.__get__: CUDA, Tensor.is_cuda.__get__: True, Tensor.is_cpu.__get__: False}


def _names_cuda(device: object) -> bool:
    return str(device).startswith("cuda") if isinstance(device, (str, torch.device)) else False


def _without_device(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any], list[str]]:
    """The arguments with the CPU for every device, and the kinds of devices that they named."""
    names = []

    def named(part: Any) -> Any:
        if str(part) in ("cpu", "cuda", "cuda:0"):  # not meta
            names.append("cuda" if _names_cuda(part) else "cpu")
            return torch.device("cpu")
        return part

    args = tuple(named(part) if isinstance(part, (str, torch.device)) else part for part in args)
    if "device" in kwargs:
        kwargs["device"] = named(kwargs["device"]) if kwargs["device"] is not None else None
    return args, kwargs, names


# ---- torch.cuda


def _cuda_api(device: PretendedDevice) -> dict[str, Any]:
    class Event:
        def record(self, _stream: object = None) -> None:
            self._copies = device.under_way()

        def synchronize(self) -> None:
            device.waits["an event"] += 1
            device.arrive(self._copies)

    class Stream:
        device = CUDA

        def wait_stream(self, _: object) -> None: ...

        def synchronize(self) -> None:
            device.wait("a stream")

    class CUDAGraph:
        recorded: list[Any]
        pool: object = None

        def replay(self) -> None:
            device.operations["replay"] += 1
            with device.aside():
                for func, args, kwargs, out in self.recorded:
                    given = {
                        leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
                    }
                    for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                        if isinstance(old, Tensor) and old.untyped_storage()._cdata not in given:
                            old.copy_(new)

        def __del__(self) -> None:
            device.end_graph(self.pool)

    @contextlib.contextmanager
    def graph(made: CUDAGraph, *, pool: object, stream: object = None, capture_error_mode: str = "") -> Iterator[None]:
        assert stream is not None, "graphs of two engines must not share a stream"
        made.pool = pool
        device.begin_recording(pool)
        try:
            yield
        finally:
            made.recorded = device.end_recording()

    properties = SimpleNamespace(name="pretended", total_memory=80 << 30, multi_processor_count=132, major=9, minor=0)

    def register(address: int, *_: object) -> int:
        device.registered.add(address)
        return 0

    def all_reduce(tensors: list[Tensor]) -> None:
        total = torch.stack(tensors).sum(0)
        for tensor in tensors:
            tensor.copy_(total)

    cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=device.registered.discard)
    nothing: Callable[..., Any] = lambda *_: contextlib.nullcontext()  # noqa: E731
    return {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "synchronize": lambda *_: device.wait("the device"),
        "empty_cache": lambda: None,
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda *_: Stream(),
        "stream": nothing,
        "device": nothing,
        "CUDAGraph": CUDAGraph,
        "graph": graph,
        "graph_pool_handle": object,
        "mem_get_info": lambda *_: (78 << 30, 80 << 30),
        "get_device_properties": lambda *_: properties,
        "cudart": lambda: cudart,
        "nccl": SimpleNamespace(all_reduce=all_reduce, version=lambda: (2, 29, 7)),
        "is_current_stream_capturing": lambda: device.recording is not None,
        "_lazy_init": lambda: None,
    }


def _flash_attention(device: PretendedDevice) -> Callable[..., Tensor]:
    def attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Tensor:
        """The reference, with what the kernel demands."""
        for tensor in (query, key, value):
            assert tensor.is_cuda
            assert tensor.dtype in (torch.bfloat16, torch.float16)
            assert tensor.stride(-1) == 1
        used = options.get("seqused_k")
        for integers in (*rest[:2], *(() if used is None else (used,))):
            assert integers.is_cuda
            assert integers.dtype == torch.int32
            assert integers.is_contiguous()
        assert query.shape[-1] <= 256
        assert query.shape[-1] % 8 == 0
        if rest[2] == 1:
            device.operations["attention, fast" if options["window_size"] == (-1, -1) else "attention, slow"] += 1
        return varlen.varlen_reference(query, key, value, *rest, **options)

    return attention


@contextlib.contextmanager
def pretended_cuda() -> Iterator[PretendedDevice]:
    """Inside, there is a device `cuda:0`."""
    device = PretendedDevice()
    changes = [(torch.cuda, name, value) for name, value in _cuda_api(device).items()]
    changes.append((varlen, "flash_attention", _flash_attention(device)))
    functions, run_backward = _Functions(device), torch.autograd._engine_run_backward

    def backward(*arguments: Any, **options: Any) -> Any:
        """With the mode that is off while it handles `Tensor.backward`: backward passes ask for devices, too."""
        with functions:
            return run_backward(*arguments, **options)

    changes.append((torch.autograd, "_engine_run_backward", backward))
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        with _Operations(device), functions:
            yield device
    finally:
        device.on = False
        for owner, name, value in before:
            setattr(owner, name, value)
