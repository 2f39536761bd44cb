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

import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from pipelinerl.checkpoint import WEIGHTS_FOLDER, CheckpointState, QueuePosition
from pipelinerl.config.schema import TrainerConfig
from pipelinerl.errors import CheckpointError, PolicyMismatchError, WeightUpdateError
from pipelinerl.interfaces import Verdict, WeightSender
from pipelinerl.models.state import compute_dtype
from pipelinerl.schedule import Schedule
from pipelinerl.trainer.queue import SampleQueue
from pipelinerl.trainer.saving import rng_state, save_weights, write_checkpoint
from pipelinerl.trainer.status import TrainerOutput, TrainerStatus
from pipelinerl.trainer.step import Learner, StepResult
from pipelinerl.types import ENGINE, ProbeReading, Segment, TrainerProgress, TrainingSample

_log = logging.getLogger(__name__)

POLL_S = 0.01


class Trainer:
    """The trainer process of Algorithm 2: trains the model from `state` to `config.steps` optimizer steps.

    If `stopped()` is true at the end of a step, that step is the last one.

    `state` is of a checkpoint whose weights, optimizer and random numbers have been restored, or of a fresh run. `queue`
    must continue from its positions and counters. `checksum`: of these weights, if the run has published them before.
    `warm_start`: batches for supervised steps before a fresh run, and their learning rate.

    Checkpoints go to the folder `checkpoints`, with the `tokenizer`. `check` raises PipelineRLError if this process may not
    write any more.
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
        checkpoints: Path,
        tokenizer: Any,
        state: CheckpointState,
        stopped: Callable[[], bool],
        check: Callable[[], object] = lambda: None,
        checksum: str | None = None,
        warm_start: tuple[Iterable[Sequence[TrainingSample]], float] = ((), 0.0),
    ) -> None:
        self._config, self._learner, self._queue, self._schedule = config, learner, queue, schedule
        self._sender = sender
        self._probe = ProbeCheck(learner.model, learner.logits)
        self._checkpoints, self._tokenizer, self._check = checkpoints, tokenizer, check
        self._status = TrainerStatus(output, self._progress)
        self._version, self._stopped, self._last_step = state.version, stopped, False
        self._published_before = {state.version: checksum} if checksum else {}
        self._saved_version = state.version if state.version else -1
        self._published_version = -1
        self._counters = msgspec.structs.replace(state.counters)
        self._warm_start = warm_start
        self._refused: list[list[TrainingSample]] = []  # by the ESS guard, since the last step
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
        self._status.report("waiting", "the engines take their first weights", waits_for=(ENGINE,))
        return False

    def start(self) -> None:
        """Publish the current weights, which engines need before they can generate, after the warm start."""
        batches, rate = self._warm_start
        losses: list[float] = []
        for number, samples in enumerate(batches, 1):
            before = f", loss {losses[-1]:.4g} in the one before" if losses else ""
            self._status.report("working", f"warm start, step {number}{before}", now=True)
            losses.append(self._learner.step(samples, self._version, rate=rate).loss)
        if losses:
            self._learner.reset_optimizer()
            _log.warning("warm start: %d steps, loss %.4g at first, %.4g at last", len(losses), losses[0], losses[-1])
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
        self._status.report("waiting", verdict.waiting_for, waits_for=verdict.waits_for)
        return read

    def _train(self, samples: list[TrainingSample]) -> None:
        """One optimizer step and the update of the engines, or the ESS guard."""
        self._status.begin_session()
        self._status.report("working", f"step {self._version + 1} on {len(samples)} rollouts")
        with self._status.spending("step"):
            result = self._learner.step(samples, self._version, self._on_micro_batch)
        if not result.stepped:
            self._reject_batch(samples, result)
            return
        self._queue.mark_trained(samples)
        self._version += 1
        self._last_step = self._stopped()
        self._counters.tokens_trained += result.tokens_trained
        self._drop_stale()
        if self._schedule.publishes(self._version) or self.goal_reached:  # the evaluation after training needs the last ones
            self._publish()
        self._status.record(
            samples,
            result,
            self._queue,
            version=self._version,
            update=self._sender.transfer,
            ess_guard_trips=self._counters.ess_guard_trips,
            refused=self._refused,
        )
        self._refused.clear()
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
        self._counters.ess_guard_trips += 1
        self._refused.append(samples)
        self._queue.drop(samples, "ess_guard")
        self._queue.require(self._version, "ess_guard")
        # Published at once, so that the actor can start new groups.
        self._status.report("working", "a batch was rejected: its ESS is too low", now=True)
        metrics = result.metrics
        if metrics is not None and metrics["lag_max"] == 0:
            raise PolicyMismatchError(
                f"ESS is {metrics['ess']:.3f}, below trainer.ess_threshold {self._config.ess_threshold}, for tokens sampled "
                f"by the weights being trained (version {self._version}): engine and trainer differ in log-probabilities "
                f"by up to {metrics['on_policy_gap']:.3g}; check that both run the same model and dtype"
            )
        self._status.count_as_busy()

    def _drop_stale(self) -> None:
        self._queue.require(self._schedule.oldest_trained(self._version), self._schedule.too_old_reason)

    def _publish(self) -> None:
        self._probe.expect(self._version)
        with self._status.spending("publish"):
            checksum = self._sender.send(self._version, self._learner.weights(), self._learner.adapter())
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
        weights_every, checkpoint_every, version = self._config.weights_every, self._config.checkpoint_every, self._version
        if weights_every and version % weights_every == 0:
            with self._status.spending("saving"):
                self._status.report("working", f"writing the weights of version {version}", now=True)
                folder, saved = self._checkpoints.parent / WEIGHTS_FOLDER, self._learner
                save_weights(folder, version=version, model=saved, tokenizer=self._tokenizer, check=self._check)
        if checkpoint_every and version % checkpoint_every == 0:
            with self._status.spending("saving"):
                self.checkpoint()

    def checkpoint(self) -> None:
        """Begin a checkpoint: its files are written, and another thread waits until they are on the disk.

        Raises CheckpointError, also for the previous one.
        """
        self._finish_checkpoint()
        self._status.report("working", f"writing the checkpoint of version {self._version}", now=True)
        position = self._queue.position()
        counters = msgspec.structs.replace(self._counters, queue=self._queue.counts)
        finish = write_checkpoint(
            self._checkpoints,
            CheckpointState(version=self._version, rng=rng_state(), positions=position, counters=counters),
            model=self._learner,
            tokenizer=self._tokenizer,
            optimizer=self._learner.save_optimizer,
            keep=self._config.keep_checkpoints,
            check=self._check,
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
        self._counters.micro_batches += 1
        self._status.report("working", f"step {self._version + 1}: micro-batch {done} of {total}")

    def _progress(self) -> TrainerProgress:
        return TrainerProgress(
            version=self._version,
            trained=self._queue.trained,
            dropped=self._queue.dropped,
            dropped_tokens=self._queue.counts.dropped_tokens,
            queued=self._queue.outstanding,
            micro_batches=self._counters.micro_batches,
            tokens_trained=self._counters.tokens_trained,
            published_version=self._published_version,
            goal_reached=self.goal_reached,
            probe_ids=self._probe.prompt_ids,
            runner=self._learner.runner,
        )


# ---- Checks that engines use the weights they acknowledged, by their log-prob of a token


PROMPT_TOKENS = 16
VERSIONS_KEPT = 32
TOLERANCE = {torch.float32: 2e-3}
"""Largest allowed difference of log-probs, by dtype. In float32, two implementations differ by 1e-5 to 1e-4."""
COARSE_TOLERANCE = 0.3


class ProbeCheck:
    """Checks engines' probe readings against the trainer's model.

    For each of the latest published versions it keeps the log-probs [V] of the token after `prompt_ids`, so that engines may
    sample any token. `model` is the trainer's; `logits(segments)` are its logits [P, V] that predict the sampled tokens.
    """

    def __init__(self, model: Any, logits: Callable[[Sequence[Segment]], Tensor]) -> None:
        self._logits = logits
        vocabulary = int(model.get_input_embeddings().weight.shape[0])
        draw = random.Random(0)
        self.prompt_ids = tuple(draw.randrange(vocabulary) for _ in range(PROMPT_TOKENS))
        self._tolerance = TOLERANCE.get(compute_dtype(model), COARSE_TOLERANCE)
        self._expected: dict[int, Tensor] = {}
        self._checked: dict[str, int] = {}

    def expect(self, version: int) -> None:
        """Store the expected log-probs of `version`, whose weights the model must hold now."""
        segment = Segment(token_ids=(*self.prompt_ids, 0), sampled=((PROMPT_TOKENS, PROMPT_TOKENS + 1),))
        self._expected[version] = self._logits([segment])[0].float().log_softmax(-1).cpu()
        while len(self._expected) > VERSIONS_KEPT:
            del self._expected[min(self._expected)]

    def check(self, readings: Iterable[ProbeReading]) -> None:
        """Raise WeightUpdateError for a reading that does not match its version. Each reading is checked once."""
        for reading in readings:
            expected_V = self._expected.get(reading.version)
            if expected_V is None or reading.version <= self._checked.get(reading.engine, -1):
                continue
            self._checked[reading.engine] = reading.version
            ours = float(expected_V[reading.token_id])
            if not abs(reading.logprob - ours) <= self._tolerance:
                off = {
                    version: abs(reading.logprob - float(logprobs_V[reading.token_id]))
                    for version, logprobs_V in self._expected.items()
                }
                nearest = min(off, key=off.__getitem__)  # not the reading's own version, which is beyond the tolerance
                right = off[nearest] <= self._tolerance
                hint = (
                    f"version {nearest} would compute this value"
                    if right
                    else "check that both run the same model and dtype"
                )
                raise WeightUpdateError(
                    f"engine {reading.engine!r} acknowledged weights of version {reading.version}, but does not compute "
                    f"with them: its log-prob of token {reading.token_id} after a fixed prompt is {reading.logprob:.5f}, "
                    f"the trainer's {ours:.5f} (bound: {self._tolerance:g}); {hint}"
                )
