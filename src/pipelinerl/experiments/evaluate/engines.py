"""Engines for an evaluation: the embedded one with a model that it loads, or servers with their own."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from pipelinerl.checkpoint import load_checkpoint
from pipelinerl.config.schema import EngineConfig
from pipelinerl.engine import LocalEngine
from pipelinerl.errors import UserError
from pipelinerl.experiments.evaluate.targets import Target
from pipelinerl.interfaces import Engine, Tokenizer
from pipelinerl.launch.stages.engines import server_clients
from pipelinerl.models.loading import LONGEST_SLOT, load_model, model_max_length, stop_token_ids

STARTUP_S = 30.0
"""Time limit for the first response of servers, which should already be running."""


class EvaluationEngine(NamedTuple):
    """An engine that is ready. `version` is None if the number of optimizer steps behind the weights is unknown."""

    engine: Engine
    slots: int
    stop_token_ids: tuple[int, ...]
    version: int | None


@contextmanager
def engine_for(
    target: Target, config: EngineConfig, tokenizer: Tokenizer, max_tokens: int, api_key: str | None
) -> Iterator[EvaluationEngine]:
    """The engine that `config` describes; its memory is freed on exit.

    Raises ModelLoadError, UnsupportedModelError or CheckpointError; for servers what `RemoteEngine` raises, and UserError
    if they serve another model.
    """
    if config.kind != "local":
        with _remote(target, config, api_key) as ready:
            yield ready
        return
    try:
        yield _local(target, config, tokenizer, max_tokens)
    finally:
        gc.collect()


def _local(target: Target, config: EngineConfig, tokenizer: Tokenizer, max_tokens: int) -> EvaluationEngine:
    if target.checkpoint:
        load_checkpoint(Path(target.model.path))  # verifies every file
    model = load_model(target.model, config.device)
    most = model_max_length(model) or LONGEST_SLOT + max_tokens
    engine = LocalEngine(
        model,
        slots=config.slots,
        max_length=config.max_length or min(most, max(LONGEST_SLOT, max_tokens + LONGEST_SLOT // 2)),
        prefill_tokens=config.prefill_tokens,
        version=target.version or 0,
    )
    return EvaluationEngine(engine, config.slots, stop_token_ids(model, tokenizer), target.version)


@contextmanager
def _remote(target: Target, config: EngineConfig, api_key: str | None) -> Iterator[EvaluationEngine]:
    from pipelinerl.serving.client.engine import RemoteEngine  # noqa: PLC0415 - HTTP client, only needed here
    from pipelinerl.serving.client.errors import Bounds  # noqa: PLC0415 - as above
    from pipelinerl.serving.vllm.server_info import model_facts  # noqa: PLC0415 - as above

    facts = model_facts(target.model.path)
    servers = server_clients(config.kind, config.urls, facts, api_key)
    with closing(RemoteEngine(servers, bounds=Bounds(startup_s=STARTUP_S))) as engine:
        if engine.limits.vocabulary != facts.vocabulary:
            raise UserError(
                f"{config.urls[0]} serves a model with a vocabulary of {engine.limits.vocabulary} tokens, but "
                f"{target.model.path} has {facts.vocabulary}: give the MODEL that it serves, for its tokenizer"
            )
        yield EvaluationEngine(engine, engine.slots, facts.stop_token_ids, engine.version)
