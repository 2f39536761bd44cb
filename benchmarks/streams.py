"""The cost of passing groups through a stream: in memory, in files, and in Redis.

    OMP_NUM_THREADS=1 python -m benchmarks.streams

Two kinds of group: `short` is the demo's (K = 16 attempts of some 36 tokens), `long` has K = 8 of 2000 tokens. `write`
and `read` are the time per group at each end, including JSON (memory has none). `groups/s` and `MB/s` (of JSON) are the
throughput of one process that does both. `commit` happens every 64 groups here, and with each checkpoint in a run; only
files are synced to disk. `latency` is from the call that writes a group to the return of the call that reads it, in
another process that polls every 0.2 ms; in memory it is the same process. Redis is started for the benchmark, on a socket
file, without persistence. Files are in the temporary directory.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import common
from benchmarks.common import Record
from pipelinerl.stream.files import FileStore, FileStreamWriter
from pipelinerl.stream.memory import MemoryStream
from pipelinerl.stream.redis import RedisStore, RedisStreamReader, RedisStreamWriter
from pipelinerl.stream.redis_server import start_server
from pipelinerl.types import Completion, Group, Problem, Rollout, Turn, spans_from_versions

SHAPES = {"short": (16, 36), "long": (8, 2000)}
"""Attempts of a group, and mean tokens of each."""
CAPACITY = 64
LOOK_EVERY_S = 0.0002
PATIENCE_S = 60.0


def make_group(shape: str, index: int) -> Group:
    """A group of random numbers with realistic sizes and precision. Weights change once in each completion."""
    attempts, mean_tokens = SHAPES[shape]
    rng = random.Random(f"{shape}/{index}")
    prompt = tuple(rng.randrange(50_000) for _ in range(24))

    def rollout(attempt: int) -> Rollout:
        tokens = rng.randint(mean_tokens // 2, mean_tokens * 3 // 2)
        completion = Completion(
            request_id=f"{index}-{attempt}",
            token_ids=tuple(rng.randrange(50_000) for _ in range(tokens)),
            logprobs=tuple(-rng.expovariate(2.0) for _ in range(tokens)),
            weight_versions=spans_from_versions([7] * (tokens // 2) + [8] * (tokens - tokens // 2)),
            finish_reason="stop",
        )
        turn = Turn(prompt_ids=prompt, completion=completion, text="word " * tokens)
        return Rollout(turns=(turn,), reward=rng.random(), id=f"{index}-{attempt}", attempt=attempt)

    problem = Problem(id=f"problem-{index}", payload={})
    return Group(index=index, problem=problem, rollouts=tuple(map(rollout, range(attempts))), started=attempts)


def both_ends(kind: str, place: str) -> tuple[Any, Any]:
    if kind == "memory":
        stream = MemoryStream[Group](capacity=CAPACITY)
        return stream, stream
    return writing_end(kind, place), reading_end(kind, place)


def writing_end(kind: str, place: str) -> Any:
    if kind == "files":
        return FileStreamWriter(Path(place), Group, capacity=CAPACITY)
    return RedisStreamWriter(place, "benchmark", Group, capacity=CAPACITY)


def reading_end(kind: str, place: str) -> Any:
    if kind == "files":
        return FileStore(Path(place)).reader("", Group)
    return RedisStreamReader(place, "benchmark", Group)


def costs(ends: tuple[Any, Any], groups: list[Group]) -> Record:
    """Seconds per group at each end. Repeatedly, `CAPACITY` groups are written, read one by one, and committed."""
    writer, reader = ends
    write_s = read_s = commit_s = 0.0
    for start in range(0, len(groups), CAPACITY):
        batch = groups[start : start + CAPACITY]
        begin_s = time.perf_counter()
        for group in batch:
            assert writer.try_write(group)
        written_s = time.perf_counter()
        for _ in batch:
            reader.read(1)
        taken_s = time.perf_counter()
        reader.commit(start + len(batch))
        write_s += written_s - begin_s
        read_s += taken_s - written_s
        commit_s += time.perf_counter() - taken_s
    commits = -(-len(groups) // CAPACITY)
    return {"write_s": write_s / len(groups), "read_s": read_s / len(groups), "commit_s": commit_s / commits}


def latencies(kind: str, place: str, groups: list[Group], pause_s: float) -> list[float]:
    """Seconds from the beginning of a write to the end of the read, for each group, one every `pause_s`."""
    if kind == "memory":
        writer, reader = both_ends(kind, place)
        sent_s, received_s = [], []
        for group in groups:
            sent_s.append(time.monotonic())
            writer.try_write(group)
            reader.read(1)
            received_s.append(time.monotonic())
    else:
        command = [sys.executable, "-m", "benchmarks.streams", "--receive", kind, place, str(len(groups))]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as receiver:
            assert receiver.stdout is not None
            if receiver.stdout.readline() != "ready\n":
                raise SystemExit("the reading process did not start")
            writer = writing_end(kind, place)
            sent_s = []
            for group in groups:
                time.sleep(pause_s)
                sent_s.append(time.monotonic())
                while not writer.try_write(group):
                    time.sleep(LOOK_EVERY_S)
            received_s = json.loads(receiver.stdout.readline())
            writer.close()
    return [received - sent for sent, received in zip(sent_s, received_s, strict=True)]


def receive(kind: str, place: str, count: int) -> None:
    """The reading process: prints the time at which each group arrived."""
    reader = reading_end(kind, place)
    print("ready", flush=True)
    times: list[float] = []
    deadline_s = time.monotonic() + PATIENCE_S
    while len(times) < count:
        found = reader.read(1)
        times += [time.monotonic()] * len(found)
        if found:
            deadline_s = times[-1] + PATIENCE_S
        elif time.monotonic() > deadline_s:
            raise SystemExit(f"no group came for {PATIENCE_S:.0f} s")
        else:
            time.sleep(LOOK_EVERY_S)
    print(json.dumps(times), flush=True)


def measure(kind: str, redis_url: str, groups: list[Group], sent: int) -> Record:
    """All measurements of one kind of stream and one shape of group, once, on new streams."""
    with tempfile.TemporaryDirectory() as directory:
        places = [redis_url] * 2 if kind == "redis" else [f"{directory}/costs", f"{directory}/latency"]
        ends = both_ends(kind, places[0])
        measured = costs(ends, groups)
        for end in ends:
            end.close()
        if kind == "redis":
            RedisStore(redis_url).rewind("benchmark", Group, 0, keep=lambda _: False)
        waits_s = sorted(latencies(kind, places[1], groups[:sent], pause_s=0.005))
        if kind == "redis":
            RedisStore(redis_url).rewind("benchmark", Group, 0, keep=lambda _: False)
    p50_s, p99_s = waits_s[len(waits_s) // 2], waits_s[int(0.99 * (len(waits_s) - 1))]
    return {**measured, "latency_p50_s": p50_s, "latency_p99_s": p99_s}


def table_of(records: list[Record]) -> list[Record]:
    """A row for each shape and kind: medians of the repetitions."""
    rows = []
    for shape, system in dict.fromkeys((r["shape"], r["system"]) for r in records):
        chosen = [r for r in records if (r["shape"], r["system"]) == (shape, system)]

        def median(quantity: str, of: list[Record] = chosen) -> float:
            return float(common.spread([r[quantity] for r in of])["median"])

        row: Record = {"shape": shape, "kB": chosen[0]["json_bytes"] / 1e3, "stream": system}
        groups_per_s = 1 / (median("write_s") + median("read_s"))
        row |= {"groups/s": groups_per_s, "MB/s": groups_per_s * chosen[0]["json_bytes"] / 1e6}
        for part in ("write", "read", "commit", "latency_p50", "latency_p99"):
            row[f"{part.replace('_', ' ')} ms"] = 1e3 * median(f"{part}_s")
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--groups", type=int, default=256, help="groups written and read in each repetition")
    parser.add_argument("--sent", type=int, default=128, help="number of these sent to another process one by one")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--results", type=Path, default=common.RESULTS)
    parser.add_argument("--receive", nargs=3, metavar=("KIND", "PLACE", "COUNT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.receive:
        kind, place, count = options.receive
        receive(kind, place, int(count))
        return
    machine_before = common.machine()
    records: list[Record] = []
    with tempfile.TemporaryDirectory() as directory, start_server(Path(directory)) as server:
        for shape in options.shapes:
            groups = [make_group(shape, index) for index in range(options.groups)]
            json_bytes = sum(len(msgspec.json.encode(group)) for group in groups) // len(groups)
            systems: dict[str, Callable[[], Record]] = {
                kind: partial(measure, kind, server.url, groups, options.sent) for kind in ("memory", "files", "redis")
            }
            scenario = {"shape": shape, "json_bytes": json_bytes}
            records += common.take_turns(systems, options.repetitions, scenario=scenario)
    common.write_results(
        "streams",
        settings=common.settings_of(options),
        machine_before=machine_before,
        records=records,
        table=table_of(records),
        directory=options.results,
    )


if __name__ == "__main__":
    main()
