"""Engines behind HTTP, and the cost of HTTP: the embedded engine in this process, the same engine behind
`pipelinerl serve`, vLLM, and transformers' continuous batching. Same model, prompts, lengths and concurrency, in one run.

    OMP_NUM_THREADS=1 python -m benchmarks.servers --model demo --slots 1 8 32 64 --vllm-python VLLM_ENV/bin/python

Each system computes on one thread and gets at most H requests at a time. Servers are separate processes, so their HTTP,
JSON and scheduling run on the other core; the systems in this process have one core for everything. Servers that are not
being measured are idle. With `taskset -c 0`, all share one core. End-of-text tokens are ignored. Times are from the first
request to the last completion.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks import common
from benchmarks.common import Record
from benchmarks.engine import table_of
from benchmarks.systems import SYSTEMS, Job, System, make_jobs, requests, timed
from benchmarks.vllm_switch import float32_settings, running_vllm
from pipelinerl.models.folder import resolve_path
from pipelinerl.serving.client.engine import RemoteEngine
from pipelinerl.serving.client.http import PipelineServer
from pipelinerl.serving.vllm.adapter import VllmServer
from pipelinerl.types import GenerationRequest


class Served:
    """An engine server through `RemoteEngine`, with at most H requests at a time. `runner` has the engine's event loop."""

    def __init__(self, runner: asyncio.Runner, engine: RemoteEngine, slots: int) -> None:
        self._runner, self._engine, self._slots = runner, engine, slots

    def run(self, jobs: Sequence[Job]) -> list[int]:
        return self._runner.run(self._serve(jobs))

    async def _serve(self, jobs: Sequence[Job]) -> list[int]:
        free = asyncio.Semaphore(self._slots)

        async def one(request: GenerationRequest) -> int:
            async with free:
                return len((await self._engine.generate(request)).token_ids)

        answers = asyncio.gather(*map(one, requests(jobs)))
        while not answers.done():
            await asyncio.sleep(0)
            await self._engine.advance()
        return await answers

    def close(self) -> None:
        """Keeps the server, which is used by all scenarios."""


@contextmanager
def running_serve(model: str, directory: Path, *options: str) -> Iterator[str]:
    """A context in which `pipelinerl serve` runs; gives its address."""
    ready = directory / "ready.json"
    command = [sys.executable, "-m", "pipelinerl", "serve", model, "--port", "0", "--engine.threads", "1"]
    with (directory / "serve.log").open("wb") as log:
        process = subprocess.Popen([*command, "--ready-file", str(ready), *options], stdout=log, stderr=log)
        try:
            while not ready.exists():
                if process.poll() is not None:
                    raise RuntimeError((directory / "serve.log").read_text())
                time.sleep(0.1)
            url: str = msgspec.json.decode(ready.read_bytes())["url"]
            yield url
        finally:
            process.terminate()
            process.wait(60)


@asynccontextmanager
async def own_server(options: argparse.Namespace, room: int, directory: Path) -> AsyncIterator[RemoteEngine]:
    settings = ["--engine.slots", str(max(options.slots)), "--engine.max_length", str(room), "--max-queue", "1024"]
    with running_serve(options.model, directory, *settings) as url:
        async with RemoteEngine.connect([PipelineServer(url)]) as engine:
            yield engine


@asynccontextmanager
async def vllm_server(options: argparse.Namespace, room: int, directory: Path) -> AsyncIterator[RemoteEngine]:
    folder = resolve_path(options.model)
    settings = float32_settings(options.vllm_python, folder, slots=max(options.slots), max_length=room)
    with running_vllm(settings, directory / "vllm.log", timeout_s=300) as server:
        async with RemoteEngine.connect([VllmServer(server.url)]) as engine:
            yield engine


def compare(
    options: argparse.Namespace, served: Callable[[int], dict[str, System]], slots: int, lengths: str, room: int
) -> list[Record]:
    count = max(options.fewest, slots * options.waves)
    if lengths == "long_tailed":
        wanted = common.long_tailed_lengths(count, options.longest, seed=slots)
    else:
        wanted = common.equal_lengths(count, options.longest)
    models: dict[str, Any] = {name: common.fresh_model(options.model) for name in options.local}
    jobs = make_jobs(wanted, options.prompt_tokens, next(iter(models.values())).config.vocab_size)
    systems: dict[str, System] = {name: SYSTEMS[name](model, slots, room) for name, model in models.items()}
    systems |= served(slots)
    try:
        calls = {name: (lambda system=system: timed(system, jobs)) for name, system in systems.items()}
        scenario = {"model": common.model_label(options.model), "slots": slots, "lengths": lengths}
        return common.take_turns(calls, options.repetitions, scenario=scenario)
    finally:
        for system in systems.values():
            system.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="`demo`, or a folder of a Hugging Face causal LM")
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--lengths", nargs="+", default=["equal", "long_tailed"], choices=["equal", "long_tailed"])
    parser.add_argument("--local", nargs="+", default=["pipelinerl", "continuous_batching"], choices=list(SYSTEMS))
    parser.add_argument("--vllm-python", help="interpreter of an environment with vLLM; without it vLLM is skipped")
    parser.add_argument("--longest", type=int, default=219, help="tokens of the longest completion")
    parser.add_argument("--prompt-tokens", type=int, default=6)
    parser.add_argument("--waves", type=int, default=4, help="requests per slot")
    parser.add_argument("--fewest", type=int, default=8, help="minimum number of requests")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--name", help="name of the result file (default: servers-MODEL)")
    parser.add_argument("--results", type=Path, default=common.RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ["OMP_NUM_THREADS"] = "1"
    machine_before = common.machine()
    room = options.prompt_tokens + options.longest
    records: list[Record] = []
    with asyncio.Runner() as runner, tempfile.TemporaryDirectory() as folder:
        stack = AsyncExitStack()
        servers = {"pipelinerl_http": own_server} | ({"vllm": vllm_server} if options.vllm_python else {})
        try:
            engines = {
                name: runner.run(stack.enter_async_context(server(options, room, Path(folder))))
                for name, server in servers.items()
            }

            def served(slots: int) -> dict[str, System]:
                return {name: Served(runner, engine, slots) for name, engine in engines.items()}

            for slots in options.slots:
                for lengths in options.lengths:
                    records += compare(options, served, slots, lengths, room)
                    print(common.markdown(table_of(records)[-1:]), flush=True)
        finally:
            runner.run(stack.aclose())
    settings = common.settings_of(options)
    del settings["vllm_python"]
    common.write_results(
        options.name or f"servers-{common.model_label(options.model)}",
        settings=settings,
        machine_before=machine_before,
        records=records,
        table=table_of(records),
        directory=options.results,
    )


if __name__ == "__main__":
    main()
