"""A weight-transfer backend that runs inside vLLM: loads all weights from a file or the trainer's broadcast, on CPU and GPU.

vLLM's own backends need CUDA, but others can be registered. vLLM finds `register` through this package's entry point
`vllm.general_plugins`, in each of its processes. vLLM's RL routes then call, in this order:

    init_transfer_engine     joins a broadcast, if there is one
    start_weight_update      does nothing: the model is not changed before the weights are verified
    update_weights           reads and verifies the file, or uses the received broadcast; loads it, checks completeness
    finish_weight_update     does nothing

A broadcast arrives in buckets while tokens are generated, in a buffer of the size of the weights (on the GPU with nccl).
At the call of update_weights, the weights have been received and verified and only need to be loaded.

An update that is refused before loading leaves the model unchanged, and its error begins with `REFUSED`. Any other error
may leave the model half loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import new_class
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from torch import Tensor, nn

from pipelinerl.errors import WeightUpdateError
from pipelinerl.models.state import not_finite
from pipelinerl.serving.incoming import IncomingWeights
from pipelinerl.serving.vllm.messages import BACKEND, REFUSED
from pipelinerl.serving.wire import ProcessGroupRequest, WeightUpdateRequest


def register() -> None:
    """Register the backend with vLLM. vLLM may call this more than once per process."""
    from vllm.distributed.weight_transfer.base import (  # type: ignore[import-not-found,unused-ignore]  # noqa: PLC0415
        WeightTransferEngine,
    )
    from vllm.distributed.weight_transfer.factory import (  # type: ignore[import-not-found,unused-ignore]  # noqa: PLC0415
        WeightTransferEngineFactory,
    )

    if BACKEND not in WeightTransferEngineFactory._registry:
        engine = new_class("PipelineRLWeightTransferEngine", (TransferBackend, WeightTransferEngine))
        WeightTransferEngineFactory.register_engine(BACKEND, engine)


class TransferBackend:
    """The backend, a mix-in for vLLM's `WeightTransferEngine`, which sets `model` to `device` and calls the methods."""

    model: nn.Module
    model_config: Any
    parallel_config: Any
    device: torch.device
    init_info_cls = ProcessGroupRequest
    update_info_cls = WeightUpdateRequest
    supports_draft_weight_update = False

    @cached_property
    def _incoming(self) -> IncomingWeights:
        return IncomingWeights(self.device, [Path("/")])  # clients with the key may name any file

    def parse_init_info(self, init_dict: dict[str, Any]) -> ProcessGroupRequest:
        return msgspec.convert(init_dict, ProcessGroupRequest)

    def init_transfer_engine(self, init_info: ProcessGroupRequest) -> None:
        """Join the trainer's broadcast as a receiver; then leaves a group that was joined before."""
        with _refusing():
            if (workers := self.parallel_config.world_size) > 1:
                raise WeightUpdateError(
                    f"a broadcast reaches one worker, and this vLLM has {workers}: set weights.kind to shared"
                )
            group = self._incoming.connect(init_info)
            try:
                group.wait_joined(init_info.timeout_s)
            except WeightUpdateError:
                group.close()
                raise
            self._incoming.join(init_info, group)

    def start_weight_update(self) -> None:
        """Does nothing; see the module."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load all weights. Raises WeightUpdateError; the module says which errors leave the model unchanged."""
        with _refusing():
            info = msgspec.convert(update_info, WeightUpdateRequest)
            tensors = self._incoming.fetch(info).tensors
            refuse_layout(str(self.model_config.model), tensors)
            if broken := not_finite(tensors):
                raise WeightUpdateError(f"{len(broken)} weights are not finite, among them {broken[0]}")
        self.receive_weights(tensors)
        if self.device.type != "cpu":  # The next broadcast writes into the buffer that is being copied from.
            torch.accelerator.synchronize()
        self._incoming.applied(info)

    def receive_weights(self, update_info: Mapping[str, Tensor]) -> None:
        """Load the tensors with vLLM's layer-wise reload, which keeps every parameter where its kernels expect it."""
        from vllm.model_executor.model_loader.reload import (  # type: ignore[import-not-found,unused-ignore]  # noqa: PLC0415
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        initialize_layerwise_reload(self.model)
        load: Any = self.model.load_weights
        loaded: set[str] | None = load(update_info.items())
        finalize_layerwise_reload(self.model, self.model_config)
        if loaded is not None and (left := {name for name, _ in self.model.named_parameters()} - loaded):
            raise WeightUpdateError(f"vLLM did not load {len(left)} parameters, among them {min(left)}")
        refresh_heads(self.model)

    def finish_weight_update(self) -> None:
        """Does nothing; see the module."""

    def shutdown(self) -> None:
        self._incoming.close()


@contextmanager
def _refusing() -> Iterator[None]:
    """Have errors inside, which leave the model unchanged, say so."""
    try:
        yield
    except (WeightUpdateError, msgspec.ValidationError) as error:
        raise WeightUpdateError(f"{REFUSED} {error}") from error


def refuse_layout(model: str, tensors: Mapping[str, Tensor]) -> None:
    """Raise WeightUpdateError if a weight of the model that vLLM was started with is missing or has another shape.

    Additional names are left to vLLM: a tied head has two names in the trainer and one in a checkpoint. A `model` that is no
    folder with safetensors files is not checked.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(Path(model).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    missing = sorted(shapes.keys() - tensors.keys())
    differing = sorted(name for name, shape in shapes.items() if name in tensors and tensors[name].shape != shape)
    if missing or differing:
        first = (missing + differing)[0]
        raise WeightUpdateError(
            f"{len(missing)} weights are missing and {len(differing)} have another shape, among them {first}; "
            "start vLLM with the model that is trained"
        )


def refresh_heads(model: nn.Module) -> None:
    """Make output heads prepare their weights again.

    On CPU a head computes with a packed copy of its weights. A head tied to the embedding has no weights of its own to load,
    so the reload skips it, and it would silently continue with the old copy.
    """
    for name, module in model.named_modules():
        if not any(kind.__name__ == "ParallelLMHead" for kind in type(module).__mro__):  # its name depends on the model
            continue
        method = getattr(module, "quant_method", None)
        if method is None:
            raise WeightUpdateError(f"vLLM's head {name} has no way to prepare its weights; this version is not supported")
        method.process_weights_after_loading(module)
