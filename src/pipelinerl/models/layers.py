"""A model's decoder layers: finding them, computing in float32 with narrow ones, and compiling them for training.

Between its matrix products a layer makes many passes over memory: norms, rotations, gates, sums. `torch.compile` merges them
into few loops, forward and backward. Attention is left as it is: its shapes differ from one micro-batch to the next.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pipelinerl.models.attention import choose_attention, deviations, replace_attention
from pipelinerl.models.device import try_compiler
from pipelinerl.models.packed import ATTENTION_NAME, PackedRow, TrainingForward, packed_attention, probe_segments
from pipelinerl.models.state import compute_dtype, is_narrow

_log = logging.getLogger(__name__)

_COMPILED_ATTENTION = f"{ATTENTION_NAME}_apart"
_LARGEST_TOLERANCE = 1e-3


def decoder_layers(model: Any) -> list[nn.Module]:
    """The decoder layers: the members of the longest list of modules that is not inside another one (as experts are)."""

    def lists(module: nn.Module) -> Iterator[nn.ModuleList]:
        for child in module.children():
            yield from [child] if isinstance(child, nn.ModuleList) else lists(child)

    return max((list(found) for found in lists(model)), key=len, default=[])


@contextmanager
def perturbed(model: Any) -> Iterator[None]:
    """Inside, each element of the embeddings changes by the precision of its type: what that changes is rounding."""

    def perturb(_: Any, __: Any, embedded: Tensor) -> Tensor:
        signs = torch.randint(-1, 2, embedded.shape, generator=torch.Generator().manual_seed(0)).to(embedded)
        return embedded + embedded * torch.finfo(embedded.dtype).eps * signs

    with model.get_input_embeddings().register_forward_hook(perturb):
        yield


def rounding_limit(model: Any, ids_T: Tensor, *, least: float) -> float:
    """How much rounding in float32 may change log-probabilities of the probe; at least `least`.

    Large models and recurrences amplify rounding. So eight times the change of the model's own forward is allowed, when
    each element of the embeddings changes by the precision of its type.
    """
    chosen = model.config._attn_implementation
    choose_attention(model, "eager")
    try:
        own_TV = model(input_ids=ids_T[None], use_cache=False).logits[0]
        with perturbed(model):
            changed_TV = model(input_ids=ids_T[None], use_cache=False).logits[0]
    finally:
        choose_attention(model, chosen)
    return min(max(least, 8 * float(deviations(changed_TV, own_TV).max())), _LARGEST_TOLERANCE)


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Inside, `model` computes in float32. The weights of a layer are converted while it runs, to save memory."""
    layers = list(dict.fromkeys(decoder_layers(model)))
    of_layers = {id(tensor) for layer in layers for tensor in _narrow(layer)}
    with ExitStack() as stack:
        for layer in layers:
            _widen_while_it_runs(layer, stack)
        stack.enter_context(_widened([tensor for tensor in _narrow(model) if id(tensor) not in of_layers]))
        yield


def _narrow(module: nn.Module) -> list[Tensor]:
    tensors = (*module.parameters(), *module.buffers())
    return [tensor for tensor in tensors if tensor.is_floating_point() and is_narrow(tensor.dtype)]


@contextmanager
def _widened(tensors: Sequence[Tensor]) -> Iterator[None]:
    narrow = [tensor.data for tensor in tensors]
    with torch.inference_mode(False), torch.no_grad():
        for tensor in tensors:
            tensor.data = tensor.data.float()
    try:
        yield
    finally:
        for tensor, content in zip(tensors, narrow, strict=True):
            tensor.data = content


def _widen_while_it_runs(layer: nn.Module, stack: ExitStack) -> None:
    """Until `stack` is closed, the layer's weights are in float32 from the start of its forward to the end."""
    running, tensors = ExitStack(), _narrow(layer)
    stack.enter_context(layer.register_forward_pre_hook(lambda *_: running.enter_context(_widened(tensors))))
    stack.enter_context(layer.register_forward_hook(lambda *_: running.close(), always_call=True))


# ---- Compiling them


def compile_layers(forward: TrainingForward, *, backend: str = "inductor") -> TrainingForward:
    """`forward` with its model's decoder layers compiled, if that computes the same, and if it can be done here.

    Otherwise `forward` as it is, with a warning that says why.
    """
    name = type(forward.model).__name__
    if forward.padded:
        _log.warning("trainer.compile has no effect: %s is trained through its own forward", name)
        return forward
    layers = decoder_layers(forward.model)
    expected, tolerance = _probe(forward, layers), 1e-4
    if is_narrow(compute_dtype(forward.model)):
        with perturbed(forward.model):
            tolerance = max(0.05, 2 * _difference(_probe(forward, layers), expected))

    def compile_them() -> None:
        apart: Any = torch.compiler.disable(packed_attention)  # type: ignore[no-untyped-call]
        replace_attention(forward.model, _COMPILED_ATTENTION, apart)
        for layer in layers:
            layer.forward = _with_gradients(layer.forward, torch.compile(layer.forward, dynamic=True, backend=backend))
        error = _difference(_probe(forward, layers), expected)
        if not error <= tolerance:
            raise RuntimeError(f"its results would be off by {error:.1g} (relative)")

    if not try_compiler(f"trainer.compile has no effect: the layers of {name}", compile_them):
        return replace(forward, compiled=True)
    for layer in layers:
        vars(layer).pop("forward", None)
    choose_attention(forward.model, ATTENTION_NAME)
    return forward


def _with_gradients(own: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
    """`compiled` where gradients are computed: a forward without them is rare, and would be compiled once more."""

    def forward(*given: Any, **named: Any) -> Any:
        return (compiled if torch.is_grad_enabled() else own)(*given, **named)

    return forward


@torch.enable_grad()
def _probe(forward: TrainingForward, layers: Sequence[nn.Module]) -> list[Tensor]:
    """Logits of a short row, and the gradients of what is trained in the first layer, which pass through all the others."""
    weight = next(forward.model.parameters())
    logits_PV = forward(PackedRow.of(probe_segments(forward.model), weight.device))
    objective = (logits_PV.float() * torch.arange(logits_PV.numel(), device=weight.device).cos().view_as(logits_PV)).sum()
    trained = [parameter for parameter in layers[0].parameters() if parameter.requires_grad]
    return [logits_PV.detach(), *torch.autograd.grad(objective, trained)]


def _difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference of an element, relative to the largest element of its tensor."""
    return max(
        float((a.float() - b.float()).abs().max() / b.float().abs().max().clamp_min(1e-6))
        for a, b in zip(found, expected, strict=True)
    )
