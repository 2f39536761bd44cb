"""Measures the cost of an optimizer step, in a separate process, as training is in a run.

    python -m pipelinerl.experiments.planner.measure_training CONFIG.yaml STREAM_DIR MESSAGES

The process prepares the groups of a rollout stream, says `ready`, and trains on them repeatedly. After a few steps of each
size it says `enough` and continues, because generation is being measured at the same time. At SIGTERM it gives the result as
JSON and exits. What it says are lines of the file MESSAGES.
"""

from __future__ import annotations

import itertools
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from pipelinerl.config.load import config_from_yaml
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import PipelineRLError, UserError
from pipelinerl.experiments.planner.calibration import TrainingCost
from pipelinerl.models.loading import load_model
from pipelinerl.models.lora import LoraModel
from pipelinerl.preprocess.packing import pack
from pipelinerl.preprocess.preprocessor import Preprocessor
from pipelinerl.stream.file_reader import FileStreamReader
from pipelinerl.trainer import Learner
from pipelinerl.types import Group, TrainingSample
from pipelinerl.weights.memory import MemoryChannel

READY, ENOUGH = "ready", "enough"
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
            cost = _measure(config_from_yaml(config_path.read_text(encoding="utf-8")), stream, say, stopping.is_set)
        except PipelineRLError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_status
        say(msgspec.json.encode(cost).decode())
    return 0


def _measure(config: RunConfig, stream: Path, say: Callable[[str], None], stop: Callable[[], bool]) -> TrainingCost:
    threads = torch.get_num_threads()
    prepared = prepare(config, stream)
    learner = make_learner(config)
    # Give every sample a gradient: otherwise a model that fails at every problem could not be measured.
    weighted = [msgspec.structs.replace(sample, advantage=sample.advantage or 1.0) for sample in prepared.samples]
    steps = take_steps(config, learner, weighted, say, stop)
    step_s, token_s = fit_steps(steps)
    return TrainingCost(
        threads=threads,
        step_s=step_s,
        token_s=token_s,
        used_share=used_tokens(config, prepared.samples) / sum(sample.length for sample in prepared.samples),
        rollout_s=prepared.rollout_s,
    )


def prepare(config: RunConfig, stream: Path) -> PreparedSamples:
    """All groups of the stream as samples, and the seconds per rollout. Raises UserError for fewer than B samples."""
    preprocessor = Preprocessor(config.preprocess)
    samples: list[TrainingSample] = []
    rollouts = 0
    begin_s = time.perf_counter()
    with closing(FileStreamReader(stream, Group)) as reader:
        for _, group in reader.read(sys.maxsize):
            samples += preprocessor.process(group).samples
            rollouts += len(group.rollouts)
    if len(samples) < config.trainer.batch_size:
        raise UserError(
            f"only {len(samples)} of {rollouts} rollouts can be trained on, and a step takes {config.trainer.batch_size}: "
            "preprocess.zero_advantage and preprocess.overlong drop the others; to calibrate, set them to skip and keep"
        )
    return PreparedSamples(samples, (time.perf_counter() - begin_s) / rollouts)


def make_learner(config: RunConfig) -> Learner:
    """The run's learner with a negligible learning rate, because it trains on the same rollouts repeatedly."""
    trainer = config.trainer.model_copy(update={"learning_rate": 1e-12, "ess_threshold": 0.0, "kl_coefficient": 0.0})
    model = load_model(config.model, config.trainer.device)
    lora = LoraModel(model, config.model.lora, seed=config.seed) if config.model.lora else None
    return Learner(
        model,
        trainer,
        temperature=config.actor.temperature,
        pack=pack,
        skip_zero_advantage=skips(config),
        lora=lora,
    )


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
) -> list[Step]:
    """Alternate steps of B and of B / SMALL rollouts, publishing included, until `stop()` and enough steps of each."""
    sender = MemoryChannel().sender
    sizes = (config.trainer.batch_size, max(1, config.trainer.batch_size // SMALL))
    rollouts = itertools.cycle(samples)
    steps: list[Step] = []
    for number in itertools.count():
        batch = list(itertools.islice(rollouts, sizes[number % 2]))
        begin_s = time.perf_counter()
        learner.step(batch, version=0)
        sender.send(number, learner.weights())
        steps.append(Step(used_tokens(config, batch), time.perf_counter() - begin_s))
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
