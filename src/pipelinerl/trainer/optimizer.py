"""AdamW with float32 master weights, and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipelinerl.config.schema import TrainerConfig
from pipelinerl.errors import CheckpointError, TrainingDivergedError
from pipelinerl.models.state import is_narrow, not_finite

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class Optimizer:
    """AdamW (decoupled weight decay, on matrices only) over the parameters of `model` that require gradients.

    Weights of lower precision have a float32 master copy. In bfloat16, rounding would lose a step of 1e-6, and small
    gradients when micro-batches are summed. float32 weights are their own master.

    Per step: `zero_grad`, then for each micro-batch `backward` and `accumulate`, then `step` (or not).
    """

    def __init__(self, model: nn.Module, *, betas: tuple[float, float], weight_decay: float) -> None:
        self._weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._masters = {
            name: nn.Parameter(p.detach().float()) if is_narrow(p.dtype) else p for name, p in self._weights.items()
        }
        self._saved_masters = {name for name, master in self._masters.items() if master is not self._weights[name]}
        matrices = [p for p in self._masters.values() if p.ndim >= 2]
        others = [p for p in self._masters.values() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        self._adam = torch.optim.AdamW([group for group in groups if group["params"]], betas=betas, fused=True)
        self._before: list[Tensor] = []

    def zero_grad(self) -> None:
        """Set all gradients to zero (not None, so that a parameter without a gradient still moves by its momentum)."""
        for name, master in self._masters.items():
            if master is not self._weights[name]:
                self._weights[name].grad = None
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            else:
                master.grad.zero_()

    def accumulate(self) -> None:
        """Add the gradients of the last backward pass to the step's. Does nothing for float32 weights."""
        for name, master in self._masters.items():
            weight = self._weights[name]
            if master is not weight and weight.grad is not None and master.grad is not None:
                master.grad += weight.grad
                weight.grad = None

    def step(self, *, learning_rate: float, max_grad_norm: float, **other: Any) -> float:
        """Clip the gradients to `max_grad_norm`, step, and return the norm before clipping.

        `other`: settings of AdamW for this step and later ones, `betas`, `eps` or `weight_decay`.

        Raises TrainingDivergedError if the norm is not finite (the weights are then unchanged), or if a weight is not finite
        after the step.
        """
        gradients = [master.grad for master in self._masters.values() if master.grad is not None]
        norm = nn.utils.get_total_norm(gradients, error_if_nonfinite=False)
        value = float(norm)
        if not math.isfinite(value):
            found = {name: local(p.grad) for name, p in self._masters.items() if p.grad is not None}
            broken = sorted(name for name, gradient in found.items() if not gradient.isfinite().all())
            raise TrainingDivergedError(
                f"the gradient is not finite (norm {value}; first of {len(broken)} parameters: {broken[:1]}); "
                "lower trainer.learning_rate, or check the rewards"
            )
        nn.utils.clip_grads_with_norm_(list(self._masters.values()), max_grad_norm, norm)
        for group in self._adam.param_groups:
            group.update(other, lr=learning_rate)
        self._adam.step()
        with torch.no_grad():
            for name, master in self._masters.items():
                if master is not self._weights[name]:
                    self._weights[name].copy_(master)
        if broken := self._not_finite():
            raise TrainingDivergedError(
                f"{len(broken)} of {len(self._weights)} weights are not finite after a step with learning rate "
                f"{learning_rate:g} (the first is {broken[0]}); lower trainer.learning_rate"
            )
        return value

    def cosine(self) -> float | None:
        """The cosine of this step's gradient and the previous step's; None in the first step. To be called before `step`."""
        now = [local(master.grad).clone() for master in self._masters.values() if master.grad is not None]
        before, self._before = self._before, now
        pairs = ((a.double().flatten(), b.double().flatten()) for a, b in zip(now, before, strict=False))
        parts = [torch.stack([a @ b, a @ a, b @ b]) for a, b in pairs]
        if not parts:
            return None
        product, *squares = self._of_all(torch.stack(parts).sum(0)).tolist()
        return float(product / math.sqrt(math.prod(squares))) if all(squares) else 0.0

    def _of_all(self, sums: Tensor) -> Tensor:
        """The sums over all ranks."""
        return sums

    def _not_finite(self) -> list[str]:
        """Names of the weights with a value that is not finite."""
        return not_finite(self._weights)

    def reset(self) -> None:
        """Forget the moments, the number of steps and the gradients."""
        self._adam.state.clear()
        self._before = []

    def state(self) -> dict[str, Tensor]:
        """Moments and step count of each parameter, as `NAME.exp_avg` and so on, and `NAME.master` if there is one."""
        tensors: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            for moment, value in self._adam.state.get(master, {}).items():
                tensors[f"{name}.{moment}"] = value
            if name in self._saved_masters:
                tensors[f"{name}.master"] = master.detach()
        return tensors

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned. Raises CheckpointError, with nothing changed, if it is of another model."""
        self.require_fitting(tensors)
        self.fill(tensors)

    def require_fitting(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise CheckpointError unless the tensors are from a `state` of this model."""
        masters = {f"{name}.master" for name in self._saved_masters}
        moments = {f"{name}.{moment}" for name in self._masters for moment in _MOMENTS}
        if tensors.keys() not in (masters, masters | moments):
            odd = sorted(tensors.keys() ^ (masters | moments))
            raise CheckpointError(f"the optimizer's state is of another model or model.dtype: it differs in {odd[:3]}")
        for name, master in self._masters.items():
            for kind in ("exp_avg", "exp_avg_sq", "master"):
                found = tensors.get(f"{name}.{kind}")
                if found is not None and found.shape != master.shape:
                    raise CheckpointError(
                        f"the optimizer's {name}.{kind} has shape {tuple(found.shape)}, not {tuple(master.shape)}"
                    )

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, Tensor] | Mapping[str, None]) -> None:
        """Take the state from tensors that fit. They are None on ranks above 0 of a sharded trainer."""
        for name, master in self._masters.items():
            if f"{name}.master" in tensors:
                self._fill(master, tensors[f"{name}.master"])
            if f"{name}.step" in tensors:
                step = torch.zeros((), device=master.device)
                state = {"exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master), "step": step}
                for moment, value in state.items():
                    self._fill(value, tensors[f"{name}.{moment}"])
                self._adam.state[master] = state

    def _fill(self, target: Tensor, saved: Tensor | None) -> None:
        if saved is not None:
            target.copy_(saved)


# ---- the learning rate of a step

FLOOR = 0.1
"""Decaying schedules end at this fraction of the peak."""


def learning_rate(config: TrainerConfig, step: int) -> float:
    """The rate of optimizer step `step` (0 is the first; it produces version `step + 1`).

    Warm-up rises linearly over steps 0 to `warmup_steps` - 1, strictly between 0 and the peak, so that no step has a rate of
    0. Step `warmup_steps` is the first at the peak. From there the rate is constant, or decays to `FLOOR` times the peak at
    the last step (`steps` - 1) and stays there.
    """
    warmup = config.warmup_steps
    if step < warmup:
        return config.learning_rate * (step + 1) / (warmup + 1)
    decay_steps = config.steps - 1 - warmup
    progress = min(1.0, (step - warmup) / decay_steps) if decay_steps > 0 else 0.0
    match config.lr_schedule:
        case "constant":
            left = 1.0
        case "linear":
            left = 1.0 - progress
        case "cosine":
            left = (1.0 + math.cos(math.pi * progress)) / 2.0
    return config.learning_rate * (FLOOR + (1.0 - FLOOR) * left)


def local(tensor: Tensor) -> Tensor:
    """The rows of a sharded tensor (a DTensor) that this process holds; any other tensor unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
