"""The records of optimizer steps, sessions and engines' load, and what the rewards of a run's steps say.

Times are seconds. Every measured number is `float | None`: None means that there was nothing to measure (a step whose
samples all have zero gradient has no ESS) or that the number was not finite, which JSON cannot express.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from pipelinerl.errors import RunDirectoryError
from pipelinerl.files import JsonLines, Lines
from pipelinerl.metrics.evaluations import EvaluationRecord
from pipelinerl.metrics.statistics import flat_numbers
from pipelinerl.types import DroppedRollout, EngineProgress, WeightTransfer


class EngineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's status as read by the trainer at the end of a step; counters are over the session.

    `tokens_per_s` is the rate since the previous step, `update_pause_s` the latest pause for a weight update.
    """

    version: int
    in_progress: int
    tokens_generated: int
    tokens_per_s: float | None = None
    update_pause_s: float | None = None


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step. Batch statistics are over the rollouts (`samples`) or sampled tokens of that step alone.

    version                 version of the weights after the step (1 after the first step)
    time_s                  end of the step, since the run started; a resumed run continues from its last record
    samples                 rollouts in the step, including `samples_skipped` without gradient (advantage 0)
    tokens_trained          sampled and given tokens with a gradient; `tokens_context` counts the others of these rollouts
    tokens_forwarded        tokens that went through the model: what rollouts of a micro-batch share as a prefix counts once
    reward_mean             over the rollouts of the batch; `reward_std` is their standard deviation
    reward_read_mean        over these and the rollouts that were dropped at the trainer since the previous step. A filter by
                            reward, like `zero_advantage: drop`, changes `reward_mean`, but not this mean
    completion_length_*     sampled tokens per rollout of the batch, including skipped rollouts
    sampled_length_mean     the same over all rollouts that the actor delivered recently, trained on or not. If dropping
                            biases training to some lengths, this mean differs from completion_length_mean
    started_length_mean     the same in order of *start*: over the latest groups that started before the oldest unfinished
                            one. Not biased to short completions, which finish first; includes attempts that the actor
                            dropped
    length_lag_correlation  correlation, over the rollouts of the batch, of sampled tokens and lag of the oldest token
    ess                     effective sample size (sum w)^2 / (N sum w^2), in (0, 1]
    kl_behaviour_policy     KL(mu || pi) per token in nats: mean of log mu - log pi (the k1 estimate, unbiased, which can be
                            negative); `_k3`: mean of w - 1 - log w (k3, unbiased, of lower variance, never negative)
    lag_*                   optimizer steps between the weights that sampled a token and the weights being trained
    versions_in_batch       number of weight versions that sampled the batch; 1 if weights change between rounds only
    crossing_fraction       share of the rollouts whose tokens were sampled by more than one version
    masked_fraction         share of tokens that get no gradient from their advantage because of a mask or the loss's clip
    truncated_fraction      share of tokens whose importance weight was replaced by a limit
    weight_*                importance weights pi/mu before any limit
    log_product_sd          standard deviation over rollouts of log(product of pi/mu), the weight of `sequence: truncate`. It
                            grows with the root of the length, at lag 0 too; above 1, a few rollouts have most of the weight
    entropy_mean            mean entropy in nats of pi's distributions at the sampled tokens' positions
    on_policy_gap           largest |log pi - log mu| over tokens of lag 0. Zero up to numerics if engine and trainer agree,
                            except in sequences that span an update with kept KV entries
    gradient_cosine         cosine of the gradient and the previous step's, with `trainer.gradient_cosine`. Gradients of
                            fresh data are nearly orthogonal; staleness aligns them (GAC, arXiv 2603.01501)
    train_s, wait_s         time in the step, and time that the trainer waited for its data before the step
    publish_s               part of train_s: copying the weights for the engines. Includes waiting for the answers to the
                            previous update
    update                  the latest weight update that every engine has. It can be the previous step's: a broadcast
                            goes on during the next step
    saving_s                time to write a checkpoint or a copy of the weights between the previous step and this one
    cpu_s                   CPU seconds of the training process (rank 0, all its threads) since the previous step, by what
                            they were spent on: `step` (forward, backward, optimizer), `publish` and `saving` as above, and
                            `other`: reading and preparing rollouts, records, waiting
    packing_efficiency      tokens / (rows x row length) over the step's micro-batches
    queued                  rollouts queued at the trainer after the step
    dropped                 rollouts dropped at the trainer so far, by reason
    actor_dropped           rollouts dropped by the actors in this session, by reason; `actor_dropped_tokens` counts their
                            sampled tokens
    ess_guard_trips         batches rejected so far because of their ESS
    metrics                 means of the rollouts' metrics by name; `metric_counts`: number of rollouts that have each
    """

    version: int
    time_s: float
    samples: int
    samples_skipped: int = 0
    tokens_trained: int = 0
    tokens_context: int = 0
    tokens_forwarded: int = 0
    loss: float | None = None
    reward_mean: float | None = None
    reward_read_mean: float | None = None
    reward_std: float | None = None
    completion_length_mean: float | None = None
    completion_length_max: int | None = None
    sampled_length_mean: float | None = None
    started_length_mean: float | None = None
    length_lag_correlation: float | None = None
    ess: float | None = None
    kl_behaviour_policy: float | None = None
    kl_behaviour_policy_k3: float | None = None
    lag_mean: float | None = None
    lag_max: int | None = None
    lag_p50: int | None = None
    lag_p99: int | None = None
    versions_in_batch: int | None = None
    crossing_fraction: float | None = None
    masked_fraction: float | None = None
    truncated_fraction: float | None = None
    log_product_sd: float | None = None
    entropy_mean: float | None = None
    weight_mean: float | None = None
    weight_max: float | None = None
    on_policy_gap: float | None = None
    grad_norm: float | None = None
    gradient_cosine: float | None = None
    learning_rate: float | None = None
    train_s: float = 0.0
    wait_s: float = 0.0
    publish_s: float = 0.0
    update: WeightTransfer | None = None
    saving_s: float = 0.0
    cpu_s: dict[str, float] = {}
    micro_batches: int = 0
    packing_efficiency: float | None = None
    queued: int = 0
    dropped: dict[str, int] = {}
    actor_dropped: dict[str, int] = {}
    actor_dropped_tokens: dict[str, int] = {}
    ess_guard_trips: int = 0
    engine: EngineRecord | None = None
    metrics: dict[str, float] = {}
    metric_counts: dict[str, int] = {}

    @property
    def reward(self) -> float | None:
        """`reward_read_mean`, or in records of older versions `reward_mean`."""
        return self.reward_mean if self.reward_read_mean is None else self.reward_read_mean

    def numbers(self) -> dict[str, float]:
        """All finite numbers by field name; nested names are `engine/version`, `dropped/stale`, `metrics/words/reward`."""
        return flat_numbers(msgspec.to_builtins(self))


Record = StepRecord | EvaluationRecord
"""What trackers, callbacks and `StartedRun` get."""

# ---- a collapse


PATIENCE = 20
"""Steps in a row at the floor that are a collapse."""
_SMOOTHED = 5


class CollapseWatch:
    """Observes the steps of a run in order. `note` is a sentence about the latest collapse; None if there was none.

    A step is at the floor if all of its rewards are equal, none of the run's mean rewards was lower, and the best mean of 5
    steps in a row was higher by more than half of the largest standard deviation in a batch. The last condition leaves out
    runs that have only ever had a lucky answer.
    """

    def __init__(self) -> None:
        self.note: str | None = None
        self._floor, self._best, self._spread = math.inf, -math.inf, 0.0
        self._latest: deque[float] = deque(maxlen=_SMOOTHED)
        self._began: int | None = None

    @property
    def now(self) -> str:
        """`note` while the run is at its floor, else empty."""
        return self.note or "" if self._began is not None else ""

    def observe(self, step: StepRecord) -> None:
        reward = step.reward
        if reward is None:
            return
        self._floor = min(self._floor, reward)
        self._spread = max(self._spread, step.reward_std or 0.0)
        self._latest.append(reward)
        if len(self._latest) == _SMOOTHED:
            self._best = max(self._best, fmean(self._latest))
        fallen = reward == self._floor and step.reward_std == 0 and self._best - self._floor > self._spread / 2
        if not fallen:
            if self.note is not None and self._began is not None:
                self.note = self.note.replace(f"since step {self._began}", f"in steps {self._began} to {step.version - 1}")
            self._began = None
            return
        self._began = step.version if self._began is None else self._began
        if step.version - self._began + 1 == PATIENCE:
            self.note = (
                f"every rollout has had the lowest reward, {reward:.3g}, since step {self._began}; the best {_SMOOTHED} "
                f"steps had a mean of {self._best:.3g}. Such a model learns nothing any more: go back to an earlier "
                "checkpoint, with a lower trainer.learning_rate"
            )


def collapse_of(steps: Iterable[StepRecord]) -> str | None:
    """The `note` of a whole run."""
    watch = CollapseWatch()
    for step in steps:
        watch.observe(step)
    return watch.note


# ---- sessions, for a replay


FORMAT = 1
"""Version of the records that a replay reads: those of sessions, steps, rollouts and published weights together."""


class Computer(msgspec.Struct, frozen=True, kw_only=True):
    """What bits may depend on besides the records. `instructions`: the vector instructions that torch uses."""

    processor: str
    instructions: str
    packages: dict[str, str]


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One session of a run, from the weights of `version` on.

    `config` is the session's configuration without secrets, `threads` the trainer's CPU threads, and `rng` the state of
    torch's generators before the first step. If a later session begins at the same version or an earlier one, the steps of
    this one from there on do not count. `rollouts_bytes` and `trained_bytes` are the sizes of the files with these names
    before the session. `inputs`: checksums of the environment's files.
    """

    version: int
    inputs: dict[str, str] = {}
    config: dict[str, Any]
    threads: int
    machine: Computer
    rng: dict[str, str]
    rollouts_bytes: int = 0
    trained_bytes: int = 0
    format: int = FORMAT


# ---- which rollouts were trained on, and which weights were published: `trained.jsonl` and `published.jsonl`


class TrainedSample(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout of a step: its number of sampled tokens, their smallest and largest lag, and its advantage.

    The digests are of what was trained on: `tokens_digest` of the token ids, which of them were sampled, and their versions;
    `logprobs_digest` of the behaviour log-probabilities; `advantages_digest`, if tokens have advantages of their own, whose
    mean is `advantage`. With them a replay finds a rollout whose record was changed.
    """

    id: str
    group_index: int
    tokens: int
    lag_min: int
    lag_max: int
    advantage: float = 0.0
    tokens_digest: str = ""
    logprobs_digest: str = ""
    advantages_digest: str = ""


class TrainedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step. `version`: the weights after it, and `samples` are in the order of the batch.

    `refused` are the batches that the ESS guard rejected since the previous record, `dropped` the rollouts that the trainer
    dropped since then. A resumed run repeats the steps after its checkpoint: if several lines have the same version, the
    last one counts.
    """

    version: int
    samples: tuple[TrainedSample, ...]
    refused: tuple[tuple[TrainedSample, ...], ...] = ()
    dropped: tuple[DroppedRollout, ...] = ()


class PublishedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `published.jsonl`: weights that the engines got. `digests`: the first 16 hex digits of each tensor's.

    A resumed run publishes the weights of its checkpoint again: if several lines have the same version, the last one counts.
    """

    version: int
    checksum: str
    digests: dict[str, str]


# ---- the timeline of each engine's load, one file for each generation process

LOAD_EVERY_S = 0.25
TIMELINE_STEM = "timeline-"


class TimelineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The load of one engine at `time_s`, on the axis of `StepRecord.time_s`; `tokens_generated` is over the session.

    `in_progress` sequences have a slot, `queued` requests wait for one. Includes requests of evaluations. `cpu_s` are the
    CPU seconds of the generation process so far (all its threads), of which weight updates took `update_cpu_s`.
    """

    worker: int
    time_s: float
    in_progress: int
    queued: int
    tokens_generated: int
    version: int
    cpu_s: float = 0.0
    update_cpu_s: float = 0.0


class TimelineWriter:
    """Writes `RUN_DIR/timeline-WORKER.jsonl`. Times are seconds since `origin_s` of `clock`."""

    def __init__(
        self,
        run_dir: Path,
        worker: int,
        origin_s: float,
        clock: Callable[[], float] = time.monotonic,
        lines: Callable[[Path], Lines] = JsonLines,
    ) -> None:
        self._lines = lines(run_dir / f"{TIMELINE_STEM}{worker}.jsonl")
        self._worker, self._origin_s, self._clock = worker, origin_s, clock
        self._due_s = clock()

    def note(self, progress: Callable[[], EngineProgress]) -> None:
        """Write a record if the last one is `LOAD_EVERY_S` old; `progress` is called only then. Raises RunDirectoryError."""
        now_s = self._clock()
        if now_s < self._due_s:
            return
        self._due_s = now_s + LOAD_EVERY_S
        current = progress()
        record = TimelineRecord(
            worker=self._worker,
            time_s=now_s - self._origin_s,
            in_progress=current.in_progress,
            queued=current.queued,
            tokens_generated=current.tokens_generated,
            version=current.version,
            cpu_s=time.process_time(),
            update_cpu_s=current.update_cpu_s,
        )
        try:
            self._lines.write(record)
        except OSError as error:
            why = error.strerror or error
            raise RunDirectoryError(f"can't write the timeline: {why}; free disk space and resume") from error

    def close(self) -> None:
        self._lines.close()
