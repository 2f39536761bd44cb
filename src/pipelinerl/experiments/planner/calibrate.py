"""Measures a machine for a run file: `measure_generation` in this process, `measure_training` in another.

    1. an actor generates the rollouts of one optimizer step: lengths, and data to train on
    2. a training process starts
    3. decode steps, prefill, weight updates and an actor at full load are measured while training runs
    4. the training process stops and reports the costs of its steps

Generation and training slow each other down even on separate cores, because they share caches and memory bandwidth. So they
are measured at the same time if the run file's schedule runs them at the same time. Otherwise step 4 comes before step 3.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import platform
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Self

import msgspec
import torch

from pipelinerl.config import config_to_yaml
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import PipelineRLError, UserError
from pipelinerl.experiments.planner.calibration import Calibration, DecodeCost, GenerationCost, Machine, TrainingCost
from pipelinerl.experiments.planner.lengths import LengthDistribution
from pipelinerl.experiments.planner.measure_generation import decode_costs, prefill_costs, prompt_tokens_mean, update_pause_s
from pipelinerl.experiments.planner.measure_training import ENOUGH, READY
from pipelinerl.experiments.planner.production import Generator, Production, load_generator, produce
from pipelinerl.experiments.planner.utilisation import Utilisation
from pipelinerl.launch.hosts.resources import plan_threads, side_by_side, thread_environment, usable_cores
from pipelinerl.schedule import make_schedule
from pipelinerl.types import Group

DECODE_SECONDS = 0.8
ACTOR_SECONDS = 8.0


def calibrate(config: RunConfig, report: Callable[[str], None] = lambda _: None) -> Calibration:
    """Measure this machine; takes about half a minute for the demo. `report` receives progress messages.

    Raises UserError for a mistake in the run file, and PipelineRLError if training can't be measured.
    """
    schedule = make_schedule(config)
    threads = plan_threads(config, schedule, usable_cores())
    together = side_by_side(config, schedule)
    machine = describe_machine(config.engine.device, max(threads))
    torch.set_num_threads(threads.generation)
    report("loading the model")
    generator = load_generator(config)
    with tempfile.TemporaryDirectory(prefix="pipelinerl-calibrate-") as name:
        folder = Path(name)
        report(f"generating {config.trainer.batch_size} rollouts")
        sampled = asyncio.run(produce(generator, folder / "first", seconds=0, rollouts=config.trainer.batch_size)).first
        report("starting the training process" if together else "measuring training")
        with TrainingProcess(config, folder / "first" / "stream", folder, threads.training) as training:
            training.wait(READY)
            if not together:
                training.wait(ENOUGH)
                training_cost = training.result()
            report("measuring generation")
            generation_cost = measure(
                generator, sampled, folder / "second", lambda: together and not training.has_printed(ENOUGH)
            )
            if together:
                training_cost = training.result()
    return Calibration(
        machine=machine,
        model=config.model.path,
        parameters=sum(parameter.numel() for parameter in generator.model.parameters()),
        slots=config.engine.slots,
        batch_size=config.trainer.batch_size,
        group_size=config.actor.group_size,
        processes=config.engine.processes,
        side_by_side=together,
        generation=msgspec.structs.replace(generation_cost, threads=threads.generation),
        training=training_cost,
        lengths=dict(sorted(Counter(_lengths(sampled)).items())),
        reward_mean=_mean_reward(sampled),
    )


def measure(generator: Generator, sampled: list[Group], folder: Path, keep_going: Callable[[], bool]) -> GenerationCost:
    """All costs of generation. The actor runs at least as long as `keep_going()`."""
    lengths = LengthDistribution.of_lengths(_lengths(sampled))
    prompt = prompt_tokens_mean(sampled)
    whole_prompt = max(1, round(prompt))
    decode = decode_costs(generator, lengths, whole_prompt, DECODE_SECONDS)
    fixed_s, token_s = prefill_costs(generator, whole_prompt)
    pause_s = update_pause_s(generator, lengths, whole_prompt)
    production = asyncio.run(
        produce(generator, folder, seconds=ACTOR_SECONDS, rollouts=generator.config.engine.slots, keep_going=keep_going)
    )
    return GenerationCost(
        threads=torch.get_num_threads(),
        decode=tuple(decode),
        context_mean=prompt + float((lengths.ages() * range(lengths.longest)).sum()),
        prefill_s=fixed_s,
        prefill_s_per_token=token_s,
        prompt_tokens_mean=prompt,
        rollout_overhead_s=rollout_overhead_s(production, decode),
        tokens_per_s=production.tokens / production.wall_s,
        update_pause_s=pause_s,
    )


def rollout_overhead_s(production: Production, decode: list[DecodeCost]) -> float:
    """An actor's time per rollout, less the time of its decode steps. Not below 0."""
    table = Utilisation(tuple(float(cost.active) for cost in decode), tuple(cost.step_s for cost in decode), "s")
    decoding_s = float(table.step_time([active for active in production.active if active]).sum())
    return max(0.0, production.wall_s - decoding_s) / production.rollouts


class TrainingProcess:
    """Runs `measure_training` in a process. Leaving the context kills the process if it is still running."""

    def __init__(self, config: RunConfig, stream: Path, folder: Path, threads: int) -> None:
        path = folder / "config.yaml"
        path.write_text(config_to_yaml(config), encoding="utf-8")
        self._errors = (folder / "training.log").open("w+", encoding="utf-8")
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter, this package
            [sys.executable, "-m", "pipelinerl.experiments.planner.measure_training", str(path), str(stream)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **thread_environment(threads)},
        )
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self._ended = False
        self._timeout_s = config.launch.startup_timeout_s
        threading.Thread(target=self._listen, daemon=True).start()

    def has_printed(self, word: str) -> bool:
        """Whether the process has printed `word`. Raises PipelineRLError if it ended without printing it."""
        if word not in self._lines and self._ended:
            self._raise()
        return word in self._lines

    def wait(self, word: str) -> None:
        """Wait for `word`. Raises PipelineRLError if the process ends first or exceeds `launch.startup_timeout_s`."""
        with self._changed:
            if not self._changed.wait_for(lambda: word in self._lines or self._ended, self._timeout_s):
                raise PipelineRLError(f"the training process did not print {word!r} within {self._timeout_s:.0f} s")
        self.has_printed(word)

    def result(self) -> TrainingCost:
        """Stop the process and return what it measured. Raises PipelineRLError."""
        assert self._process.stdin is not None  # noqa: S101 - a pipe, see above
        self._process.stdin.close()
        with self._changed:
            if not self._changed.wait_for(lambda: self._ended, self._timeout_s):
                raise PipelineRLError(f"the training process did not end within {self._timeout_s:.0f} s")
        if self._process.wait() != 0 or not self._lines:
            self._raise()
        return msgspec.json.decode(self._lines[-1], type=TrainingCost)

    def _listen(self) -> None:
        assert self._process.stdout is not None  # noqa: S101 - a pipe, see above
        for line in self._process.stdout:
            with self._changed:
                self._lines.append(line.strip())
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _raise(self) -> None:
        status = self._process.wait()
        self._errors.seek(0)
        last = next((line for line in reversed(self._errors.read().splitlines()) if line.strip()), "no output")
        kind = UserError if status == UserError.exit_status else PipelineRLError
        raise kind(f"training could not be measured (exit status {status}): {last.removeprefix('error: ')}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._errors.close()


def describe_machine(device: str, threads: int) -> Machine:
    """This machine, for engines on `device` and processes of up to `threads` threads."""
    gpu = device.startswith("cuda")
    return Machine(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        processor=torch.cuda.get_device_name(device) if gpu else _processor(),
        cores=usable_cores(),
        accelerators=torch.cuda.device_count() if gpu else max(1, usable_cores() // threads),
        torch=str(torch.__version__),
        load_average=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    )


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    names = information.read_text().splitlines() if information.is_file() else []
    found = next((line.partition(":")[2].strip() for line in names if line.startswith("model name")), "")
    return found or platform.processor() or platform.machine()


def _lengths(groups: list[Group]) -> list[int]:
    counts = [
        sum(len(turn.completion.token_ids) for turn in rollout.turns) for group in groups for rollout in group.rollouts
    ]
    return [count for count in counts if count]


def _mean_reward(groups: list[Group]) -> float:
    return fmean(rollout.reward for group in groups for rollout in group.rollouts)
