"""Requests for an engine, updates of its weights, and a loop that serves them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pipelinerl.engine import LocalEngine
from pipelinerl.interfaces import WeightUpdate
from pipelinerl.models.state import checksum, named_weights
from pipelinerl.types import Completion, GenerationRequest, SamplingParams
from tests.parity.models import make_model

NO_UPDATES: Mapping[int, WeightUpdate] = {}


def request(
    name: str, prompt: tuple[int, ...] = (3, 4, 5), max_tokens: int = 10, *, stream: bool = False, **sampling: Any
) -> GenerationRequest:
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    return GenerationRequest(id=name, prompt_ids=prompt, sampling=params, stream=stream)


def update_of(model: Any, version: int) -> WeightUpdate:
    """To the weights of `model`; a number is the seed of a Llama."""
    tensors = named_weights(make_model("llama", model) if isinstance(model, int) else model)
    return WeightUpdate(version, checksum(tensors), tensors)


def serve(
    engine: LocalEngine, wanted: Iterable[GenerationRequest] = (), updates: Mapping[int, WeightUpdate] = NO_UPDATES
) -> dict[str, Completion]:
    """Submit `wanted` and step until the engine has no request left; before step s, apply updates[s]."""
    for one in wanted:
        engine.submit(one)
    done: dict[str, Completion] = {}
    step = 0
    while engine.in_progress or engine.queued:
        if step in updates:
            engine.update_weights(updates[step])
        done |= {completion.request_id: completion for completion in engine.step().finished}
        step += 1
        assert step < 1000, "the engine does not finish"
    return done
