"""An engine server that a run starts itself: the process of role `server-N`.

It listens on a free port of this machine, writes its address to its ready file, and ends when its parent-death pipe closes.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import msgspec

from pipelinerl.config.schema import ModelConfig
from pipelinerl.errors import MissingDependencyError
from pipelinerl.files import write_atomically
from pipelinerl.launch.roles import plan_threads, usable_cores, yield_to_the_trainer
from pipelinerl.launch.session import Session
from pipelinerl.launch.stages.engines import ReadyFile
from pipelinerl.ports import free_port

if TYPE_CHECKING:
    from pipelinerl.serving.vllm.start import VllmSettings

HOST = "127.0.0.1"
DRAIN_S = 5.0
"""Time for requests in progress once the server is told to stop. Short: their clients have ended by then."""


def run_server(session: Session, role: str, parent_pipe: int) -> None:
    """The server process, to its end. vLLM replaces it."""
    yield_to_the_trainer(session.config, session.schedule)
    if session.config.engine.kind == "vllm":
        _become_vllm(session, role, parent_pipe)
    _serve_engine(session, role)


def _serve_engine(session: Session, role: str) -> None:
    """Run our own server until it is told to stop. Raises MissingDependencyError and the errors of loading the model."""
    from pipelinerl.serving.server.options import SHARED_MEMORY, Address, ServeOptions  # noqa: PLC0415 - only servers need it

    try:
        from pipelinerl.serving.server.run import serve  # noqa: PLC0415 - needs an extra
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"engine servers need {error.name}, which is not installed: pip install 'pipelinerl[serve]'"
        ) from error
    config, engine = session.config, session.config.engine
    serve(
        ServeOptions(
            model=config.model,
            engine=engine.model_copy(update={"threads": _threads(session)}),
            name=role,
            listen=Address(HOST, 0),
            max_queue=engine.slots,
            weight_directories=(SHARED_MEMORY, session.run.control),
            drain_s=DRAIN_S,
            ready_file=session.run.ready_file(role),
        )
    )


def _become_vllm(session: Session, role: str, parent_pipe: int) -> None:
    """Replace this process with vLLM and its guard process. Does not return. Raises ModelLoadError."""
    from pipelinerl.serving.vllm.start import command_line, environment  # noqa: PLC0415 - as above

    settings = _vllm_settings(session)
    port = free_port()
    write_atomically(session.run.ready_file(role), msgspec.json.encode(ReadyFile(f"http://{HOST}:{port}")))
    os.dup2(parent_pipe, 0)  # the guard watches it there
    command = [sys.executable, "-m", "pipelinerl.serving.vllm.guard", *command_line(settings, port)]
    os.execve(sys.executable, command, environment(settings, os.environ))  # noqa: S606 - our own module


def _vllm_settings(session: Session) -> VllmSettings:
    from pipelinerl.models.loading import resolve_path  # noqa: PLC0415 - with torch
    from pipelinerl.serving.vllm.server_info import kv_cache_bytes  # noqa: PLC0415 - as above
    from pipelinerl.serving.vllm.start import VllmSettings  # noqa: PLC0415 - as above

    model, engine = session.config.model, session.config.engine
    max_length = engine.max_length or _max_length(model)
    item_bytes = 4 if model.dtype == "float32" else 2
    return VllmSettings(
        python=engine.python or sys.executable,
        model=resolve_path(model.path),
        slots=engine.slots,
        max_length=max_length,
        dtype=model.dtype,
        kv_cache_bytes=kv_cache_bytes(model.path, slots=engine.slots, max_length=max_length, item_bytes=item_bytes)
        if engine.device == "cpu"
        else None,
        device=engine.device,
        threads=_threads(session),
    )


def _max_length(model: ModelConfig) -> int:
    from transformers import AutoConfig  # noqa: PLC0415 - takes seconds

    from pipelinerl.models.loading import resolve_path, slot_length  # noqa: PLC0415 - with torch

    config = AutoConfig.from_pretrained(resolve_path(model.path), trust_remote_code=model.trust_remote_code)
    return slot_length(SimpleNamespace(config=config), None)


def _threads(session: Session) -> int:
    return plan_threads(session.config, session.schedule, usable_cores()).generation
