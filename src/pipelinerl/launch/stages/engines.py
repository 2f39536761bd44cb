"""The engine of a generation process: in the same process, or a client of HTTP engine servers, which then hold the model."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from pipelinerl.config.schema import EngineConfig, RunConfig
from pipelinerl.errors import StalledError, UserError
from pipelinerl.interfaces import AsyncEngine, Tokenizer
from pipelinerl.launch.roles import server_roles
from pipelinerl.launch.run_directory import RunDirectory
from pipelinerl.launch.session import Session
from pipelinerl.launch.stages.weights import SenderAddress
from pipelinerl.types import ENGINE

if TYPE_CHECKING:
    from pipelinerl.engine import LocalEngine
    from pipelinerl.serving.client.adapter import EngineServer
    from pipelinerl.serving.vllm.server_info import ModelFacts

LOOK_EVERY_S = 0.05
START_SHARE = 0.8
"""Share of `launch.startup_timeout_s` to wait for servers: the error that names them must precede the launcher's timeout."""


class ReadyFile(msgspec.Struct, frozen=True):
    """The part of an engine server's ready file that is read here."""

    url: str


class EngineHandle(NamedTuple):
    """An engine that is ready. `slots` is its H, summed over all servers."""

    engine: AsyncEngine
    slots: int
    stop_token_ids: Sequence[int]


def waits_for(config: EngineConfig) -> str:
    """What `make_engine` waits for, as status text."""
    if config.kind == "local":
        return "loads the model"
    return f"waits for the engine servers {', '.join(config.urls)}".rstrip()


def make_engine(
    session: Session, name: str, tokenizer: Tokenizer, sender: SenderAddress | None = None
) -> AbstractAsyncContextManager[EngineHandle]:
    """The engine that the run file configures: loaded now, or over servers, which are connected with on entry.

    `sender` is the broadcast that its servers join, if weights are broadcast. Raises ModelLoadError and
    UnsupportedModelError; for servers also StalledError, UserError and the errors of `RemoteEngine.connect`.
    """
    if session.config.engine.kind == "local":
        return nullcontext(_local(session.config, name, tokenizer))
    return _remote(session, name, sender)


def load_local_engine(config: RunConfig, name: str = ENGINE) -> tuple[Any, LocalEngine]:
    """The run file's model and the embedded engine over it. Raises ModelLoadError and UnsupportedModelError."""
    from pipelinerl.engine import LocalEngine  # noqa: PLC0415 - only the process that computes needs it
    from pipelinerl.models.loading import load_model, slot_length  # noqa: PLC0415 - as above

    model = load_model(config.model, config.engine.device)
    engine = LocalEngine(
        model,
        slots=config.engine.slots,
        max_length=slot_length(model, config.engine.max_length),
        prefill_tokens=config.engine.prefill_tokens,
        kv_on_update=config.engine.kv_on_update,
        name=name,
    )
    return model, engine


def _local(config: RunConfig, name: str, tokenizer: Tokenizer) -> EngineHandle:
    from pipelinerl.actor.client import EngineClient  # noqa: PLC0415 - engine servers use this module too
    from pipelinerl.models.loading import stop_token_ids  # noqa: PLC0415 - as above

    model, engine = load_local_engine(config, name)
    return EngineHandle(EngineClient(engine), config.engine.slots, stop_token_ids(model, tokenizer))


@asynccontextmanager
async def _remote(session: Session, name: str, sender: SenderAddress | None) -> AsyncIterator[EngineHandle]:
    from pipelinerl.serving.client.engine import RemoteEngine  # noqa: PLC0415 - as above
    from pipelinerl.serving.client.errors import Bounds  # noqa: PLC0415 - needs httpx2, an extra
    from pipelinerl.serving.client.weights_file import SHARED_MEMORY  # noqa: PLC0415 - as above
    from pipelinerl.serving.vllm.server_info import model_facts  # noqa: PLC0415 - as above

    config = session.config
    key = _api_key(config.engine)
    deadline_s = time.monotonic() + START_SHARE * config.launch.startup_timeout_s
    facts = model_facts(config.model.path)
    urls = config.engine.urls or await _wait_for_servers(session.run, server_roles(config), deadline_s - time.monotonic())
    shared = config.engine.weights_dir
    directories = (Path(shared),) if shared else (SHARED_MEMORY, session.run.control)
    left_s = max(1.0, deadline_s - time.monotonic())
    bounds = Bounds(startup_s=left_s, join_s=left_s)
    servers = server_clients(config.engine.kind, urls, facts, key)
    async with RemoteEngine.connect(servers, name=name, weight_dirs=directories, bounds=bounds) as engine:
        _refuse_newer(engine.newest_version, session.plan.version)
        if sender is not None:
            await engine.join_broadcast(*sender)
        yield EngineHandle(engine, engine.slots, facts.stop_token_ids)


def _refuse_newer(held: int, first: int) -> None:
    """Raises UserError if a server's version, `held`, is above the run's `first` one: versions can only increase."""
    if held > first:
        raise UserError(
            f"engine.urls: a server holds weights of version {held}, of another run or of lost steps, but this run begins "
            f"with version {first}; restart the servers"
        )


def server_clients(kind: str, urls: Sequence[str], facts: ModelFacts, api_key: str | None) -> list[EngineServer]:
    """A client for each address. `kind` is `http` or `vllm`; `facts` describe the model that the servers serve."""
    from pipelinerl.serving.client.server_client import PipelineServer  # noqa: PLC0415 - needs httpx2, an extra
    from pipelinerl.serving.vllm.adapter import VllmServer  # noqa: PLC0415 - as above

    if kind == "http":
        return [PipelineServer(url, api_key=api_key) for url in urls]
    return [VllmServer(url, facts=facts, api_key=api_key) for url in urls]


async def _wait_for_servers(run: RunDirectory, roles: Sequence[str], timeout_s: float) -> list[str]:
    """The addresses of the servers that the launcher started, once all have written their ready files."""
    deadline_s = time.monotonic() + timeout_s
    while absent := [role for role in roles if not run.ready_file(role).exists()]:
        if time.monotonic() > deadline_s:
            raise StalledError(f"{' and '.join(absent)} not ready after {timeout_s:.0f} s; look at {run.log(absent[0])}")
        await asyncio.sleep(LOOK_EVERY_S)
    return [msgspec.json.decode(run.ready_file(role).read_bytes(), type=ReadyFile).url for role in roles]


def _api_key(config: EngineConfig) -> str | None:
    if config.api_key_env is None:
        return None
    key = os.environ.get(config.api_key_env)
    if not key:
        raise UserError(f"engine.api_key_env: the environment variable {config.api_key_env} is not set")
    return key
