"""One optimizer step of a sharded trainer: processes with one thread each against one process with as many threads.

    python -m benchmarks.ranks --models demo models/smollm2-135m-instruct --ranks 2 --steps 5

Both take the same steps on the same samples. `publish_s`: the time to gather the weights (in one process, to read them).
`loss_error`: the relative difference of the first step's losses, which must agree to 1e-5.
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
from pathlib import Path

import torch

from benchmarks import common
from benchmarks.common import Record
from benchmarks.trainer import LOSS_TOLERANCE, make_samples
from pipelinerl.config.schema import ModelConfig, TrainerConfig
from pipelinerl.models.loading import load_model
from pipelinerl.trainer.sharding import ranks
from pipelinerl.trainer.sharding.learner import ShardedLearner, ShardedPolicy
from pipelinerl.trainer.step import Learner

KEY = "of the benchmark"


def measure(learner: Learner, vocabulary: int, options: argparse.Namespace) -> Record:
    """The first step warms up and is not timed."""
    samples = make_samples(options.samples, options.longest, options.prompt_tokens, vocabulary)
    losses, steps_s, publish_s = [], [], []
    for version in range(options.steps + 1):
        begin_s = time.perf_counter()
        losses.append(learner.step(samples, version).loss)
        steps_s.append(time.perf_counter() - begin_s)
        begin_s = time.perf_counter()
        learner.weights()
        publish_s.append(time.perf_counter() - begin_s)
    step_s = statistics.median(steps_s[1:])
    return {
        "step_s": step_s,
        "tokens_per_s": sum(sample.length for sample in samples) / step_s,
        "publish_s": statistics.median(publish_s[1:]),
        "loss": losses[0],
    }


def run_process(name: str, rank: int, size: int, port: int, options: argparse.Namespace) -> None:
    """One rank, or all of the work if `size` is 1. Rank 0 prints the measurements as a line of JSON."""
    torch.set_num_threads(options.ranks if size == 1 else 1)
    config, model = TrainerConfig(ranks=size, micro_batch_tokens=options.micro_batch_tokens), ModelConfig(path=name)
    if size == 1:
        whole = load_model(model)
        print(json.dumps(measure(Learner(whole, config, temperature=1.0), whole.config.vocab_size, options)))
        return
    meeting = socket.socket(fileno=port) if rank == 0 else ("127.0.0.1", port)
    with ranks.join(config, rank, meeting, KEY, start_s=600.0, stall_s=120.0) as team:
        policy = ShardedPolicy(model, config, team)
        learner = ShardedLearner(policy, config, temperature=1.0)
        if rank == 0:
            print(json.dumps(measure(learner, policy.model.config.vocab_size, options)))
            team.call("end")
        else:
            learner.follow()


def run_all(name: str, size: int, options: argparse.Namespace) -> Record:
    """Start `size` processes and return the measurements of the first."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        addresses = [listener.fileno(), *[listener.getsockname()[1]] * (size - 1)]
        numbers = {"samples", "longest", "prompt_tokens", "micro_batch_tokens", "steps", "ranks"}
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in vars(options).items() if key in numbers]
        threads = str(options.ranks if size == 1 else 1)
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.ranks", "--as", name, *map(str, (rank, size, address)), *flags],
                stdout=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": threads},
                text=True,
            )
            for rank, address in enumerate(addresses)
        ]
        outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("a process of the benchmark failed")
    return {"ranks": size, "threads": int(threads), **json.loads(outputs[0].splitlines()[-1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["demo"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--longest", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--micro-batch-tokens", type=int, default=1024)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    parser.add_argument("--as", dest="process", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process is not None:
        name, rank, size, port = options.process
        run_process(name, int(rank), int(size), int(port), options)
        return
    before, records = common.machine(), list[Record]()
    for name in options.models:
        systems = {
            f"{size} x {threads}": lambda name=name, size=size: run_all(name, size, options)
            for size, threads in ((1, options.ranks), (options.ranks, 1))
        }
        scenario = {"model": common.model_label(name)}
        found = common.take_turns(systems, options.repetitions, scenario=scenario, warm_up=False)
        expected = found[0]["loss"]
        for record in found:
            record["loss_error"] = abs(record["loss"] - expected) / abs(expected)
            if record["loss_error"] > LOSS_TOLERANCE:
                raise SystemExit(f"{record['system']} has another loss: {record['loss']}, not {expected}")
        records += found
    table = [
        {
            "model": common.model_label(name),
            "processes x threads": system,
            **{
                quantity: common.medians(records, quantity, model=common.model_label(name))[system]
                for quantity in ("step_s", "tokens_per_s", "publish_s")
            },
        }
        for name in options.models
        for system in dict.fromkeys(record["system"] for record in records)
    ]
    settings = {key: value for key, value in common.settings_of(options).items() if key != "process"}
    common.write_results(
        "ranks", settings=settings, machine_before=before, records=records, table=table, directory=options.out
    )


if __name__ == "__main__":
    main()
