"""The engine of a generation process: in the same process, or a client of engine servers, which then hold the model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from pipelinerl.config.schema import RunConfig
from pipelinerl.interfaces import AsyncEngine
from pipelinerl.models.contract import Contract
from pipelinerl.types import ENGINE

if TYPE_CHECKING:
    from pipelinerl.engine import LocalEngine


class EngineHandle(NamedTuple):
    """An engine that is ready. `slots` is its H, summed over all servers; `contract` that of its model and tokenizer."""

    engine: AsyncEngine
    slots: int
    contract: Contract


def load_local_engine(config: RunConfig, name: str = ENGINE) -> tuple[Any, LocalEngine]:
    """The run file's model and the embedded engine over it. Raises ModelLoadError and UnsupportedModelError."""
    from pipelinerl.engine import LocalEngine  # noqa: PLC0415 - only the process that computes needs it
    from pipelinerl.models.loading import load_model, slot_length  # noqa: PLC0415 - as above

    model = load_model(config.model, config.engine.device)
    make: Callable[..., LocalEngine] = LocalEngine
    if config.engine.decoding == "static" or config.engine.device != "cpu":
        from pipelinerl.engine.static import engine_for  # noqa: PLC0415 - as above

        make = partial(engine_for, decoding=config.engine.decoding)
    engine = make(
        model,
        slots=config.engine.slots,
        max_length=slot_length(model, config.engine.max_length),
        prefill_tokens=config.engine.prefill_tokens,
        kv_on_update=config.engine.kv_on_update,
        name=name,
    )
    return model, engine
