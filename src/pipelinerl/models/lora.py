"""LoRA: trains small matrices beside frozen weights (Hu et al., arXiv 2106.09685).

Engines compute with W + scale * B A, as if there were no adapters: they get these weights, or merge an adapter themselves.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pipelinerl.config.schema import LoraConfig
from pipelinerl.errors import CheckpointError, ConfigError, UnsupportedModelError
from pipelinerl.extras import require
from pipelinerl.models.adapters import Adapter, merge, tensors_of
from pipelinerl.models.loading import ADAPTER_FOLDER
from pipelinerl.models.state import checksum, named_weights, write_safetensors

require("lora", "model.lora")  # before the import, which fails without

import peft  # noqa: E402
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers  # noqa: E402

ADAPTER_WEIGHTS = "adapter_model.safetensors"
_BASE = "base_checksum"
_NAME = "default"


class LoraModel:
    """`model`, frozen, with trainable adapters in its linear layers.

    The model is changed in place: it is called as before, and computes with exactly the weights that `weights` returns (see
    `LoraLinear`). B starts at 0, so these are the model's own at first. A is drawn from `seed`. Adapters are at least
    float32. Raises ConfigError for layers that can't have adapters.
    """

    def __init__(self, model: Any, config: LoraConfig, *, seed: int) -> None:
        targets = _targets(model, config.target_modules)
        empty = next(model.parameters()).is_meta  # where another process has the weights
        self._base_checksum = "" if empty else checksum(named_weights(model))
        adapter = peft.LoraConfig(
            task_type="CAUSAL_LM", r=config.rank, lora_alpha=config.alpha, target_modules=targets, bias="none"
        )
        adapter._register_custom_module({nn.Linear: LoraLinear})
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft uses a deprecated call of transformers
            torch.default_generator.manual_seed(seed)
            self._peft = peft.get_peft_model(model, adapter)
        self.model = model.eval()
        self.layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, LoraLinear)}

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        """All weights of the model by the names that they have without adapters; the adapter is merged into linear layers.

        Merged weights are new tensors, in the type of the model's weights; the model is not changed.
        """
        found = {
            name.replace(".base_layer.", "."): weight
            for name, weight in named_weights(self.model).items()
            if ".lora_" not in name
        }
        return found | {
            f"{path}.weight": merge(layer.base_layer.weight, *layer.adapter()) for path, layer in self.layers.items()
        }

    def tensors(self) -> dict[str, Tensor]:
        """The adapter in use."""
        return tensors_of({path: layer.adapter() for path, layer in self.layers.items()})

    def new_adapter(self, rank: int, alpha: float, *, seed: int) -> Adapter:
        """Another adapter for the same layers. As in peft, A is uniform in +-1 / sqrt(I), drawn from `seed`, and B is 0."""
        generator, adapter = torch.Generator().manual_seed(seed), {}
        for path, layer in self.layers.items():
            a_rI, b_Or, _ = layer.adapter()
            bound = 1 / math.sqrt(a_rI.shape[1])
            drawn_rI = torch.empty(rank, a_rI.shape[1]).uniform_(-bound, bound, generator=generator)
            zeros_Or = b_Or.new_zeros(b_Or.shape[0], rank)
            adapter[path] = nn.Parameter(drawn_rI.to(a_rI)), nn.Parameter(zeros_Or), alpha / rank
        return adapter

    def use(self, adapter: Adapter) -> None:
        """Compute with `adapter` from now on: its matrices are the model's trainable parameters, under the same names."""
        for path, layer in self.layers.items():
            layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight, scale = adapter[path]
            layer.scaling[_NAME] = scale
        rank = len(layer.lora_A[_NAME].weight)
        self._peft.peft_config[_NAME].r, self._peft.peft_config[_NAME].lora_alpha = rank, scale * rank

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Inside, the model computes without adapters: this is the reference model of a KL penalty."""
        for layer in self.layers.values():
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self.layers.values():
                layer.enable_adapters(True)

    def save_pretrained(self, folder: Path) -> None:
        """Write the merged model in transformers' format and, in `ADAPTER_FOLDER`, the adapter in peft's format."""
        self.model.save_pretrained(folder, state_dict=self.weights())
        self.save_adapter(folder)

    def save_adapter(self, folder: Path) -> None:
        """Write only the adapter in use."""
        config = copy.copy(self._peft.peft_config[_NAME])
        config.inference_mode = True  # as peft writes it: the adapter is loaded frozen by default
        config.save_pretrained(folder / ADAPTER_FOLDER)
        metadata = {"format": "pt", _BASE: self._base_checksum}
        write_safetensors(self._adapter(), folder / ADAPTER_FOLDER / ADAPTER_WEIGHTS, metadata)

    @torch.no_grad()
    def load_adapter(self, folder: Path) -> None:
        """Load the adapter that `save_pretrained(folder)` wrote. Raises CheckpointError if it does not fit the model."""
        path = folder / ADAPTER_FOLDER / ADAPTER_WEIGHTS
        if not path.exists():
            raise CheckpointError(f"{folder} has no adapter: its run trained all weights; set model.lora to null to go on")
        own = self._adapter()
        try:
            with safe_open(path, "pt") as file:
                if (file.metadata() or {}).get(_BASE) != self._base_checksum:
                    raise CheckpointError(
                        f"the adapter in {path.parent} was trained with other base weights than those of model.path; "
                        "give the model that the run started from, in the same model.dtype"
                    )
                saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"can't read {path}: {str(error).splitlines()[0]}") from error
        shapes = [{(name, tensor.shape) for name, tensor in of.items()} for of in (own, saved)]
        if odd := sorted({name for name, _ in shapes[0] ^ shapes[1]}):
            raise CheckpointError(
                f"the adapter in {path.parent} has another rank or other layers ({odd[0]} and {len(odd) - 1} more differ); "
                "set model.lora to its earlier value"
            )
        for name, tensor in own.items():
            tensor.copy_(saved[name])

    def _adapter(self) -> dict[str, Tensor]:
        """The adapter's own tensors (not copies), by peft's names."""
        tensors: dict[str, Tensor] = peft.get_peft_model_state_dict(self._peft, save_embedding_layers=False)
        return tensors


_FUSED = ("out_proj", "x_proj", "dt_proj")
"""Layers of a Mamba mixer whose weights its fused kernels read, so that an adapter in the layer would be left out."""


def _targets(model: Any, wanted: Sequence[str] | None) -> list[str]:
    """Names of the layers that get adapters, in peft's form: the last parts of the module names. Raises ConfigError."""
    head, modules = model.get_output_embeddings(), dict(model.named_modules())
    mixers = {name for name, module in modules.items() if hasattr(module, "conv1d") and hasattr(module, "D")}
    linear = [
        name
        for name, module in modules.items()
        if isinstance(module, nn.Linear)
        and module is not head
        and not (name.rpartition(".")[0] in mixers and name.endswith(_FUSED))
    ]
    others = {name.rpartition(".")[2] for name in modules.keys() - set(linear)}
    kinds = [kind for kind in dict.fromkeys(name.rpartition(".")[2] for name in linear) if kind not in others]
    # Without the names that peft takes for a mixture's experts, whose weights are not linear layers.
    config = peft.LoraConfig(target_modules=kinds)
    convert_peft_config_for_transformers(config, model, None)
    kinds = [kind for kind in kinds if kind in config.target_modules]
    linear = [name for name in linear if name.rpartition(".")[2] in kinds]
    if not kinds:
        raise UnsupportedModelError(f"{type(model).__name__} has no linear layers for model.lora to train; set it to null")
    targets = kinds if wanted is None else list(wanted)
    for target in targets:
        found = [name for name, _ in model.named_modules() if name == target or name.endswith(f".{target}")]
        if not found or not set(found) <= set(linear):
            what = "isn't one" if not found else f"matches {found[0]}, which isn't one"
            raise ConfigError(
                f"model.lora.target_modules: {type(model).__name__} can have adapters in the linear layers "
                f"{', '.join(kinds)}; {target!r} {what}"
            )
    return targets


# ---- A linear layer with an adapter that computes with merged weights, bit for bit the weights that engines get
# peft's own layer computes W x + scale * B (A x). With bfloat16 weights an engine computes something else, because its
# merged weights are rounded: a change of the adapter that is smaller than the rounding would be trained on but never
# sampled from. Here the forward uses the rounded weights, and the gradient passes through the rounding unchanged, as it
# does to the float32 master copies of full training. Everything else is exact. Merging costs as much as the forward of r/2
# tokens, and saves the two products per token.
#
# Shapes: O output and I input features of the layer, r the rank.


class LoraLinear(peft.tuners.lora.Linear):  # type: ignore[misc]
    """Replaces a `torch.nn.Linear`, which it keeps as `base_layer`. It has one adapter."""

    def forward(self, x: Tensor) -> Tensor:
        base = self.base_layer
        if self.disable_adapters:
            output: Tensor = base(x)
        else:
            output = _MergedLinear.apply(x, base.weight, base.bias, *self.adapter())  # type: ignore[no-untyped-call]
        return output

    def adapter(self) -> tuple[nn.Parameter, nn.Parameter, float]:
        (name,) = self.active_adapters
        return self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name]


class _MergedLinear(torch.autograd.Function):
    """Computes the merged weights in forward and again in backward, to save memory: no gradient is as large as W."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes positional arguments
        ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, a_rI: Tensor, b_Or: Tensor, scale: float
    ) -> Tensor:
        ctx.save_for_backward(x, weight_OI, a_rI, b_Or)
        ctx.scale = scale
        return F.linear(x, merge(weight_OI, a_rI, b_Or, scale), bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """With y = x (W + s B A)^T: dx = dy (W + s B A), dA = s (dy B)^T x, dB = s dy^T (x A^T)."""
        x, weight_OI, a_rI, b_Or = ctx.saved_tensors
        dx = grads[0] @ merge(weight_OI, a_rI, b_Or, ctx.scale) if ctx.needs_input_grad[0] else None
        dy_NO, x_NI = grads[0].flatten(0, -2).to(a_rI.dtype), x.flatten(0, -2).to(a_rI.dtype)
        da_rI = ctx.scale * (dy_NO @ b_Or).T @ x_NI
        db_Or = ctx.scale * dy_NO.T @ (x_NI @ a_rI.T)
        return dx, None, None, da_rI, db_Or, None
