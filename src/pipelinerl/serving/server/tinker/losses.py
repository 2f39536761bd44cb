"""The losses of the Tinker API, by their names there: sums over tokens, never means.

Definitions: https://tinker-docs.thinkingmachines.ai/losses. N: tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pipelinerl.errors import RequestError
from pipelinerl.serving.server.tinker.wire import ForwardBackward
from pipelinerl.trainer.losses import LossInputs, cispo, clipped_surrogate

Given = Mapping[str, Tensor]
"""Inputs of a loss by name, each (N,)."""
Settings = Mapping[str, float]


@dataclass(frozen=True)
class TinkerLoss:
    """`terms` (N,), with a request's settings, have the loss as their sum. `inputs`: what a datum needs besides target
    tokens. `settings`: their defaults, NaN for those that have to be given.
    """

    terms: Callable[[LossInputs, Given, Settings], Tensor]
    inputs: tuple[str, ...] = ("logprobs", "advantages")
    settings: Settings = field(default_factory=dict)


def _cross_entropy(inputs: LossInputs, given: Given, _: Settings) -> Tensor:
    return -inputs.logprobs_N * given["weights"]


def _ppo(inputs: LossInputs, _: Given, settings: Settings) -> Tensor:
    """-min(r * A, clip(r) * A). Without thresholds, this is importance sampling."""
    return clipped_surrogate(inputs.log_ratio_N, inputs, **_clip(settings)).loss_N


def _cispo(inputs: LossInputs, _: Given, settings: Settings) -> Tensor:
    return cispo(inputs, **_clip(settings)).loss_N


def _dro(inputs: LossInputs, _: Given, settings: Settings) -> Tensor:
    """-(log pi * A - beta / 2 * (log r)^2), by Richemond et al., arXiv 2405.19107."""
    penalty_N = (inputs.logprobs_N - inputs.behaviour_logprobs_N) ** 2
    return settings["beta"] / 2 * penalty_N - inputs.logprobs_N * inputs.advantages_N


def _gspo(inputs: LossInputs, given: Given, settings: Settings) -> Tensor:
    """`trainer.losses.gspo`, with the sequence's ratio over the tokens that `sequence_ratio_mask` marks."""
    mask_N = (given["sequence_ratio_mask"] != 0).float()
    sums_S = inputs.sums_by_sequence(inputs.log_ratio_N.detach() * mask_N)
    mean_S = sums_S / inputs.sums_by_sequence(mask_N).clamp(min=1)
    own_N = inputs.logprobs_N - inputs.logprobs_N.detach()
    return clipped_surrogate(mean_S[inputs.sequence_N] + own_N, inputs, **_clip(settings)).loss_N


def _clip(settings: Settings) -> dict[str, float]:
    """Thresholds as our losses have them: distances from 1."""
    return {"clip_low": 1 - settings.get(_LOW, -math.inf), "clip_high": settings.get(_HIGH, math.inf) - 1}


_LOW, _HIGH = "clip_low_threshold", "clip_high_threshold"
LOSSES = {
    "cross_entropy": TinkerLoss(_cross_entropy, ("weights",)),
    "importance_sampling": TinkerLoss(_ppo),
    "ppo": TinkerLoss(_ppo, settings={_LOW: 0.8, _HIGH: 1.2}),
    "cispo": TinkerLoss(_cispo, settings={_LOW: 0.0, _HIGH: 4.0}),
    "dro": TinkerLoss(_dro, settings={"beta": math.nan}),
    "gspo": TinkerLoss(_gspo, ("logprobs", "advantages", "sequence_ratio_mask"), {_LOW: math.nan, _HIGH: math.nan}),
}


def check(request: ForwardBackward, vocabulary: int, longest: int) -> None:
    """Raises RequestError for a request that can't be computed."""
    loss = LOSSES.get(request.loss)
    if loss is None:
        raise RequestError(f"there is no loss {request.loss!r} here; there are {', '.join(LOSSES)}")
    given = {**loss.settings, **request.settings}
    if given.keys() - loss.settings.keys():
        raise RequestError(f"loss_fn_config: {request.loss} has {', '.join(loss.settings) or 'no settings'}")
    if not all(map(math.isfinite, given.values())):
        raise RequestError(f"loss_fn_config: give {request.loss} {' and '.join(given)} as finite numbers")
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


def loss_terms(name: str, settings: Settings, logprobs_N: Tensor, given: Given, sequence_N: Tensor) -> Tensor:
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
    return loss.terms(inputs, given, {**loss.settings, **settings})
