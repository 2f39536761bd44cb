"""`python -m tests.contract URL`: whether an engine server keeps the contract."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from pipelinerl.cli.parser import api_key_from, write
from pipelinerl.errors import PipelineRLError
from pipelinerl.files import SHARED_MEMORY
from pipelinerl.serving.client.adapter import EngineServer
from pipelinerl.serving.client.http import PipelineServer
from tests.contract.checks import Check, Result, run_checks
from tests.contract.generation import SERVER_CHECKS

_WITHOUT = {
    "http": frozenset[str](),
    "vllm": frozenset({"seeds", "endpoints of ours"}),
}
"""Features that each kind of server is known to lack."""


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: 1 if a check failed."""
    try:
        return run(make_parser().parse_args(arguments))
    except PipelineRLError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status


def make_parser() -> argparse.ArgumentParser:
    text = "Check that an engine server meets the contract: exact tokens, log-probs and versions, limits, updates."
    parser = argparse.ArgumentParser(prog="python -m tests.contract", description=text)
    flag = parser.add_argument
    flag("url", metavar="URL", help="the server's address, e.g. http://127.0.0.1:8000")
    flag("--kind", choices=sorted(_WITHOUT), default="http", help="the server's protocol (default: http, our own)")
    flag("--api-key-env", metavar="NAME", help="environment variable with the server's API key")
    text = "the served model; with it, log-probs and weight updates are checked too (the server must be idle)"
    flag("--model", metavar="DIR", help=text)
    text = f"folder for weight files (default: {SHARED_MEMORY})"
    flag("--update-dir", type=Path, default=SHARED_MEMORY, metavar="DIR", help=text)
    flag("--tolerance", type=float, default=1e-3, metavar="X", help="tolerance of log-probs (default: 0.001)")
    return parser


def run(options: argparse.Namespace) -> int:
    server = _server(options)
    with ExitStack() as stack:
        checks: tuple[Check, ...] = SERVER_CHECKS
        if options.model is not None:
            from tests.contract.weights import WeightChecks

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
        from pipelinerl.serving.vllm.adapter import VllmServer

        return VllmServer(options.url, api_key=key)
    return PipelineServer(options.url, api_key=key)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
