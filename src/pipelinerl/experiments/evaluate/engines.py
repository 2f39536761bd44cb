"""The engine that answers: the embedded one with a model of its own, or servers that have theirs."""

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
"""For servers to answer at first: they are there already, or are not coming."""


class Answering(NamedTuple):
    """`version` is None where nobody knows how many optimizer steps are behind the weights."""

    engine: Engine
    slots: int
    stop_token_ids: tuple[int, ...]
    version: int | None


@contextmanager
def engine_for(
    target: Target, config: EngineConfig, tokenizer: Tokenizer, max_tokens: int, api_key: str | None
) -> Iterator[Answering]:
    """The engine that `config` asks for; its memory is free again afterwards.

    Raises ModelLoadError, UnsupportedModelError, CheckpointError; for servers what `RemoteEngine` raises, and UserError if
    they serve another model.
    """
    if config.kind != "local":
        with _remote(target, config, api_key) as answering:
            yield answering
        return
    try:
        yield _local(target, config, tokenizer, max_tokens)
    finally:
        gc.collect()


def _local(target: Target, config: EngineConfig, tokenizer: Tokenizer, max_tokens: int) -> Answering:
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
    return Answering(engine, config.slots, stop_token_ids(model, tokenizer), target.version)


@contextmanager
def _remote(target: Target, config: EngineConfig, api_key: str | None) -> Iterator[Answering]:
    from pipelinerl.serving.client.engine import RemoteEngine  # noqa: PLC0415 - as above
    from pipelinerl.serving.client.errors import Bounds  # noqa: PLC0415 - what talks HTTP is for this alone
    from pipelinerl.serving.vllm.server_info import model_facts  # noqa: PLC0415 - as above

    facts = model_facts(target.model.path)
    servers = server_clients(config.kind, config.urls, facts, api_key)
    with closing(RemoteEngine(servers, bounds=Bounds(startup_s=STARTUP_S))) as engine:
        if engine.limits.vocabulary != facts.vocabulary:
            raise UserError(
                f"{config.urls[0]} serves a model of {engine.limits.vocabulary} tokens, and {target.model.path} has "
                f"{facts.vocabulary}: give the MODEL that it serves, for its tokenizer"
            )
        yield Answering(engine, engine.slots, facts.stop_token_ids, engine.version)
