"""`pipelinerl check-engine`."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from pipelinerl.cli.parser import Commands, api_key_from, refuse_settings, write
from pipelinerl.errors import UserError
from pipelinerl.serving.client.adapter import EngineServer
from pipelinerl.serving.client.server_client import PipelineServer
from pipelinerl.serving.contract.checks import Check, Result, run_checks
from pipelinerl.serving.contract.generation import SERVER_CHECKS

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - memory that a server on this machine sees too
_WITHOUT = {
    "http": frozenset[str](),
    "vllm": frozenset({"seeds", "idempotent requests", "endpoints of ours"}),
}
"""Features that each kind of server is known to lack."""


def add_to(commands: Commands) -> None:
    text = "Check that an engine server meets the contract: exact tokens, log-probs and versions, limits, retries, updates."
    parser = commands.add("check-engine", text)
    parser.add_argument("url", metavar="URL", help="the server's address, e.g. http://127.0.0.1:8000")
    parser.add_argument(
        "--kind", choices=sorted(_WITHOUT), default="http", help="the server's protocol (default: http, our own)"
    )
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable with the server's API key")
    parser.add_argument("--update-url", metavar="URL", help="the server's address for weight updates, if different")
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="the model that it serves: also check log-probs and weight updates (the server must be idle)",
    )
    parser.add_argument(
        "--update-dir",
        type=Path,
        default=_SHARED_MEMORY,
        metavar="DIR",
        help=f"folder for weight files (default: {_SHARED_MEMORY})",
    )
    parser.add_argument("--tolerance", type=float, default=1e-3, metavar="X", help="tolerance of log-probs (default: 0.001)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, settings: Sequence[str]) -> int:
    """Returns exit status 1 if a check failed."""
    refuse_settings("pipelinerl check-engine", settings)
    server = _server(options)
    with ExitStack() as stack:
        checks: tuple[Check, ...] = SERVER_CHECKS
        if options.model is not None:
            from pipelinerl.serving.contract.weights import WeightChecks  # noqa: PLC0415 (loads torch and transformers)

            weights = stack.enter_context(closing(WeightChecks(options.model, options.update_dir, options.tolerance)))
            checks += weights.checks()
        width = max(len(check.name) for check in checks)
        results = asyncio.run(_check(server, checks, _WITHOUT[options.kind], width))
    counts = {outcome: sum(result.outcome == outcome for result in results) for outcome in ("pass", "fail", "not supported")}
    status = write("\n" + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) + "\n")
    return 1 if counts["fail"] else status


async def _check(server: EngineServer, checks: Sequence[Check], without: frozenset[str], width: int) -> list[Result]:
    def show(result: Result) -> None:
        write(f"{result.name:{width}}  {result.outcome:13}  {result.detail}\n")

    try:
        return await run_checks(server, checks, without=without, on_result=show)
    finally:
        await server.close()


def _server(options: argparse.Namespace) -> EngineServer:
    key = api_key_from(options.api_key_env)
    if options.kind == "vllm":
        if options.update_url is not None:
            raise UserError("--update-url is for --kind http: vLLM has only one address")
        from pipelinerl.serving.vllm.adapter import VllmServer  # noqa: PLC0415 (only this kind needs it)

        return VllmServer(options.url, api_key=key)
    return PipelineServer(options.url, api_key=key, update_url=options.update_url)
