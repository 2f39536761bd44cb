"""The policy-gradient losses: pure tensor maths. `objectives` has the objectives, `corrections` the off-policy corrections.

Every loss maps `LossInputs`, the concatenated sampled tokens of one micro-batch, to one term per token. Nothing is averaged
here. The caller divides by a number of the whole optimizer step, not of the micro-batch,

    step loss = 1/Z * sum over micro-batches, over tokens n, of loss_N[n]
    Z = rollouts of the step (`sequences`)   or   sampled tokens of the step (`tokens`)

so that the gradient of a step does not depend on packing. A rollout is never split over micro-batches: `gspo` and the
sequence corrections need all of its tokens at once.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import assert_never

from pipelinerl.config.correction import Correction, clip_range, resolve
from pipelinerl.config.schema import CorrectionConfig, TrainerConfig
from pipelinerl.trainer.losses.corrections import kept_tokens, masked
from pipelinerl.trainer.losses.inputs import Loss, LossInputs, LossOutput
from pipelinerl.trainer.losses.objectives import cispo, decoupled, gspo, kl_penalty, ppo, reinforce

__all__ = ["DEFAULT_CORRECTION", "Loss", "LossInputs", "LossOutput", "kl_penalty", "make_loss"]

DEFAULT_CORRECTION = CorrectionConfig()


def make_loss(trainer: TrainerConfig, correction: CorrectionConfig = DEFAULT_CORRECTION) -> Loss:
    """The loss of a run file: the objective, its correction, and the weighted penalties (drift, KL)."""
    resolved = resolve(trainer, correction)
    return partial(
        _loss, objective=_objective(trainer, resolved), correction=resolved, kl_coefficient=trainer.kl_coefficient
    )


def _loss(inputs: LossInputs, *, objective: Loss, correction: Correction, kl_coefficient: float) -> LossOutput:
    """Raises ValueError for a KL penalty without reference log-probabilities."""
    output = objective(inputs)
    kept_N = kept_tokens(inputs, correction)
    if kept_N is not None:
        output = masked(output, kept_N)
    if correction.drift > 0:  # the gradient, 2 log r * grad log pi, pulls pi back to mu
        output = dataclasses.replace(output, loss_N=output.loss_N + correction.drift * inputs.log_ratio_N.square())
    if kl_coefficient > 0:
        if inputs.reference_logprobs_N is None:
            raise ValueError(
                f"a KL coefficient of {kl_coefficient} needs reference log-probabilities, and the samples have none"
            )
        kl_N = kl_penalty(inputs.logprobs_N, inputs.reference_logprobs_N)
        output = dataclasses.replace(output, loss_N=output.loss_N + kl_coefficient * kl_N)
    return output


def _objective(trainer: TrainerConfig, correction: Correction) -> Loss:
    if trainer.loss == "reinforce":
        return partial(reinforce, correction=correction)
    low, high = clip_range(trainer)
    match trainer.loss:
        case "ppo":
            return partial(ppo, clip_low=low, clip_high=high, dual_clip=trainer.dual_clip)
        case "gspo":
            return partial(gspo, clip_low=low, clip_high=high)
        case "cispo":
            return partial(cispo, clip_low=low, clip_high=high)
        case "decoupled":
            return partial(decoupled, correction=correction, clip_low=low, clip_high=high, dual_clip=trainer.dual_clip)
    assert_never(trainer.loss)
