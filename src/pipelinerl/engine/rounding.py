"""How exact a runner must be on the probe with which a model is checked, whatever the type of its weights.

A runner must be exact in float32. Narrow weights have a float32 forward, too (`in_float32`), so a mistake can't hide behind
their rounding. How much narrow types round depends on the model: with logits of 30, neighbouring numbers in bfloat16 are
0.125 apart. So in its own type, a runner must only agree on the likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pipelinerl.errors import UnsupportedModelError
from pipelinerl.models.attention import choose_attention, deviations
from pipelinerl.models.layers import decoder_layers, perturbed
from pipelinerl.models.state import is_narrow

NARROW_TOLERANCE = 0.25
"""In types narrower than float32: the median over tokens, of the log-probability of the likeliest one."""
LARGEST_TOLERANCE = 1e-3


def require_same(
    logits_TV: Tensor, reference_TV: Tensor, model: Any, ids_T: Tensor, dtype: torch.dtype, *, least: float
) -> float:
    """The error on the probe `ids_T` of a runner that computes in `dtype`.

    It is the largest one in float32, in narrower types the median error of the likeliest tokens.
    Raises UnsupportedModelError if it is above the limit, or NaN.
    """
    if not is_narrow(dtype):
        error = float(deviations(logits_TV, reference_TV).max())
        return _within(error, least if error <= least else rounding_limit(model, ids_T, least=least), model)
    likeliest_T1 = reference_TV.argmax(-1, keepdim=True)
    found_T1, own_T1 = (logits.float().log_softmax(-1).gather(1, likeliest_T1) for logits in (logits_TV, reference_TV))
    return _within(float((found_T1 - own_T1).abs().median()), NARROW_TOLERANCE, model)


def _within(error: float, limit: float, model: Any) -> float:
    if not error <= limit:
        raise UnsupportedModelError(
            f"{type(model).__name__} can't be run by the embedded engine: on a probe its log-probabilities are off by "
            f"{error:.2g} (limit {limit:.2g})"
        )
    return error


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
    return min(max(least, 8 * float(deviations(changed_TV, own_TV).max())), LARGEST_TOLERANCE)


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
    kept = [tensor.data for tensor in tensors]
    with torch.inference_mode(False), torch.no_grad():
        for tensor in tensors:
            tensor.data = tensor.data.float()
    try:
        yield
    finally:
        for tensor, content in zip(tensors, kept, strict=True):
            tensor.data = content


def _widen_while_it_runs(layer: nn.Module, stack: ExitStack) -> None:
    """Until `stack` is closed, the layer's weights are in float32 from the start of its forward to the end."""
    running, tensors = ExitStack(), _narrow(layer)
    stack.enter_context(layer.register_forward_pre_hook(lambda *_: running.enter_context(_widened(tensors))))
    stack.enter_context(layer.register_forward_hook(lambda *_: running.close(), always_call=True))
