"""The cost of weight updates to engines in other processes: the trainer's time and the engines' pause.

    OMP_NUM_THREADS=1 python -m benchmarks.weights --models demo 135m

The trainer (`send`) copies the weights and computes their checksum. The engine takes the update from the
transport (`poll`). Then, while decoding pauses, it copies it into the model's parameters and computes their checksum
(`pause`). `copy` is the lower bound: the same bytes copied from one set of tensors to another within a process.

With shared memory the engine verifies the update in `poll`. With the collective (gloo, on loopback) threads on both sides
send, receive and verify, while the trainer trains and the engine decodes: `until_answered` includes all of it. With several
engines the slowest counts.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import common
from benchmarks.common import Record
from pipelinerl.engine import LocalEngine
from pipelinerl.files import shared_memory
from pipelinerl.hub.admission import AdmissionState
from pipelinerl.hub.client import HubClient
from pipelinerl.hub.hub import Hub
from pipelinerl.hub.server import HubServer, WorkerKind
from pipelinerl.hub.stream import FileStream
from pipelinerl.models.state import first_names, named_weights
from pipelinerl.schedule import PipelineSchedule
from pipelinerl.status.board import MemoryBoard
from pipelinerl.weights.broadcast.receiver import CollectiveWeightReceiver
from pipelinerl.weights.broadcast.sender import CollectiveWeightSender
from pipelinerl.weights.receiving import Receiver, SharedWeightReceiver
from pipelinerl.weights.sending import SharedWeightSender

IDLE_S = 0.0005
KEY = "of the benchmark"
SHARED, COLLECTIVE = "shared memory", "collective"
SENT = [(SHARED, 1), (SHARED, 2), (COLLECTIVE, 1), (COLLECTIVE, 2)]


def make_model(name: str) -> Any:
    """The demo's model, the model of a folder, or `135m`: the shape of SmolLM2-135M with random weights."""
    if name != "135m":
        return common.fresh_model(name)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).float().eval()


def receive(name: str, system: str, fd: int, connected: int, index: int, updates: int) -> None:  # noqa: PLR0917
    """An engine's process: apply every update, then print the times of each as a JSON line."""
    engine = LocalEngine(make_model(name), slots=1, max_length=64)
    hub = HubClient(socket.socket(fileno=connected))
    shared = system == SHARED
    receiver: Receiver = SharedWeightReceiver(fd, hub) if shared else CollectiveWeightReceiver(hub, KEY, index)
    print("ready", flush=True)
    times: list[Record] = []
    while len(times) < updates:
        begin_s = time.perf_counter()
        update = receiver.poll()
        polled_s = time.perf_counter()
        if update is None:
            time.sleep(IDLE_S)
            continue
        receipt = engine.update_weights(update)
        receiver.acknowledge(receipt)
        times.append({"poll_s": polled_s - begin_s, "pause_s": receipt.pause_s})
    print(json.dumps(times), flush=True)
    receiver.close()
    hub.close()


def hand_over(name: str, system: str, engines: int, repetitions: int, threads: int) -> list[Record]:
    """Send the weights of one model repeatedly to engines in other processes. The first time is discarded."""
    tensors = named_weights(make_model(name))
    target = {key: torch.empty_like(tensors[key]) for key in dict.fromkeys(first_names(tensors).values())}
    copies_s, sends_s, answers_s = [], [], []
    state = AdmissionState(PipelineSchedule(8), processes=engines)
    server = HubServer(Hub(state, FileStream(), Path(), MemoryBoard()))
    server.__enter__()
    fd, processes = shared_memory(), []
    for index in range(engines):
        with server.connect(WorkerKind(process=index)) as connected:
            fds = [fd, connected.fileno()]
            arguments = [*map(str, fds), str(index), str(repetitions + 1), "--threads", str(threads)]
            processes.append(_engine(fds, name, system, *arguments))
    hub = HubClient(server.connect(WorkerKind(follows=True)))
    sender = _sender(system, fd, hub, engines)
    try:
        if [_line(process) for process in processes] != ["ready\n"] * engines:
            raise SystemExit("an engine's process did not start")
        for version in range(repetitions + 1):
            copies_s.append(_copy_s(tensors, target))
            begin_s = time.perf_counter()
            sender.send(version, tensors)
            sends_s.append(time.perf_counter() - begin_s)
            while sender.unanswered():
                if any(process.poll() is not None for process in processes):
                    raise SystemExit("an engine's process ended early")
                time.sleep(IDLE_S)
            answers_s.append(time.perf_counter() - begin_s)
            sender.receipts()
        received: list[list[Record]] = [json.loads(_line(process)) for process in processes]
    finally:
        sender.close()
        for process in processes:
            process.kill()
            process.wait()
        hub.close()
        server.__exit__()
        os.close(fd)
    weight_bytes = sum(tensor.numel() * tensor.element_size() for tensor in target.values())
    return [
        {
            "model": common.model_label(name),
            "system": system,
            "engines": engines,
            "repetition": i,
            "weight_bytes": weight_bytes,
            "copy_s": copies_s[i + 1],
            "send_s": sends_s[i + 1],
            "poll_s": max(times[i + 1]["poll_s"] for times in received),
            "pause_s": max(times[i + 1]["pause_s"] for times in received),
            "until_answered_s": answers_s[i + 1],
        }
        for i in range(repetitions)
    ]


def _sender(system: str, fd: int, hub: HubClient, engines: int) -> SharedWeightSender | CollectiveWeightSender:
    if system == SHARED:
        return SharedWeightSender(fd, hub, engines)
    return CollectiveWeightSender("127.0.0.1", KEY, engines, hub)


def _engine(fds: Sequence[int], *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.weights", "--receive", *arguments]
    return subprocess.Popen(command, pass_fds=fds, stdout=subprocess.PIPE, text=True)


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def _copy_s(tensors: dict[str, Tensor], target: dict[str, Tensor]) -> float:
    begin_s = time.perf_counter()
    for name, tensor in target.items():
        tensor.copy_(tensors[name])
    return time.perf_counter() - begin_s


def table_of(records: list[Record]) -> list[Record]:
    """A row for each model, transport and number of engines: medians in milliseconds, and the longest pause.

    `copies`: what sequences wait for at an update, as a multiple of one copy of the weights.
    """
    rows = []
    for case in dict.fromkeys((r["model"], r["system"], r["engines"]) for r in records):
        chosen = [r for r in records if (r["model"], r["system"], r["engines"]) == case]
        model, system, engines = case
        row: Record = {"model": model, "MB": chosen[0]["weight_bytes"] / 1e6, "transport": system, "engines": engines}
        for part in ("copy", "send", "poll", "pause", "until_answered"):
            row[f"{part} ms"] = 1e3 * statistics.median(r[f"{part}_s"] for r in chosen)
        row["copies"] = (row["poll ms"] + row["pause ms"]) / row["copy ms"]
        row["longest pause ms"] = 1e3 * max(r["pause_s"] for r in chosen)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["demo", "135m"], help="`demo`, `135m` (random weights), or folders")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1, help="threads per process")
    parser.add_argument("--results", type=Path, default=common.RESULTS)
    parser.add_argument("--receive", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.receive:
        name, system, *numbers = options.receive
        receive(name, system, *map(int, numbers))
        return
    machine_before = common.machine()
    records = [
        record
        for name in options.models
        for system, engines in SENT
        for record in hand_over(name, system, engines, options.repetitions, options.threads)
    ]
    common.write_results(
        "weights",
        settings=common.settings_of(options),
        machine_before=machine_before,
        records=records,
        table=table_of(records),
        directory=options.results,
    )


if __name__ == "__main__":
    main()
