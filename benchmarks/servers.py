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
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks import common
from benchmarks.common import Record
from benchmarks.engine import table_of
from benchmarks.systems import SYSTEMS, Job, System, make_jobs, requests, timed
from pipelinerl.models.loading import resolve_path
from pipelinerl.serving.client.engine import RemoteEngine
from pipelinerl.serving.client.server_client import PipelineServer
from pipelinerl.serving.vllm.adapter import VllmServer
from pipelinerl.serving.vllm.server_info import kv_cache_bytes
from pipelinerl.serving.vllm.start import VllmSettings, running_vllm


class Served:
    """An engine server through `RemoteEngine`, with at most H requests at a time."""

    def __init__(self, engine: RemoteEngine, slots: int) -> None:
        self._engine, self._slots = engine, slots

    def run(self, jobs: Sequence[Job]) -> list[int]:
        waiting = deque(requests(jobs))
        produced: dict[str, int] = {}
        open_requests = 0
        while len(produced) < len(jobs):
            while waiting and open_requests < self._slots:
                self._engine.submit(waiting.popleft())
                open_requests += 1
            for completion in self._engine.step().finished:
                produced[completion.request_id] = len(completion.token_ids)
                open_requests -= 1
        return [produced[str(number)] for number in range(len(jobs))]

    def close(self) -> None:
        """Keeps the server, which is used by all scenarios."""


@contextmanager
def own_server(options: argparse.Namespace, room: int, directory: Path) -> Iterator[RemoteEngine]:
    """A context in which `pipelinerl serve` runs."""
    ready = directory / "ready.json"
    command = [sys.executable, "-c", "import sys; from pipelinerl.cli import main; sys.exit(main())", "serve", options.model]
    command += ["--port", "0", "--engine.slots", str(max(options.slots)), "--engine.max_length", str(room)]
    command += ["--engine.threads", "1", "--max-queue", "1024", "--ready-file", str(ready)]
    with (directory / "serve.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            while not ready.exists():
                if process.poll() is not None:
                    raise RuntimeError((directory / "serve.log").read_text())
                time.sleep(0.1)
            engine = RemoteEngine([PipelineServer(msgspec.json.decode(ready.read_bytes())["url"])])
            yield engine
            engine.close()
        finally:
            process.terminate()
            process.wait(60)


@contextmanager
def vllm_server(options: argparse.Namespace, room: int, directory: Path) -> Iterator[RemoteEngine]:
    folder = resolve_path(options.model)
    slots = max(options.slots)
    settings = VllmSettings(
        python=options.vllm_python,
        model=folder,
        slots=slots,
        max_length=room,
        kv_cache_bytes=kv_cache_bytes(folder, slots=slots, max_length=room, item_bytes=4),
    )
    with running_vllm(settings, [directory / "vllm.log"], timeout_s=300) as (server,):
        engine = RemoteEngine([VllmServer(server.url)])
        yield engine
        engine.close()


def compare(
    options: argparse.Namespace, served: dict[str, RemoteEngine], slots: int, lengths: str, room: int
) -> list[Record]:
    count = max(options.fewest, slots * options.waves)
    if lengths == "long_tailed":
        wanted = common.long_tailed_lengths(count, options.longest, seed=slots)
    else:
        wanted = common.equal_lengths(count, options.longest)
    models: dict[str, Any] = {name: common.fresh_model(options.model) for name in options.local}
    jobs = make_jobs(wanted, options.prompt_tokens, next(iter(models.values())).config.vocab_size)
    systems: dict[str, System] = {name: SYSTEMS[name](model, slots, room) for name, model in models.items()}
    systems |= {name: Served(engine, slots) for name, engine in served.items()}
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
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        served = {"pipelinerl_http": stack.enter_context(own_server(options, room, directory))}
        if options.vllm_python:
            served["vllm"] = stack.enter_context(vllm_server(options, room, directory))
        for slots in options.slots:
            for lengths in options.lengths:
                records += compare(options, served, slots, lengths, room)
                print(common.markdown(table_of(records)[-1:]), flush=True)
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
