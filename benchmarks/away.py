"""The cost of sending a checkpoint from a machine that does not have the run directory (docs/cluster.md).

    python -m benchmarks.away --gb 1.5

A cluster of two Ray nodes on this machine: the folder is on one, and the launcher's process on the other. So no network is
between them, and both ends share this machine's cores, memory and disk. `send_s` is what the trainer waits for: until the
folder is on the launcher's disk, checked and renamed. `resume_s` is the way back, at the start of a resume; what arrives is
not synced, and checked when it is loaded. `copy_s` is a copy with the same guarantees in one process, without Ray: read,
write, checksum, sync. CPU and memory are the launcher's while it receives; memory is above what it had before.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from benchmarks import common
from pipelinerl.checkpoint_folders import record_of, sync_tree
from pipelinerl.launch.away import Install, Outbox
from pipelinerl.launch.hosts.agent import Agent
from pipelinerl.launch.hosts.head import Head
from pipelinerl.launch.hosts.placement import Machine
from pipelinerl.launch.hosts.ray import RayHost, Seat
from pipelinerl.redis_connection import RedisConnection
from pipelinerl.stream.redis_server import start_server

FOLDER = "checkpoints/.unfinished-step_00000001"
PREFIX = "benchmark"


class Sender(Agent):
    """An agent without a run, and the trainer that waits."""

    def __init__(self, root: str, url: str) -> None:
        super().__init__()
        self._session: Any = SimpleNamespace(run=SimpleNamespace(root=Path(root)))
        self._url = url


@ray.remote(num_cpus=0)
def trainer(url: str, request: bytes) -> float:
    """Ask for the transfer, as a trainer does; the seconds that it waits."""
    outbox = Outbox(RedisConnection(url, "trainer"), PREFIX)
    begin_s = time.monotonic()
    outbox.ask(msgspec.msgpack.decode(request, type=Install), lambda _: None)
    return time.monotonic() - begin_s


def make_folder(root: Path, gigabytes: float) -> Install:
    """Weights and the optimizer's state, 1 to 2 in size, of random bytes."""
    folder = root / FOLDER
    folder.mkdir(parents=True)
    for name, share in (("model.safetensors", 1 / 3), ("optimizer.safetensors", 2 / 3)):
        with (folder / name).open("wb") as file:
            for _ in range(int(gigabytes * share * 1e9 / 1e6)):
                file.write(os.urandom(1_000_000))
    files = {path.name: record_of(path) for path in folder.iterdir()}
    (folder / "state.json").write_text(
        json.dumps({"state": {"files": {k: msgspec.to_builtins(v) for k, v in files.items()}}})
    )
    files["state.json"] = record_of(folder / "state.json")
    return Install(id="1", machine="far", folder=FOLDER, files=files, target="checkpoints/step_00000001")


def memory_bytes() -> dict[str, int]:
    """Of this process: what is its own, and the most that it had in all."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "VmHWM", "VmRSS")}


def copy_s(source: Path, target: Path) -> float:
    begin_s = time.monotonic()
    target.mkdir(parents=True)
    for path in source.iterdir():
        shutil.copyfile(path, target / path.name)
        record_of(target / path.name)
    sync_tree(target)
    return time.monotonic() - begin_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=1.5)
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="away-") as folder:
        there, here = Path(folder) / "there", Path(folder) / "here"
        request = make_folder(there, arguments.gb)
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        node = cluster.add_node(num_cpus=1)
        ray.init(cluster.address, log_to_driver=False)
        on = {"scheduling_strategy": NodeAffinitySchedulingStrategy(node.node_id, soft=False)}
        host: Any = SimpleNamespace()
        with start_server(Path(folder) / "redis", durable=True) as redis:
            actor = ray.remote(num_cpus=0)(Sender).options(**on).remote(str(there), redis.url)
            host._seats = {"far": Seat(Machine("far", "far", 1, 0), actor, ())}
            for repetition in range(arguments.repetitions):
                root = here / str(repetition)
                connection = RedisConnection(redis.url, "head")
                head = Head(connection, PREFIX, root, lambda *piece: RayHost._fetch(host, *piece))
                head.begin()
                before, cpu = memory_bytes(), resource.getrusage(resource.RUSAGE_SELF)
                Path("/proc/self/clear_refs").write_text("5")
                waiting = trainer.options(**on).remote(redis.url, msgspec.msgpack.encode(request))
                while not ray.wait([waiting], timeout=0.05)[0]:
                    head.take_all()
                after, used = memory_bytes(), resource.getrusage(resource.RUSAGE_SELF)
                head.close()
                send_s = ray.get(waiting)
                host._session = SimpleNamespace(run=SimpleNamespace(root=root))
                begin_s = time.monotonic()
                RayHost._send_folder(host, host._seats["far"], root / "checkpoints" / "step_00000001")
                resume_s = time.monotonic() - begin_s
                size = sum(record.size for record in request.files.values())
                print(
                    json.dumps(
                        {
                            "gb": round(size / 1e9, 2),
                            "send_s": round(send_s, 2),
                            "gb_per_s": round(size / 1e9 / send_s, 2),
                            "resume_s": round(resume_s, 2),
                            "launcher_cpu_s": round(used.ru_utime + used.ru_stime - cpu.ru_utime - cpu.ru_stime, 2),
                            "launcher_peak_mb": round((after["VmHWM"] - before["VmRSS"]) / 1e6),
                            "copy_s": round(copy_s(there / FOLDER, here / f"copy-{repetition}"), 2),
                            **common.machine(),
                        }
                    ),
                    flush=True,
                )
                shutil.rmtree(here)
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
