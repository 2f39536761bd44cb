"""Measures a machine for a run file: `measure_generation` in this process, `measure_training` in another.

    1. an actor generates the rollouts of one optimizer step: lengths, and data to train on
    2. a training process starts, and then the other generation processes of the run (`engine.processes`)
    3. decode steps, weight updates and an actor at full load are measured while all these run
    4. the training process stops and reports the costs of its steps

Processes slow each other down even on separate cores, because they share caches and memory bandwidth. So everything that
runs at the same time in the run is measured at the same time. Step 4 comes before the other generation processes and step 3
in two cases: the run's schedule alternates between generation and training, or generation yields to the trainer on shared
cores, and so computes mostly while the trainer waits.
On CPUs the times are those that a process computes (`clock_of`): other programs on the machine do not count.
"""

from __future__ import annotations

import asyncio
import datetime
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import torch

from pipelinerl.child import ChildProcess
from pipelinerl.config.load import config_to_yaml
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import PipelineRLError, UserError
from pipelinerl.experiments.planner.calibration import (
    ENOUGH,
    READY,
    Calibration,
    DecodeCost,
    GenerationCost,
    LengthDistribution,
    TrainingCost,
    Utilisation,
)
from pipelinerl.experiments.planner.measure_generation import (
    Generator,
    Production,
    decode_costs,
    load_generator,
    produce,
    prompt_tokens_mean,
    update_pause_s,
)
from pipelinerl.resources.hardware import load_average, this_machine
from pipelinerl.resources.share import plan_threads, process_environment, side_by_side, trainer_goes_first, usable_cores
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
    overlap, yields = side_by_side(config, schedule), trainer_goes_first(config, schedule, usable_cores())
    together = overlap and not yields
    date, load = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), load_average()
    torch.set_num_threads(threads.generation)
    report("loading the model")
    generator = load_generator(config)
    with tempfile.TemporaryDirectory(prefix="pipelinerl-calibrate-") as name:
        folder = Path(name)
        report(f"generating {config.trainer.batch_size} rollouts")
        sampled = asyncio.run(produce(generator, folder / "first", seconds=0, rollouts=config.trainer.batch_size)).first
        report("starting the training process" if together else "measuring training")
        with training_process(config, folder / "first" / "stream", folder, threads.training) as training:
            training.wait_for(READY)
            if not together:
                training.wait_for(ENOUGH)
                training_cost = training.result()
            report("measuring generation")
            with ExitStack() as stack:
                others = _other_generation_processes(config, folder, threads.generation)
                for other in [stack.enter_context(other) for other in others]:
                    other.wait_for(READY)
                generation_cost = measure(
                    generator, sampled, folder / "second", lambda: together and not training.has_said(ENOUGH)
                )
            if together:
                training_cost = training.result()
    return Calibration(
        machine=this_machine(config.engine.device),
        date=date,
        load_average=load,
        model=config.model.path,
        slots=config.engine.slots,
        batch_size=config.trainer.batch_size,
        group_size=config.actor.group_size,
        processes=config.engine.processes,
        side_by_side=overlap,
        generation_yields=yields,
        generation=generation_cost,
        training=training_cost,
        lengths=dict(sorted(Counter(_lengths(sampled)).items())),
    )


def measure(generator: Generator, sampled: list[Group], folder: Path, keep_going: Callable[[], bool]) -> GenerationCost:
    """All costs of generation. The actor runs at least as long as `keep_going()`."""
    lengths = LengthDistribution.of_lengths(_lengths(sampled))
    prompt = prompt_tokens_mean(sampled)
    whole_prompt = max(1, round(prompt))
    decode = decode_costs(generator, lengths, whole_prompt, DECODE_SECONDS)
    pause_s = update_pause_s(generator, lengths, whole_prompt)
    production = asyncio.run(
        produce(generator, folder, seconds=ACTOR_SECONDS, rollouts=generator.config.engine.slots, keep_going=keep_going)
    )
    return GenerationCost(
        threads=torch.get_num_threads(),
        decode=tuple(decode),
        prompt_tokens_mean=prompt,
        rollout_overhead_s=rollout_overhead_s(production, decode),
        tokens_per_s=production.tokens / production.busy_s,
        update_pause_s=pause_s,
    )


def rollout_overhead_s(production: Production, decode: list[DecodeCost]) -> float:
    """An actor's time per rollout, less the time of its decode steps. Not below 0."""
    table = Utilisation(tuple(float(cost.active) for cost in decode), tuple(cost.step_s for cost in decode))
    decoding_s = float(table.step_time([active for active in production.active if active]).sum())
    return max(0.0, production.busy_s - decoding_s) / production.rollouts


class MeasuringProcess(ChildProcess):
    """A process that computes for a measurement. Leaving the context kills it if it is still running.

    `module` is run with the run file, `source` and a file for what it says.
    """

    def __init__(self, module: str, config: RunConfig, source: Path, folder: Path, threads: int) -> None:
        self._name = module.rpartition("_")[2]
        path, self._messages = folder / f"{self._name}.yaml", folder / f"{self._name}.messages"
        path.write_text(config_to_yaml(config), encoding="utf-8")
        self._messages.touch()
        self._timeout_s = config.launch.startup_timeout_s
        super().__init__(
            [sys.executable, "-m", f"pipelinerl.experiments.planner.{module}", str(path), str(source), str(self._messages)],
            log=folder / f"{self._name}.log",
            environment=process_environment(self._name, threads),
        )

    def has_said(self, word: str) -> bool:
        """Whether the process has said `word`. Raises PipelineRLError if it ended without saying it."""
        ended = not self.running
        found = word in self._said()
        if ended and not found:
            raise self._error()
        return found

    def wait_for(self, word: str) -> None:
        """Wait for `word`. Raises PipelineRLError if the process ends first or exceeds `launch.startup_timeout_s`."""
        if not self.wait_until(lambda: self.has_said(word), self._timeout_s):
            raise PipelineRLError(f"the {self._name} process did not say {word!r} within {self._timeout_s:.0f} s")

    def result(self) -> TrainingCost:
        """Stop the training process and return what it measured. Raises PipelineRLError."""
        self.ask_to_stop()
        if not self.wait(self._timeout_s):
            raise PipelineRLError(f"the {self._name} process did not end within {self._timeout_s:.0f} s")
        if self.status != 0:
            raise self._error()
        return msgspec.json.decode(self._said()[-1], type=TrainingCost)

    def _said(self) -> list[str]:
        """The complete lines of its messages."""
        return self._messages.read_text(encoding="utf-8").split("\n")[:-1]

    def _error(self) -> PipelineRLError:
        last = next((line for line in reversed(self.log_lines()) if line.strip()), "no output")
        kind = UserError if self.status == UserError.exit_status else PipelineRLError
        return kind(f"{self._name} could not be measured (it {self.how_it_ended()}): {last.removeprefix('error: ')}")


def training_process(config: RunConfig, stream: Path, folder: Path, threads: int) -> MeasuringProcess:
    """`measure_training` in a process, on the groups of `stream`."""
    return MeasuringProcess("measure_training", config, stream, folder, threads)


def _other_generation_processes(config: RunConfig, folder: Path, threads: int) -> Iterator[MeasuringProcess]:
    """Start all but one of the run's generation processes, if they share this machine's cores."""
    for index in range(1, config.engine.processes if config.engine.device == "cpu" else 1):
        own = folder / f"generation-{index}"
        own.mkdir()
        yield MeasuringProcess("measure_generation", config, own / "produced", own, threads)


def _lengths(groups: list[Group]) -> list[int]:
    counts = [
        sum(len(turn.completion.token_ids) for turn in rollout.turns) for group in groups for rollout in group.rollouts
    ]
    return [count for count in counts if count]
