"""Measures the cost of an optimizer step, in a separate process, as training is in a run.

    python -m pipelinerl.experiments.planner.measure_training CONFIG.yaml STREAM_DIR MESSAGES

The process prepares the groups of a rollout stream, says `ready`, and trains on them repeatedly. After a few steps of each
size it says `enough` and continues, because generation is being measured at the same time. At SIGTERM it gives the result as
JSON and exits. What it says are lines of the file MESSAGES. With `trainer.ranks` above 1 it is rank 0.
"""

from __future__ import annotations

import itertools
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from pipelinerl.config.load import config_from_yaml
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import PipelineRLError, UserError
from pipelinerl.experiments.planner.calibration import ENOUGH, READY, TrainingCost
from pipelinerl.experiments.runs import rank_processes
from pipelinerl.launch.run import write_session
from pipelinerl.launch.session import Session, StartPlan
from pipelinerl.launch.stages.training import load_policy
from pipelinerl.preprocess.preprocessor import Preprocessor
from pipelinerl.resources.hardware import clock_of
from pipelinerl.run_directory import RunDirectory
from pipelinerl.schedule import make_schedule
from pipelinerl.status.board import MemoryBoard
from pipelinerl.stream.files import FileStream
from pipelinerl.trainer import Learner
from pipelinerl.types import Group, TrainingSample
from pipelinerl.weights.memory import MemoryWeightSender

MIN_STEPS = 3
SMALL = 4
"""Steps of B and of B / SMALL rollouts are measured. A line through both gives the fixed cost and the cost per token."""


class Step(NamedTuple):
    """One optimizer step: tokens that went through the model, and its duration."""

    tokens: int
    seconds: float


class PreparedSamples(NamedTuple):
    samples: list[TrainingSample]
    rollout_s: float


def main(arguments: Sequence[str]) -> int:
    config_path, stream, messages = map(Path, arguments)
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    with messages.open("a", buffering=1, encoding="utf-8") as file:

        def say(line: str) -> None:
            file.write(f"{line}\n")

        try:
            cost = _measure(config_path, stream, say, stopping.is_set)
        except PipelineRLError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_status
        say(msgspec.json.encode(cost).decode())
    return 0


def _measure(config_path: Path, stream: Path, say: Callable[[str], None], stop: Callable[[], bool]) -> TrainingCost:
    config = config_from_yaml(config_path.read_text(encoding="utf-8"))
    threads = torch.get_num_threads()
    prepared = prepare(config, stream)
    # Give every sample a gradient: otherwise a model that fails at every problem could not be measured.
    weighted = [msgspec.structs.replace(sample, advantage=sample.advantage or 1.0) for sample in prepared.samples]
    with learner_of(config, config_path.with_suffix("")) as learner:
        steps = take_steps(config, learner, weighted, say, stop, clock=_clock(config, threads))
    step_s, token_s = fit_steps(steps)
    return TrainingCost(
        threads=threads,
        step_s=step_s,
        token_s=token_s,
        used_share=used_tokens(config, prepared.samples) / sum(sample.length for sample in prepared.samples),
        rollout_s=prepared.rollout_s,
        ranks=config.trainer.ranks,
    )


def _clock(config: RunConfig, threads: int) -> Callable[[], float]:
    """`clock_of`; for ranks on CPUs the time that all threads of rank 0 compute, since some of them exchange tensors."""
    if config.trainer.ranks == 1 or config.trainer.device != "cpu":
        return clock_of(config.trainer.device)
    return lambda: time.process_time() / threads


def prepare(config: RunConfig, stream: Path) -> PreparedSamples:
    """All groups of the stream as samples, and the seconds per rollout. Raises UserError for fewer than B samples."""
    preprocessor = Preprocessor(config.preprocess)
    samples: list[TrainingSample] = []
    rollouts = 0
    clock = clock_of("cpu")
    begin_s = clock()
    with closing(FileStream(stream)) as reader:
        for _, json in reader.read(sys.maxsize):
            group = msgspec.json.decode(json, type=Group)
            samples += preprocessor.process(group).samples
            rollouts += len(group.rollouts)
    if len(samples) < config.trainer.batch_size:
        raise UserError(
            f"only {len(samples)} of {rollouts} rollouts can be trained on, and a step takes {config.trainer.batch_size}: "
            "preprocess.zero_advantage and preprocess.overlong drop the others; to calibrate, set them to skip and keep"
        )
    return PreparedSamples(samples, (clock() - begin_s) / rollouts)


@contextmanager
def learner_of(config: RunConfig, folder: Path) -> Iterator[Learner]:
    """The run's learner; files for other ranks are written to `folder`.

    The learning rate is negligible, because it trains on the same rollouts repeatedly.
    """
    changes = {"learning_rate": 1e-12, "ess_threshold": 0.0, "kl_coefficient": 0.0, "checkpoint_every": 0}
    launch = config.launch.model_copy(update={"kind": "processes"})
    changed = config.model_copy(update={"trainer": config.trainer.model_copy(update=changes), "launch": launch})
    run = RunDirectory(folder)
    run.make_folders()
    session = Session(changed, run, StartPlan(), make_schedule(changed), time.monotonic())
    write_session(session)
    with ExitStack() as stack:
        team = stack.enter_context(rank_processes(session, MemoryBoard())) if config.trainer.ranks > 1 else None
        yield load_policy(session, team).learner(changed)


def skips(config: RunConfig) -> bool:
    return config.preprocess.zero_advantage == "skip" and config.trainer.kl_coefficient == 0


def used_tokens(config: RunConfig, samples: Sequence[TrainingSample]) -> int:
    """The number of tokens of `samples` that go through the model."""
    return sum(sample.length for sample in samples if sample.advantage != 0 or not skips(config))


def take_steps(
    config: RunConfig,
    learner: Learner,
    samples: Sequence[TrainingSample],
    say: Callable[[str], None],
    stop: Callable[[], bool],
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Step]:
    """Alternate steps of B and of B / SMALL rollouts, publishing included, until `stop()` and enough steps of each."""
    sender = MemoryWeightSender()
    sizes = (config.trainer.batch_size, max(1, config.trainer.batch_size // SMALL))
    rollouts = itertools.cycle(samples)
    steps: list[Step] = []
    for number in itertools.count():
        batch = list(itertools.islice(rollouts, sizes[number % 2]))
        begin_s = clock()
        learner.step(batch, version=0)
        sender.send(number, learner.weights())
        steps.append(Step(used_tokens(config, batch), clock() - begin_s))
        measured = len(steps) - 2  # the first two warm up
        if number == 1:
            say(READY)
        if measured == 2 * MIN_STEPS:
            say(ENOUGH)
        if measured >= 2 * MIN_STEPS and stop():
            break
    return steps[2:]


def fit_steps(steps: Sequence[Step]) -> tuple[float, float]:
    """(fixed seconds per step, seconds per token) of the line through the median small and the median large step.

    Medians are robust to short disturbances of the machine. Neither result is below 0. Raises ValueError if no step used
    tokens.
    """
    tokens = np.array([step.tokens for step in steps], dtype=np.float64)
    seconds = np.array([step.seconds for step in steps], dtype=np.float64)
    if not tokens.size or tokens.max() == 0:
        raise ValueError("no step had tokens to train on")
    large = tokens > (tokens.min() + tokens.max()) / 2
    if not large.any() or large.all():
        return 0.0, float(median(seconds / tokens))
    (x0, y0), (x1, y1) = ((np.median(tokens[part]), np.median(seconds[part])) for part in (~large, large))
    slope = (y1 - y0) / (x1 - x0)
    if slope <= 0 or y1 - slope * x1 < 0:
        return 0.0, float(y1 / x1)
    return float(y1 - slope * x1), float(slope)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
