"""`pipelinerl serve`: a model behind HTTP."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from pipelinerl.cli.parser import Commands, api_key_from, at_least
from pipelinerl.config.load import with_flags
from pipelinerl.config.schema import EngineConfig, ModelConfig, RunConfig
from pipelinerl.extras import require
from pipelinerl.files import SHARED_MEMORY
from pipelinerl.serving.server.options import Address, ServeOptions

KEYS = (
    *("model.dtype", "model.head_dtype", "model.trust_remote_code", "engine.slots", "engine.max_length"),
    *("engine.prefill_tokens", "engine.kv_on_update", "engine.device", "engine.threads"),
)
"""The keys of the run file that a server uses."""
SLOTS = 32
_EPILOG = (
    f"These keys of the run file are also flags: {', '.join(f'--{key}' for key in KEYS)} (engine.slots is {SLOTS} here)."
)


def add_to(commands: Commands) -> None:
    text = "Serve a model over HTTP: OpenAI's API, and in-flight weight updates (extra `serve`)."
    flag = commands.add("serve", text, _EPILOG, run=run_serve).add_argument
    flag("model", metavar="MODEL", help="folder or hub id of a Hugging Face causal LM, or `demo`")
    flag("--served-name", metavar="NAME", help="the model's name for clients (default: MODEL)")
    flag("--host", metavar="HOST", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    flag("--port", type=int, metavar="PORT", default=8000, help="port to listen on, 0: any free port (default: 8000)")
    flag("--api-key-env", metavar="NAME", help="environment variable with the API key that clients must send")
    text = f"directory that weight updates may be read from; may be repeated (default: {SHARED_MEMORY})"
    flag("--weights-dir", type=Path, action="append", metavar="DIR", help=text)
    flag("--max-queue", type=at_least(0), default=256, metavar="N", help="requests that may wait for a slot (default: 256)")
    flag("--ready-file", type=Path, metavar="FILE", help='file to write once the server listens: {"url": ..., "pid": ...}')
    text = "seconds that open requests have to finish when the server is stopped (default: 30)"
    flag("--drain-s", type=at_least(0, float), default=30.0, metavar="S", help=text)


def run_serve(options: argparse.Namespace, settings: Sequence[str]) -> int:
    require("serve", "pipelinerl serve")
    wanted = serve_options(options, settings)
    wanted.check()
    from pipelinerl.serving.server.run import serve  # noqa: PLC0415 (loads torch: after the checks above)

    return serve(wanted)


def serve_options(options: argparse.Namespace, settings: Sequence[str]) -> ServeOptions:
    """Raises UserError."""
    base = RunConfig(model=ModelConfig(path=options.model), engine=EngineConfig(slots=SLOTS))
    config = with_flags(base, settings, KEYS)
    return ServeOptions(
        model=config.model,
        engine=config.engine,
        name=options.served_name or options.model,
        listen=Address(options.host, options.port),
        api_key=api_key_from(options.api_key_env),
        max_queue=options.max_queue,
        weight_directories=tuple(options.weights_dir or [SHARED_MEMORY]),
        drain_s=options.drain_s,
        ready_file=options.ready_file,
    )
