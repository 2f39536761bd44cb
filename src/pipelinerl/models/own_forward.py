"""What few models need: training on padded batches through their own forward, and other exceptions.

Right padding can't change the logits of a causal model, whatever its layers are: no token sees what comes after it. So each
length bucket of a packed row runs as one padded batch. At most `MAX_PADDING_WASTE` of its cells are padding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipelinerl.models.state import compute_dtype, is_narrow

if TYPE_CHECKING:
    from pipelinerl.models.packed import PackedRow

_CHUNK_SIZES = ("chunk_size", "mamba_chunk_size", "linear_chunk_size")
_CHUNK = 64
"""Recurrences are computed in chunks: of this many tokens (the delta rule), or as the configuration says."""


def recurrence_chunk(model: Any) -> int:
    """The most tokens that the model's recurrent layers process at once. A check with more tokens crosses a boundary."""
    text = model.config.get_text_config()
    sizes = (getattr(text, name, None) for name in _CHUNK_SIZES)
    return max((size for size in sizes if isinstance(size, int)), default=_CHUNK)


def largest_beyond_rounding(model: Any, errors_T: Tensor) -> Tensor:
    """The largest error of a token; in types narrower than float32 and with experts, the median.

    There rounding changes which experts some tokens go to, so these have large errors. A mistake has them at most tokens.
    """
    parts = model.named_modules() if is_narrow(compute_dtype(model)) else ()
    experts = any("expert" in f"{name} {type(part).__name__}".lower() for name, part in parts)
    return errors_T.median() if experts else errors_T.max()


def use_configured_time_steps(model: Any) -> None:
    """Make the Mamba 2 layers of Nemotron-H limit their time steps as the model's configuration says.

    Up to transformers 5.23 they apply another limit, `time_step_min`, when they process several tokens, and none when they
    process one. So what was generated would differ from the same model's forward over the whole sequence.
    """
    for module in model.modules():
        config = getattr(model.config, "time_step_limit", None)
        if type(module).__name__ == "NemotronHMamba2Mixer" and config is not None:
            module.time_step_limit = tuple(config)


def freeze_all_but_text(model: Any) -> None:
    """Exclude from training what text never reaches, such as a vision tower, which weight decay would change."""
    text = {id(part) for owner in (model.get_decoder(), model.get_output_embeddings()) for part in owner.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in text:
            parameter.requires_grad_(False)


def logits_at(model: Any, cells_P: Tensor, **inputs: Any) -> Tensor:
    """Logits [P, V] of the forward over `input_ids` [S, L], at indices into its S x L tokens.

    The output head computes only these, if it is a module.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Module):
        logits: Tensor = model(**inputs).logits
        return logits.flatten(0, 1)[cells_P]

    def select(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *others = arguments
        return (hidden.flatten(0, 1)[cells_P][None], *others)

    hook = head.register_forward_pre_hook(select)
    try:
        logits = model(**inputs).logits
    finally:
        hook.remove()
    return logits.flatten(0, 1)


def padded_logits(model: Any, row: PackedRow) -> Tensor:
    """Logits [P, V] at the positions that predict the row's sampled tokens, as `TrainingForward` gives them."""
    parts, order = [], []
    for bucket in row.buckets:
        inside_P = ((row.predictor_P >= bucket.start) & (row.predictor_P < bucket.end)).nonzero()[:, 0]
        cells = row.predictor_P[inside_P] - bucket.start
        if bucket.cell_index is not None:
            cells = bucket.cell_index[cells]
        ids = row.token_ids_1T[0, bucket.start : bucket.end]
        ids_SL = (ids if bucket.pad_index is None else ids[bucket.pad_index]).view(bucket.count, bucket.length)
        parts.append(logits_at(model, cells, input_ids=ids_SL, use_cache=False))
        order.append(inside_P)
    return torch.cat(parts)[torch.cat(order).argsort()]
