"""What the scripts that make the packaged models share."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from transformers import PreTrainedModel


def pretrain(
    model: PreTrainedModel,
    next_loss: Callable[[int], torch.Tensor],
    *,
    name: str,
    steps: int,
    first_rate: float,
    last_rate: float,
    say_every: int,
) -> None:
    """Minimise the losses of the batches that `next_loss(step)` draws, with AdamW.

    The learning rate warms up over 50 steps, then follows a cosine.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=first_rate, betas=(0.9, 0.95), weight_decay=0.01)
    started = time.perf_counter()
    for step in range(steps):
        cosine = 0.5 * (1.0 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = min(1.0, (step + 1) / 50) * (last_rate + (first_rate - last_rate) * cosine)
        loss = next_loss(step)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % say_every == 0 or step == steps - 1:
            elapsed = time.perf_counter() - started
            print(f"{name}: step {step} of {steps}, loss {loss.item():.4f}, {elapsed:.0f} s", flush=True)
