"""The trainer stage: the training half of Algorithm 2, one iteration at a time.

stream ──groups──▶ SampleQueue ──B rollouts──▶ Learner.step ──▶ publish weights, record, checkpoint
                        ▲                          │
                        └── drop stale rollouts ◀──┘ ESS too low

consumes      groups from the rollout stream, only as many as the schedule needs for the next step
produces      weights for the engines, a StepRecord and a TrainedRecord per step, a PublishedRecord per update, checkpoints
waits for     rollouts, while the schedule does not allow a step with the queued ones
unblocked by  the actor, when it writes groups to the stream
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelinerl.checkpoint import (
    WEIGHTS_FOLDER,
    CheckpointState,
    QueuePosition,
    TrainerCounters,
)
from pipelinerl.config.schema import TrainerConfig
from pipelinerl.errors import CheckpointError, PolicyMismatchError
from pipelinerl.interfaces import Verdict, WeightSender
from pipelinerl.schedule import Schedule
from pipelinerl.trainer.probe import ProbeCheck
from pipelinerl.trainer.queue import SampleQueue
from pipelinerl.trainer.saving import rng_state, save_weights, write_checkpoint
from pipelinerl.trainer.status import TrainerOutput, TrainerStatus
from pipelinerl.trainer.step import Learner, StepResult
from pipelinerl.types import ENGINE, TrainerProgress, TrainingSample

POLL_S = 0.002


@dataclass(frozen=True, kw_only=True)
class CheckpointPlan:
    """Where checkpoints go, and what they contain in addition to the trainer's own state.

    `check` raises PipelineRLError if this process may not write any more.
    """

    directory: Path
    tokenizer: Any
    session: str = ""
    check: Callable[[], object] = lambda: None


class Trainer:
    """The trainer process of Algorithm 2: trains the model from `state` to `config.steps` optimizer steps.

    If `stopped()` is true at the end of a step, that step is the last one.

    `state` is of a checkpoint whose weights, optimizer and random numbers have been restored; by default it is a fresh
    run's. `queue` must continue from its positions and counters. `checksum`: of these weights, if the run has published
    them before. Without `checkpoints`, none are written.
    """

    def __init__(
        self,
        config: TrainerConfig,
        learner: Learner,
        queue: SampleQueue,
        schedule: Schedule,
        sender: WeightSender,
        *,
        output: TrainerOutput,
        checkpoints: CheckpointPlan | None = None,
        state: CheckpointState | None = None,
        checksum: str | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        state = state or CheckpointState(version=0)
        self._config, self._learner, self._queue, self._schedule = config, learner, queue, schedule
        self._sender = sender
        self._probe = ProbeCheck(learner.model, learner.logits)
        self._checkpoints = checkpoints
        self._status = TrainerStatus(output, self._progress)
        self._version, self._stopped, self._last_step = state.version, stopped, False
        self._published_before = {state.version: checksum} if checksum else {}
        self._saved_version = state.version if state.version else -1
        self._published_version = -1
        self._micro_batches = state.counters.micro_batches
        self._tokens_trained = state.counters.tokens_trained
        self._ess_guard_trips = state.counters.ess_guard_trips
        self._finishing = ThreadPoolExecutor(1, "checkpoint")
        # The version and queue position of a checkpoint whose files are on their way to the disk.
        self._unfinished: tuple[int, QueuePosition, Future[Path]] | None = None
        self._drop_stale()

    @property
    def version(self) -> int:
        """Number of optimizer steps that produced the model's weights."""
        return self._version

    @property
    def goal_reached(self) -> bool:
        return self._version >= self._config.steps or self._last_step

    def run(self, stop: Callable[[], bool]) -> None:
        """Call `start`, then `pump` until the goal is reached or `stop()` returns true, then `finish`.

        The first step waits until all engines have weights. In a resumed run the stream may have a batch while engines still
        load their models, and a second update would wait for them in silence.
        """
        self.start()
        ready = False
        while not self.goal_reached and not stop():
            ready = ready or self._engines_have_weights()
            if not ready or not self.pump():
                time.sleep(POLL_S)
        self.finish()

    def _engines_have_weights(self) -> bool:
        """Whether all engines have the first weights; if not, report that the trainer waits. Raises WeightUpdateError."""
        self._sender.receipts()
        if self._sender.transfer is not None and not self._sender.unanswered():
            return True
        self._status.report_wait(Verdict(False, "the engines take their first weights", (ENGINE,)))
        return False

    def start(self) -> None:
        """Publish the current weights, which engines need before they can generate."""
        self._status.report("working", f"publishing the weights of version {self._version}", now=True)
        self._publish()

    def pump(self) -> bool:
        """One iteration: read groups, then take a step if the schedule allows it. Returns False if there was nothing to do.

        Raises WeightUpdateError if an engine failed to apply weights, PolicyMismatchError, TrainingDivergedError,
        CheckpointError, and errors of reading and preparing groups.
        """
        self._sender.receipts()
        self._probe.check(self._status.probe_readings())
        if self.goal_reached:
            return False
        self._status.begin()
        read, verdict = self._read_groups()
        if verdict.allowed:
            self._train(self._queue.take(self._config.batch_size))
            return True
        if read:
            self._status.count_as_busy()
        self._status.report_wait(verdict)
        return read

    def _train(self, samples: list[TrainingSample]) -> None:
        """One optimizer step and the update of the engines, or the ESS guard."""
        self._status.begin_session()
        self._status.report("working", f"step {self._version + 1} on {len(samples)} rollouts")
        result = self._learner.step(samples, self._version, self._on_micro_batch)
        if not result.stepped:
            self._reject_batch(samples, result)
            return
        self._queue.mark_trained(samples)
        self._version += 1
        self._last_step = self._stopped()
        self._tokens_trained += result.tokens_trained
        self._drop_stale()
        if self._schedule.publishes(self._version) or self.goal_reached:  # the evaluation after training needs the last ones
            self._publish()
        self._status.record(
            samples,
            result,
            self._queue,
            version=self._version,
            update=self._sender.transfer,
            ess_guard_trips=self._ess_guard_trips,
        )
        self._save()
        self._status.report("working", f"step {self._version} is done", now=True)

    def _read_groups(self) -> tuple[bool, Verdict]:
        """Read groups until the schedule allows a step or none are left. Returns whether any was read, and the verdict."""
        read = False
        verdict = self._schedule.may_train(self._version, self._queue.queued)
        while not verdict.allowed and self._queue.pull():
            read = True
            self._status.report("working", f"preparing rollouts, {self._queue.queued} are ready")
            verdict = self._schedule.may_train(self._version, self._queue.queued)
        return read, verdict

    def _reject_batch(self, samples: list[TrainingSample], result: StepResult) -> None:
        """The ESS guard (Algorithm 2): drop the batch, and all off-policy rollouts until a batch has been trained on.

        Raises PolicyMismatchError if the batch was on-policy, since waiting for other data would not help.
        """
        self._ess_guard_trips += 1
        self._status.refused(samples)
        self._queue.drop(samples, "ess_guard")
        self._queue.require(self._version, "ess_guard")
        # Published at once, so that the actor can start new groups.
        self._status.report("working", "a batch was rejected: its ESS is too low", now=True)
        metrics = result.metrics
        if metrics is not None and metrics.lag_max == 0:
            raise PolicyMismatchError(
                f"ESS is {metrics.ess:.3f}, below trainer.ess_threshold {self._config.ess_threshold}, for tokens sampled by "
                f"the weights being trained (version {self._version}): engine and trainer differ in log-probabilities "
                f"by up to {metrics.on_policy_gap:.3g}; check that both run the same model and dtype"
            )
        self._status.count_as_busy()

    def _drop_stale(self) -> None:
        self._queue.require(self._schedule.oldest_trained(self._version), self._schedule.too_old_reason)

    def _publish(self) -> None:
        self._probe.expect(self._version)
        with self._status.publishing():
            checksum = self._sender.send(self._version, self._learner.weights())
        if checksum and checksum != self._published_before.pop(self._version, checksum):
            raise CheckpointError(
                f"the checkpoint of version {self._version} was changed: the run has published other weights as this one; "
                "delete it to resume from the one before"
            )
        if checksum:  # otherwise the run is ending
            self._status.published(self._version, checksum, self._sender.digests)
        self._published_version = self._version

    # ---- checkpoints and the end of the run

    def _save(self) -> None:
        """Write a copy of the weights, a checkpoint, or both, if they are due."""
        if self._unfinished is not None and self._unfinished[2].done():
            self._finish_checkpoint()
        copy, checkpoint = (
            every and self._version % every == 0 for every in (self._config.weights_every, self._config.checkpoint_every)
        )
        if self._checkpoints is None or not (copy or checkpoint):
            return
        with self._status.saving():
            if copy:
                self._status.report("working", f"writing the weights of version {self._version}", now=True)
                plan = self._checkpoints
                save_weights(
                    plan.directory.parent / WEIGHTS_FOLDER,
                    version=self._version,
                    model=self._learner,
                    tokenizer=plan.tokenizer,
                    check=plan.check,
                )
            if checkpoint:
                self.checkpoint()

    def checkpoint(self) -> None:
        """Begin a checkpoint: its files are written, and another thread waits until they are on the disk.

        Without a checkpoint plan, do nothing. Raises CheckpointError, also for the previous one.
        """
        if self._checkpoints is None:
            return
        self._finish_checkpoint()
        self._status.report("working", f"writing the checkpoint of version {self._version}", now=True)
        position = self._queue.position()
        counters = TrainerCounters(
            queue=self._queue.counts,
            micro_batches=self._micro_batches,
            tokens_trained=self._tokens_trained,
            ess_guard_trips=self._ess_guard_trips,
        )
        finish = write_checkpoint(
            self._checkpoints.directory,
            CheckpointState(
                version=self._version,
                rng=rng_state(),
                positions=position,
                counters=counters,
                session=self._checkpoints.session,
            ),
            model=self._learner,
            tokenizer=self._checkpoints.tokenizer,
            optimizer=self._learner.save_optimizer,
            keep=self._config.keep_checkpoints,
            check=self._checkpoints.check,
        )
        self._unfinished = (self._version, position, self._finishing.submit(finish))

    def _finish_checkpoint(self) -> None:
        """Wait for the checkpoint that was begun, if any, then let the stream discard what is before it."""
        if self._unfinished is None:
            return
        (version, position, finished), self._unfinished = self._unfinished, None
        finished.result()
        self._saved_version = version
        self._queue.commit(position)

    def finish(self) -> None:
        """Write a final checkpoint, unless this version has one, and report that training is done."""
        if self.goal_reached:  # a session that began there has taken no step
            self._status.begin_session()
        self._finish_checkpoint()
        if self._saved_version != self._version:
            self.checkpoint()
            self._finish_checkpoint()
        reason = "all steps are taken" if self._version >= self._config.steps else "stopped"
        self._status.report("done", f"{reason} at version {self._version}", now=True)

    def fail(self, why: str) -> None:
        """Report that training failed, with final rollout counts. No checkpoint is written."""
        self._status.report("failed", why, now=True)

    def _on_micro_batch(self, done: int, total: int) -> None:
        self._micro_batches += 1
        self._status.report("working", f"step {self._version + 1}: micro-batch {done} of {total}")

    def _progress(self) -> TrainerProgress:
        return TrainerProgress(
            version=self._version,
            trained=self._queue.trained,
            dropped=self._queue.dropped,
            dropped_tokens=self._queue.counts.dropped_tokens,
            queued=self._queue.outstanding,
            steps_target=self._config.steps,
            micro_batches=self._micro_batches,
            tokens_trained=self._tokens_trained,
            published_version=self._published_version,
            goal_reached=self.goal_reached,
            probe_ids=self._probe.prompt_ids,
            runner=self._learner.runner,
        )
