"""The losses of the Tinker API, by their names there: sums over tokens, never means.

Definitions: https://tinker-docs.thinkingmachines.ai/losses. N: tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipelinerl.errors import RequestError
from pipelinerl.serving.server.tinker.wire import ForwardBackward
from pipelinerl.trainer.losses import LossInputs, cispo, clipped_surrogate

Given = Mapping[str, Tensor]
"""Inputs of a loss by name, each (N,)."""


@dataclass(frozen=True)
class TinkerLoss:
    """`terms` (N,), given low and high for the thresholds 1 - low and 1 + high, have the loss as their sum. `inputs`: what a
    datum needs besides target tokens. `clip`: the default thresholds, NaN if they have to be given; None: there are none.
    """

    terms: Callable[[LossInputs, Given, float, float], Tensor]
    inputs: tuple[str, ...] = ("logprobs", "advantages")
    clip: tuple[float, float] | None = None


def _cross_entropy(inputs: LossInputs, given: Given, _: float, __: float) -> Tensor:
    return -inputs.logprobs_N * given["weights"]


def _ppo(inputs: LossInputs, _: Given, low: float, high: float) -> Tensor:
    """-min(r * A, clip(r) * A). Without thresholds, this is importance sampling."""
    return clipped_surrogate(inputs.log_ratio_N, inputs, clip_low=low, clip_high=high).loss_N


def _cispo(inputs: LossInputs, _: Given, low: float, high: float) -> Tensor:
    return cispo(inputs, clip_low=low, clip_high=high).loss_N


def _gspo(inputs: LossInputs, given: Given, low: float, high: float) -> Tensor:
    """`trainer.losses.gspo`, with the sequence's ratio over the tokens that `sequence_ratio_mask` marks."""
    mask_N = (given["sequence_ratio_mask"] != 0).float()
    sums_S = inputs.sums_by_sequence(inputs.log_ratio_N.detach() * mask_N)
    mean_S = sums_S / inputs.sums_by_sequence(mask_N).clamp(min=1)
    own_N = inputs.logprobs_N - inputs.logprobs_N.detach()
    return clipped_surrogate(mean_S[inputs.sequence_N] + own_N, inputs, clip_low=low, clip_high=high).loss_N


LOSSES = {
    "cross_entropy": TinkerLoss(_cross_entropy, ("weights",)),
    "importance_sampling": TinkerLoss(_ppo),
    "ppo": TinkerLoss(_ppo, clip=(0.8, 1.2)),
    "cispo": TinkerLoss(_cispo, clip=(0.0, 4.0)),
    "gspo": TinkerLoss(_gspo, ("logprobs", "advantages", "sequence_ratio_mask"), (math.nan, math.nan)),
}
_THRESHOLDS = ("clip_low_threshold", "clip_high_threshold")


def check(request: ForwardBackward, vocabulary: int, longest: int) -> None:
    """Raises RequestError for a request that can't be computed."""
    loss = LOSSES.get(request.loss)
    if loss is None:
        raise RequestError(f"there is no loss {request.loss!r} here; there are {', '.join(LOSSES)}")
    given = dict(zip(_THRESHOLDS, loss.clip or (), strict=False)) | dict(request.settings)
    if given.keys() - (_THRESHOLDS if loss.clip else ()):
        raise RequestError(f"loss_fn_config: {request.loss} has {', '.join(_THRESHOLDS) if loss.clip else 'no settings'}")
    if not all(map(math.isfinite, given.values())):
        raise RequestError(f"loss_fn_config: give {request.loss} {' and '.join(_THRESHOLDS)}, which are finite")
    if not request.data:
        raise RequestError("there are no data")
    needed = {"target_tokens", *loss.inputs}
    for index, datum in enumerate(request.data):
        if odd := sorted(datum.inputs.keys() ^ needed):
            raise RequestError(f"datum {index}: {request.loss} takes exactly {sorted(needed)}; it differs in {odd[0]}")
        if not 0 < len(datum.tokens) < longest:
            raise RequestError(f"datum {index} has {len(datum.tokens)} tokens; 1 to {longest - 1} are trained on")
        targets = datum.inputs["target_tokens"]
        ids = {*datum.tokens, *targets.tolist()}
        if targets.dtype.kind != "i" or min(ids) < 0 or max(ids) >= vocabulary:
            raise RequestError(f"datum {index}: tokens and target_tokens are integers from 0 to {vocabulary - 1}")
        if odd := [name for name in loss.inputs if not np.isfinite(datum.inputs[name]).all()]:
            raise RequestError(f"datum {index}: {odd[0]} has a value that is not finite")


def loss_terms(name: str, settings: Mapping[str, float], logprobs_N: Tensor, given: Given, sequence_N: Tensor) -> Tensor:
    """The loss of each token (N,), for a request that was checked; carries the gradient of `logprobs_N`."""
    loss, none_N = LOSSES[name], torch.zeros_like(logprobs_N)
    inputs = LossInputs(
        logprobs_N=logprobs_N,
        behaviour_logprobs_N=given.get("logprobs", none_N),
        advantages_N=given.get("advantages", none_N),
        lags_N=torch.zeros_like(sequence_N),
        sequence_N=sequence_N,
        sequence_count=int(sequence_N.max()) + 1,
    )
    defaults = loss.clip or (-math.inf, math.inf)
    low, high = (settings.get(key, value) for key, value in zip(_THRESHOLDS, defaults, strict=True))
    return loss.terms(inputs, given, 1 - low, high - 1)
