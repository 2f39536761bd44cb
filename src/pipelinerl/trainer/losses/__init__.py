"""The policy-gradient losses: one short file of pure tensor maths per algorithm.

Every loss maps `LossInputs`, the sampled tokens of one micro-batch laid end to end, to one term per token. Nothing is
averaged here. The caller divides by a number that belongs to the whole optimizer step, not to the micro-batch,

    step loss = 1/Z * sum over micro-batches, over tokens n, of loss_N[n]
    Z = rollouts of the step (`sequences`)   or   sampled tokens of the step (`tokens`)

so that the gradient of a step does not depend on how its rollouts were packed. A rollout is never split over
micro-batches: `gspo` needs all of its tokens at once.
"""

from __future__ import annotations

from functools import partial
from typing import assert_never

from pipelinerl.config.schema import TrainerConfig
from pipelinerl.trainer.losses.cispo import cispo
from pipelinerl.trainer.losses.gspo import gspo
from pipelinerl.trainer.losses.inputs import Loss, LossInputs, LossOutput
from pipelinerl.trainer.losses.kl import kl_penalty, with_kl_penalty
from pipelinerl.trainer.losses.ppo import ppo
from pipelinerl.trainer.losses.reinforce import reinforce

__all__ = [
    "Loss",
    "LossInputs",
    "LossOutput",
    "cispo",
    "gspo",
    "kl_penalty",
    "make_loss",
    "ppo",
    "reinforce",
    "with_kl_penalty",
]


def make_loss(config: TrainerConfig) -> Loss:
    """The loss a run file asks for. It includes the KL penalty, already weighted, when `kl_coefficient` is above 0."""
    policy_loss = _policy_loss(config)
    if config.kl_coefficient == 0:
        return policy_loss
    return partial(with_kl_penalty, policy_loss=policy_loss, coefficient=config.kl_coefficient)


def _policy_loss(config: TrainerConfig) -> Loss:
    match config.loss:
        case "reinforce":
            return partial(reinforce, clamp=config.clamp)
        case "ppo":
            return partial(ppo, clip_low=config.clip_low, clip_high=config.clip_high)
        case "gspo":
            return partial(gspo, clip_low=config.clip_low, clip_high=config.clip_high)
        case "cispo":
            return partial(cispo, clip_low=config.clip_low, clip_high=config.clip_high)
    assert_never(config.loss)
