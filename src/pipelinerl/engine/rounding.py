"""How much rounding may change what a runner computes on the probe with which a model is checked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipelinerl.engine.runner import TOLERANCE, differences
from pipelinerl.errors import UnsupportedModelError
from pipelinerl.models.attention import choose_attention
from pipelinerl.models.own_forward import largest_beyond_rounding
from pipelinerl.models.state import compute_dtype

NARROW_TOLERANCE = 0.25
"""In types narrower than float32."""
LARGEST_TOLERANCE = 1e-3


def require_exact(errors_T: Tensor, limit: float, model: Any) -> float:
    """The error on the probe, given that of each token. Raises UnsupportedModelError if it is above the limit, or NaN."""
    error = float(largest_beyond_rounding(model, errors_T))
    if not error <= limit:
        raise UnsupportedModelError(
            f"{type(model).__name__} can't be run by the embedded engine: on a probe its log-probabilities are off by "
            f"{error:.2g} (limit {limit:.2g})"
        )
    return error


def rounding_limit(model: Any, ids_T: Tensor, reference_TV: Tensor, *, least: float = TOLERANCE) -> float:
    """How much rounding may change log-probabilities of the probe; at least `least`, with weights in float32.

    Large models and recurrences amplify rounding. So eight times that of the model's own forward is allowed: its change when
    each element of the embeddings changes by the precision of its type.
    """
    if compute_dtype(model) not in (torch.float32, torch.float64):  # logits are float32 also above a float32 head
        return NARROW_TOLERANCE
    own = float(differences(_perturbed(model, ids_T), reference_TV).max())
    return min(max(least, 8 * own), LARGEST_TOLERANCE)


def _perturbed(model: Any, ids_T: Tensor) -> Tensor:
    def perturb(_: Any, __: Any, embedded: Tensor) -> Tensor:
        signs = torch.randint(-1, 2, embedded.shape, generator=torch.Generator().manual_seed(0)).to(embedded.device)
        return embedded * (1 + torch.finfo(embedded.dtype).eps * signs)

    chosen = model.config._attn_implementation
    choose_attention(model, "eager")
    hook = model.get_input_embeddings().register_forward_hook(perturb)
    try:
        logits: Tensor = model(input_ids=ids_T[None], use_cache=False).logits[0]
    finally:
        hook.remove()
        choose_attention(model, chosen)
    return logits
