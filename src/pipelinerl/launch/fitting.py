"""What to change so that a run fits into memory: flags to paste, found by predicting again. Imported only on a warning."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Any

from pipelinerl.config.load import config_of_values
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.launch.machine import Memory

if TYPE_CHECKING:
    from pipelinerl.launch.memory import Prediction
    from pipelinerl.models.shape import ModelShape

FEWEST_SLOTS = 8
Settings = Mapping[str, Any]
Predict = Callable[[RunConfig, "ModelShape", "int | None"], "Prediction"]
"""`memory.predict`, which this module does not import: `memory` uses it."""


def remedy(config: RunConfig, prediction: Prediction, device: str, memory: Memory, predict: Predict) -> str:
    """Flags with which the most that `device` may need is free now, or at least is there; else what remains to be done."""
    for limit in (memory.available, memory.total):
        if limit is not None and (settings := _fitting(config, prediction, device, limit, predict)):
            return "it fits with " + " ".join(f"--{key} {json.dumps(value)}" for key, value in sorted(settings.items()))
    more = {
        "raise trainer.ranks to use more GPUs": "cpu" not in (config.trainer.device, device),
        "set model.lora to {}": config.model.lora is None,
        "set model.dtype to bfloat16": config.model.dtype == "float32",
        "set trainer.kl_coefficient to 0": config.trainer.kl_coefficient > 0,
    }
    return "; ".join([*(what for what, possible in more.items() if possible), "or take a smaller model"])


def _fitting(config: RunConfig, prediction: Prediction, device: str, limit: int, predict: Predict) -> Settings | None:
    """Settings with which the prediction is within `limit` bytes; of the sizes, always the one is halved that saves most."""
    shape, prompt = prediction.shape, prediction.longest_prompt
    if shape is None:
        return None

    def size(settings: Settings) -> float:
        with suppress(ConfigError):
            return predict(config_of_values(settings, config), shape, prompt).on(prediction.gpus).bytes_on(device)
        return inf

    firsts: list[Settings] = [{}, {"trainer.gradient_checkpointing": True}]  # what costs least comes first
    for first in firsts:
        settings, before = first, inf
        while limit < (now := size(settings)) < before:
            lower = _lower(config_of_values(settings, config), shape, prompt)
            settings, before = min(({**settings, key: value} for key, value in lower), key=size, default=settings), now
        if now <= limit:
            return settings
    return None


def _lower(config: RunConfig, shape: ModelShape, longest_prompt: int | None) -> Iterator[tuple[str, int]]:
    """The next lower values of the settings that decide how much is computed and kept at once."""
    longest, slot = config.actor.max_tokens, shape.slot_length(config.engine.max_length)
    needed = longest + (longest if longest_prompt is None else longest_prompt)
    floors = {
        "engine.slots": (config.engine.slots, FEWEST_SLOTS),
        "engine.max_length": (slot, needed),
        "trainer.micro_batch_tokens": (config.trainer.micro_batch_tokens, min(slot, needed)),
    }
    for key, (value, floor) in floors.items():
        if value > floor:
            yield key, max(floor, value // 2)
