"""Engine servers: the connection of a generation process with them, and the servers that a run starts itself.

A server of the run is the process of role `server-N`. It listens on a free port of this machine, writes its address to its
ready file, and ends when its parent-death pipe closes.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from pipelinerl.channel import free_port
from pipelinerl.config.schema import EngineConfig
from pipelinerl.errors import StalledError, UserError
from pipelinerl.extras import require
from pipelinerl.files import SHARED_MEMORY, write_atomically
from pipelinerl.interfaces import AsyncEngine
from pipelinerl.launch.session import Session, StartPlan
from pipelinerl.models.contract import Contract
from pipelinerl.process import lower_priority
from pipelinerl.resources.roles import server_roles
from pipelinerl.run_directory import ReadyFile

if TYPE_CHECKING:
    from pipelinerl.serving.client.adapter import EngineServer
    from pipelinerl.serving.vllm.adapter import ModelFacts
    from pipelinerl.weights.receiving import Receiver

DRAIN_S = 5.0
"""Time for requests in progress once the server is asked to stop. Short: their clients have ended by then."""
LOOK_EVERY_S = 0.05
START_SHARE = 0.8
"""Share of `launch.startup_timeout_s` to wait for servers: the error that names them must precede the launcher's timeout."""


# ---- a server that the run starts


def run_server(session: Session, role: str, parent_pipe: int) -> None:
    """Run a server until it is asked to stop.

    Raises MissingDependencyError and the errors of loading the model.
    """
    config, engine = session.config, session.config.engine
    if engine.kind == "vllm":
        _run_vllm(session, role, parent_pipe)
    require("serve", "engine servers")
    from pipelinerl.serving.server.run import ServeOptions, serve  # noqa: PLC0415 - only our own servers need it

    serve(
        ServeOptions(
            model=config.model,
            engine=engine.model_copy(update={"threads": session.here.threads}),
            name=role,
            listen=(session.here.address, 0),
            api_key=session.plan.servers_key,
            tls=_tls(engine),
            max_queue=engine.slots,
            weight_directories=(SHARED_MEMORY, session.run.control),
            drain_s=DRAIN_S,
            ready_file=session.run.ready_file(role),
        ),
        began=lower_priority if session.here.yields else lambda: None,
    )


def _run_vllm(session: Session, role: str, parent_pipe: int) -> NoReturn:
    """Run vLLM as a child, and exit with its status. Raises ModelLoadError."""
    from pipelinerl.models.folder import resolve_path  # noqa: PLC0415 - with torch
    from pipelinerl.models.loading import load_config, slot_length  # noqa: PLC0415 - as above
    from pipelinerl.resources.memory import share_for_vllm  # noqa: PLC0415 - as above
    from pipelinerl.serving.vllm import start  # noqa: PLC0415 - as above

    model, engine, here = session.config.model, session.config.engine, session.here
    if here.yields:
        lower_priority()
    on_cpu, item_bytes = engine.device == "cpu", 4 if model.dtype == "float32" else 2
    sizes = {"slots": engine.slots, "max_length": engine.max_length or slot_length(load_config(model), None)}
    settings = start.VllmSettings(
        python=engine.python or sys.executable,
        model=resolve_path(model.path),
        **sizes,
        dtype=model.dtype,
        kv_cache_bytes=start.kv_cache_bytes(model.path, **sizes, item_bytes=item_bytes) if on_cpu else None,
        memory_share=None if on_cpu else share_for_vllm(session.config),
        device=engine.device,
        threads=here.threads,
        tls=_tls(engine),
        arguments=engine.vllm_args,
    )
    scheme, ready = "http" if settings.tls is None else "https", session.run.ready_file(role)
    port = free_port(here.address)
    write_atomically(ready, msgspec.json.encode(ReadyFile(f"{scheme}://{here.address}:{port}", os.getpid())))
    os.dup2(parent_pipe, 0)  # `start` watches it there
    os.environ.update(start.environment(settings, {}, session.plan.servers_key))
    sys.exit(start.main(start.command_line(settings, port, here.address, guarded=True)))


def _tls(engine: EngineConfig) -> tuple[Path, Path] | None:
    """The PEM files of this machine's certificate and its key, if servers shall use them. Raises UserError."""
    if engine.tls_certificate is None or engine.tls_key is None:
        return None
    files = (Path(engine.tls_certificate), Path(engine.tls_key))
    for name, path in zip(("tls_certificate", "tls_key"), files, strict=True):
        if not path.is_file():
            raise UserError(f"engine.{name}: there is no file {path} on {socket.gethostname()}")
    return files


# ---- the connection of a generation process with servers


@asynccontextmanager
async def connected_engine(
    session: Session, name: str, receiver: Receiver | None
) -> AsyncIterator[tuple[AsyncEngine, Contract]]:
    """The engine of a generation process over the run's servers, in `engine.urls` or started by the run."""
    from pipelinerl.serving.client.adapter import Bounds  # noqa: PLC0415 - as above
    from pipelinerl.serving.client.engine import RemoteEngine  # noqa: PLC0415 - needs httpx2, an extra
    from pipelinerl.serving.vllm.adapter import model_facts  # noqa: PLC0415 - as above

    config = session.config
    key: str | None = session.plan.servers_key
    if config.engine.urls:
        key = os.environ.get(named) if (named := config.engine.api_key_env) else None
        if named and not key:
            raise UserError(f"engine.api_key_env: the environment variable {named} is not set")
    run, plan, roles = session.run, session.plan, server_roles(config)
    timeout_s = START_SHARE * config.launch.startup_timeout_s
    deadline_s = time.monotonic() + timeout_s
    facts = model_facts(config.model.path)
    while absent := [role for role in roles if not run.ready_file(role).exists()]:
        if time.monotonic() > deadline_s:
            raise StalledError(f"{' and '.join(absent)} not ready after {timeout_s:.0f} s; look at {run.log(absent[0])}")
        await asyncio.sleep(LOOK_EVERY_S)
    urls = config.engine.urls or [
        msgspec.json.decode(run.ready_file(role).read_bytes(), type=ReadyFile).url for role in roles
    ]
    left_s = max(1.0, deadline_s - time.monotonic())
    bounds = Bounds(startup_s=left_s, join_s=left_s)
    servers = server_clients(config.engine.kind, urls, facts, key, plan)
    async with RemoteEngine.connect(servers, name=name, first=plan.version, bounds=bounds) as engine:
        if config.weights.kind == "collective" and receiver is not None:
            while (meeting := receiver.meeting) is None:
                receiver.offered()
                await asyncio.sleep(LOOK_EVERY_S)
            await engine.join_broadcast(meeting.host, meeting.port, plan.weights_key)
        yield engine, Contract(facts.stop_token_ids, facts.notes)


def server_clients(
    kind: str, urls: Sequence[str], facts: ModelFacts, api_key: str | None, plan: StartPlan | None = None
) -> list[EngineServer]:
    """A client for each address. `kind` is `http` or `vllm`; `facts` describe the model that the servers serve.

    `plan`: of the session, if it updates the weights.
    """
    from pipelinerl.serving.client.http import PipelineServer  # noqa: PLC0415 - needs httpx2, an extra
    from pipelinerl.serving.vllm.adapter import VllmServer  # noqa: PLC0415 - as above

    run, epoch = (plan.run, plan.epoch) if plan else ("", 0)
    client = PipelineServer if kind == "http" else partial(VllmServer, facts=facts)
    return [client(url, api_key=api_key, run=run, epoch=epoch) for url in urls]
