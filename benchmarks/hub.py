"""The hub under load: workers that hand over groups as fast as asked, a reader, and the time that a grant takes.

    python -m benchmarks.hub --workers 64 --groups 2000 --kilobytes 60 --seconds 20

The workers are connections of a few processes, one more reads all groups, as a trainer does. Each worker asks for its next
group when it hands one over, so `grant` is what it would wait for without asking ahead. `cpu_share`: CPU time of the hub's
process over wall time. `longest_send`: the longest time that a hand-over took in its worker.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec

from benchmarks import common
from benchmarks.common import Record
from pipelinerl.hub import wire
from pipelinerl.hub.admission import AdmissionState
from pipelinerl.hub.client import HubClient
from pipelinerl.hub.hub import ROLLOUTS_FILE, Hub
from pipelinerl.hub.server import HubServer, WorkerKind
from pipelinerl.hub.stream import FileStream
from pipelinerl.schedule import PipelineSchedule
from pipelinerl.status.board import MemoryBoard

GROUP_SIZE = 16
PROCESSES = 4


class Worker:
    """One connection: it hands over a group when it is due, and asks for the next one."""

    def __init__(self, connected: socket.socket, first_s: float, every_s: float, line: bytes) -> None:
        self._client, self._line = HubClient(connected), line
        self._due_s, self._every_s = first_s, every_s
        self._asked_s, self._index = 0.0, -1
        self.grants_s: list[float] = []
        self.sends_s: list[float] = []
        self._total = 0
        self._client.handle(wire.Grant, self._on_grant)
        self._ask()

    def _on_grant(self, message: wire.Grant) -> None:
        self.grants_s.append(time.perf_counter() - self._asked_s)
        self._index = message.index

    def _ask(self) -> None:
        self._total += 1
        self._asked_s = time.perf_counter()
        self._client.send(wire.Ask(0, GROUP_SIZE, self._total))

    def step(self) -> None:
        self._client.take()
        now = time.perf_counter()
        if self._index >= 0 and now >= self._due_s:
            self._client.send(wire.HandOver(self._index, GROUP_SIZE, False, self._line))
            self.sends_s.append(time.perf_counter() - now)
            self._index, self._due_s = -1, self._due_s + self._every_s
            self._ask()

    def close(self) -> None:
        self._client.close()


def generate(fds: list[int], every_s: float, seconds: float, line: bytes, results: multiprocessing.Queue[bytes]) -> None:
    """Workers of one process, to the end."""
    begin_s = time.perf_counter()
    workers = [
        Worker(socket.socket(fileno=fd), begin_s + every_s * number / len(fds), every_s, line)
        for number, fd in enumerate(fds)
    ]
    while time.perf_counter() < begin_s + seconds:
        for worker in workers:
            worker.step()
        time.sleep(0.0005)
    for worker in workers:
        worker.close()
    grants = [grant_s for worker in workers for grant_s in worker.grants_s[1:]]
    results.put(msgspec.json.encode((grants, max(send_s for worker in workers for send_s in worker.sends_s))))


def read(fd: int, seconds: float, results: multiprocessing.Queue[bytes]) -> None:
    """A trainer's end: it takes groups, and commits now and then."""
    client = HubClient(socket.socket(fileno=fd))
    taken, offset, committed_s, items = 0, 0, time.perf_counter(), list[wire.Item]()
    client.handle(wire.Item, items.append)
    client.send(wire.Take(0, 64))
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        client.take()
        if items:
            taken, offset = taken + len(items), items[-1].offset
            items.clear()
            client.send(wire.Take(taken, 64))
        else:
            time.sleep(0.0005)
        if time.perf_counter() > committed_s + 2:
            committed_s = time.perf_counter()
            client.send(wire.Commit(offset + 1))
    client.close()
    results.put(msgspec.json.encode(taken))


def measure(workers: int, groups: int, kilobytes: int, seconds: float) -> Record:
    context = multiprocessing.get_context("fork")
    line = msgspec.json.encode({"text": "x" * (1000 * kilobytes)})
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        root = Path(folder)
        (root / "rollouts").mkdir()
        admission = AdmissionState(PipelineSchedule(256), processes=workers)
        admission.opened = True
        hub = Hub(admission, FileStream(root / "stream", root / ROLLOUTS_FILE), root, MemoryBoard())
        server = HubServer(hub)
        ends = [server.connect(WorkerKind(process=number)) for number in range(workers)]
        reader = server.connect(WorkerKind(reads="groups", follows=True))
        results: multiprocessing.Queue[bytes] = context.Queue()
        started = [
            context.Process(
                target=generate,
                args=([end.fileno() for end in ends[number::PROCESSES]], workers / groups, seconds, line, results),
            )
            for number in range(PROCESSES)
        ]
        started.append(context.Process(target=read, args=(reader.fileno(), seconds + 1, results)))
        for process in started:
            process.start()
        for end in (*ends, reader):
            end.close()
        stack.enter_context(server)  # its thread starts after the forks
        begin_s, cpu_s = time.perf_counter(), time.process_time()
        answers = [msgspec.json.decode(results.get()) for _ in started]
        wall_s, used_s = time.perf_counter() - begin_s, time.process_time() - cpu_s
        for process in started:
            process.join()
        assert server.failure is None, server.failure
        taken = next(answer for answer in answers if isinstance(answer, int))
        grants_s = sorted(grant_s for answer in answers if not isinstance(answer, int) for grant_s in answer[0])
        return {
            "groups_per_s": taken / wall_s,
            "mb_per_s": taken * kilobytes / wall_s / 1000,
            "cpu_share": used_s / wall_s,
            "grant_p50_ms": 1000 * statistics.median(grants_s),
            "grant_p99_ms": 1000 * grants_s[int(0.99 * len(grants_s))],
            "longest_send_ms": 1000 * max(answer[1] for answer in answers if not isinstance(answer, int)),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--groups", type=int, nargs="+", default=[100, 500, 2000], help="a second, over all workers")
    parser.add_argument("--kilobytes", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    before = common.machine()
    systems = {
        f"{groups} groups/s": lambda groups=groups: measure(options.workers, groups, options.kilobytes, options.seconds)
        for groups in options.groups
    }
    records = common.take_turns(systems, options.repetitions, scenario={"kB": options.kilobytes}, warm_up=False)
    quantities = [key for key in records[0] if key not in ("kB", "system", "repetition")]
    table = [
        {"asked": system, **{quantity: common.medians(records, quantity)[system] for quantity in quantities}}
        for system in systems
    ]
    settings = common.settings_of(options)
    common.write_results(
        "hub", settings=settings, machine_before=before, records=records, table=table, directory=options.out
    )


if __name__ == "__main__":
    main()
