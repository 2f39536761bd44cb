"""`pipelinerl serve`."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from pipelinerl.cli.parser import Commands, api_key_from, refuse_settings
from pipelinerl.config.schema import ModelConfig
from pipelinerl.errors import MissingDependencyError, UserError
from pipelinerl.serving.server.options import SHARED_MEMORY, Address, ServeOptions

_NEEDED = ("uvicorn", "starlette", "prometheus_client")


def add_to(commands: Commands) -> None:
    text = "Serve a model over HTTP: OpenAI's API, and in-flight weight updates (extra `pipelinerl[serve]`)."
    parser = commands.add("serve", text)
    parser.add_argument("model", metavar="MODEL", help="folder or hub id of a Hugging Face causal LM, or `demo`")
    _add_model_flags(parser)
    _add_address_flags(parser)
    _add_engine_flags(parser)
    parser.set_defaults(run=run)


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--served-name", metavar="NAME", help="the model's name for clients (default: MODEL)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="type of the weights")
    parser.add_argument("--head-dtype", choices=["float32"], help="type in which logits are computed (default: --dtype)")
    parser.add_argument("--device", default="cpu", help="torch device (default: cpu)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the model")


def _add_address_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on, 0: any free port (default: 8000)")
    parser.add_argument("--update-host", help="address for weight updates, with --update-port (default: --host)")
    parser.add_argument("--update-port", type=int, help="accept weight updates only on this port, 0: any free port")
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable with the API key that clients must send")
    parser.add_argument(
        "--weights-dir",
        type=Path,
        action="append",
        metavar="DIR",
        help=f"directory that weight updates may be read from; may be repeated (default: {SHARED_MEMORY})",
    )
    parser.add_argument(
        "--ready-file", type=Path, metavar="FILE", help='written once the server listens: {"url": ..., "pid": ...}'
    )
    parser.add_argument(
        "--lifeline-fd", type=int, metavar="FD", help="parent-death pipe: the server ends when the other end closes"
    )
    parser.add_argument(
        "--drain-s",
        type=float,
        default=30.0,
        help="time for open requests to finish when the server is stopped (default: 30)",
    )


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slots", type=int, default=32, help="sequences in progress at once (default: 32)")
    parser.add_argument(
        "--max-length", type=int, help="longest prompt + completion, in tokens (default: the model's, at most 2048)"
    )
    parser.add_argument("--max-queue", type=int, default=256, help="requests that may wait for a slot (default: 256)")
    parser.add_argument("--prefill-tokens", type=int, default=2048, help="most prompt tokens in one step (default: 2048)")
    parser.add_argument(
        "--kv-on-update",
        choices=["keep", "recompute"],
        default="keep",
        help="what to do with the KV cache at a weight update",
    )
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")


def run(options: argparse.Namespace, settings: Sequence[str]) -> int:
    refuse_settings("pipelinerl serve", settings)
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise MissingDependencyError(f"pipelinerl serve needs {', '.join(missing)}: pip install 'pipelinerl[serve]'")
    wanted = serve_options(options)
    wanted.check()
    from pipelinerl.serving.server.run import serve  # noqa: PLC0415 (loads torch: after the checks above)

    return serve(wanted)


def serve_options(options: argparse.Namespace) -> ServeOptions:
    """Raises UserError."""
    updates = None
    if options.update_port is not None:
        updates = Address(options.update_host or options.host, options.update_port)
    elif options.update_host is not None:
        raise UserError("--update-host needs --update-port")
    return ServeOptions(
        model=ModelConfig(
            path=options.model,
            dtype=options.dtype,
            head_dtype=options.head_dtype,
            trust_remote_code=options.trust_remote_code,
        ),
        name=options.served_name or options.model,
        listen=Address(options.host, options.port),
        updates=updates,
        api_key=api_key_from(options.api_key_env),
        slots=options.slots,
        max_length=options.max_length,
        max_queue=options.max_queue,
        prefill_tokens=options.prefill_tokens,
        kv_on_update=options.kv_on_update,
        device=options.device,
        threads=options.threads,
        weight_directories=tuple(options.weights_dir or [SHARED_MEMORY]),
        drain_s=options.drain_s,
        ready_file=options.ready_file,
        lifeline_fd=options.lifeline_fd,
    )
