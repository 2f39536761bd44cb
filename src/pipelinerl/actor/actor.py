"""The actor: keeps the engine full of rollouts and writes finished groups to the stream.

    admission ─index─▶ group: K attempts ─▶ requests ─▶ engine ─▶ tokens ─▶ K outcomes ─▶ writer, rollouts.jsonl
    (schedule admits)                               ▲  one step an iteration
                                    receiver ─weights┘  (between two steps, if the schedule allows it)

consumes   group indices; weights
produces   groups, in the order in which they finish; the status of its two stages (engine, actor) on the status board
waits for  the trainer (lag bound, round, full stream) or an environment. It never blocks: it publishes the wait and returns.

A run may have several generation processes with one actor each. They are coordinated by `admission` only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean

import msgspec

from pipelinerl.actor.admission import Admission
from pipelinerl.actor.client import EngineClient, let_rollouts_run, rollout_of
from pipelinerl.actor.deadline import CodeAlarm, deadlines_work
from pipelinerl.actor.evaluation import (
    Evaluation,
    EvaluationPass,
    OnlineEvaluation,
    RecordSink,
    evaluate,
    held_out_problems,
    write_record,
)
from pipelinerl.actor.groups import GroupRunner
from pipelinerl.actor.outstanding import open_limit
from pipelinerl.actor.probe import WeightProbe
from pipelinerl.actor.rollouts import FailureLog, TimeLimits
from pipelinerl.config.schema import ActorConfig, EvaluationConfig
from pipelinerl.interfaces import Board, Engine, Environment, StreamWriter, Tokenizer, Verdict, WeightReceiver
from pipelinerl.metrics.timeline import TimelineWriter
from pipelinerl.schedule import ALLOWED
from pipelinerl.status.reporter import ALONE, GenerationStages, StatusReporter
from pipelinerl.types import (
    TRAINER,
    ActorProgress,
    EngineProgress,
    Group,
    Problem,
    SamplingParams,
    StageState,
    TrainerProgress,
)

logger = logging.getLogger(__name__)

RECENT_ROLLOUTS = 256
LONGEST_IDLE = 8
"""The sleep of an idle actor grows up to this multiple of `idle_s`, to leave the cores to other processes."""
STREAM_DROP = "stream_full"


class Actor:
    """The actor process of Algorithm 2. Each call of `iterate` runs one iteration in the caller's thread and event loop."""

    def __init__(
        self,
        *,
        environment: Environment,
        engine: Engine,
        tokenizer: Tokenizer,
        admission: Admission,
        writer: StreamWriter[Group],
        receiver: WeightReceiver,
        board: Board,
        records: RecordSink,
        config: ActorConfig,
        seed: int,
        slots: int,
        stop_token_ids: Sequence[int],
        stages: GenerationStages = ALONE,
        timeline: TimelineWriter | None = None,
        clock: Callable[[], float] = time.monotonic,
        idle_s: float = 0.002,
    ) -> None:
        """`admission` decides which groups to start and when. `slots` is the engine's H.

        `stages` are the names of engine and actor on the status board. `idle_s` is the sleep when there is nothing to do; it
        grows up to `LONGEST_IDLE` times as long while that lasts.
        """
        self._environment = environment
        self._engine = engine
        self._tokenizer = tokenizer
        self._admission = admission
        self._board = board
        self._writer = writer
        self._receiver = receiver
        self._records = records
        self._slots = slots
        self._max_open = open_limit(config.max_open_rollouts, slots, in_rounds=admission.in_rounds)
        self._clock = clock
        self._idle_s = idle_s
        self._idle_iterations = 0
        gives_up = config.max_failure_fraction < 1
        self._alarm = CodeAlarm(config.code_timeout_s, gives_up=gives_up, on_slow=self._publish_slow)
        self._limits = TimeLimits(config.rollout_timeout_s, self._alarm)
        self._sampling = SamplingParams(
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            stop_token_ids=tuple(stop_token_ids),
        )

        self._client = EngineClient(engine)
        self._probe = WeightProbe(engine, self._client, stages.engine)
        self._failures = FailureLog(config.max_failure_fraction, config.failure_window)
        self._groups = GroupRunner(
            environment,
            self._client,
            tokenizer,
            sampling=self._sampling,
            limits=self._limits,
            group_size=config.group_size,
            seed=seed,
            failures=self._failures,
        )
        self._stopping = False
        self._known_probe_ids: tuple[int, ...] = ()

        self._rollouts_handed_over = 0
        self._rollouts_cut = 0
        self._rollouts_dropped_by_stream = 0
        self._recent_rewards: deque[float] = deque(maxlen=RECENT_ROLLOUTS)
        self._evaluations: dict[str, float] = {}
        self._evaluated = 0
        self._online: OnlineEvaluation | None = None
        self._ready_since_s = clock()
        self._stages = stages
        self._engine_status = StatusReporter(board, stages.engine, clock)
        self._actor_status = StatusReporter(board, stages.actor, clock)
        self._timeline = timeline
        if not self.code_deadline:
            logger.warning(
                "actor.code_timeout_s has no effect here: code that never yields can be interrupted in the main thread of a "
                "POSIX process only"
            )

    @property
    def code_deadline(self) -> bool:
        """Whether environment code that does not yield is interrupted after `code_timeout_s`."""
        return deadlines_work()

    # ---- one iteration

    async def iterate(self) -> None:
        """Take new weights, start groups, run one engine step, hand over finished groups, report status.

        Raises TooManyFailuresError when too many rollouts fail, and any error of the engine, stream or weight receiver.
        """
        if not self._admission.opened:
            self._ready_since_s = self._clock()  # idle while another process runs the evaluation before training
        self._hand_over()
        self._take_weights()
        if self._probe.asked != self._engine.version:
            self._probe.ask(self._probe_ids)
        if self._online is not None and self._online.advance(self._engine.version):
            await let_rollouts_run(2)  # they submit their requests, which leave less room for groups
        started = self._groups.groups_started
        admission = self._start_groups()
        if self._groups.groups_started > started:
            await let_rollouts_run(2)  # one pass to begin, one to submit
        stepped = await self._client.step()
        for completion in self._client.take_cancelled():
            self._failures.cancelled(rollout_of(completion.request_id), len(completion.token_ids))
        self._groups.check()
        self._hand_over()
        self._report(admission, stepped)
        await self._idle(stepped)

    async def _idle(self, stepped: bool) -> None:
        """Sleep if no engine step was made. The sleep grows while no rollouts are running."""
        self._idle_iterations = 0 if stepped or self._running else self._idle_iterations + 1
        if not stepped:
            await asyncio.sleep(self._idle_s * min(max(1, self._idle_iterations), LONGEST_IDLE))

    def _take_weights(self) -> None:
        version = self._receiver.offered()
        if version is None or not self._admission.may_take(version).allowed:
            return
        update = self._receiver.poll()
        if update is not None:
            self._receiver.acknowledge(self._engine.update_weights(update))

    @property
    def _probe_ids(self) -> Sequence[int]:
        """The prompt of the weight probe, published by the trainer; empty until then."""
        if not self._known_probe_ids:
            trainer = self._board.read(TRAINER)
            if trainer is not None and isinstance(trainer.progress, TrainerProgress):
                self._known_probe_ids = trainer.progress.probe_ids
        return self._known_probe_ids

    def _start_groups(self) -> Verdict:
        """Start groups while the engine has room. Returns why no more were started, or an allowing verdict if it is full."""
        room = self._slots - self._engine.in_progress - self._engine.queued
        while room > 0:
            verdict = self._may_start()
            if not verdict.allowed:
                return verdict
            own, size = self._groups.in_progress, self._groups.group_size
            index, verdict = self._admission.claim(self._engine.version, own, size)
            if index is None:
                return verdict
            self._groups.start(index, self._engine.version)
            room -= size
        return ALLOWED

    def _may_start(self) -> Verdict:
        """Whether this actor's own state allows another group. `admission` decides over all actors."""
        if self._stopping:
            return Verdict(False, "nothing: it was told to stop")
        if self._groups.finished:
            return Verdict(False, f"the trainer: the stream is full ({self._writer.stats().pending} groups)", (TRAINER,))
        if self._max_open is not None and self._groups.running >= self._max_open:
            return Verdict(False, f"the environment: {self._groups.running} rollouts are open and request no tokens")
        return ALLOWED

    def _hand_over(self) -> None:
        """Write finished groups, oldest first, until the stream is full."""
        while self._groups.finished:
            group = self._groups.finished[0]
            version, started, rollouts = group.started_version, group.started, len(group.rollouts)
            if not self._admission.hand_over(version, started=started, rollouts=rollouts, write=self._write_oldest):
                return

    def _write_oldest(self) -> bool:
        """Write the oldest finished group. Called under the lock of `admission`, as other actors write the same files."""
        group = self._groups.finished[0]
        if not self._writer.try_write(group):
            return False
        self._groups.finished.popleft()
        self._rollouts_handed_over += len(group.rollouts)
        self._rollouts_cut += sum(rollout.turns[-1].completion.finish_reason == "length" for rollout in group.rollouts)
        self._recent_rewards.extend(rollout.reward for rollout in group.rollouts)
        write_record(self._records, group)
        return True

    def stream_dropped(self, rollouts: int) -> None:
        """Count `rollouts` as dropped: the stream replaced their group by a newer one (callback `on_drop`)."""
        self._admission.stream_dropped(rollouts)
        self._rollouts_dropped_by_stream += rollouts

    # ---- evaluation, end of the run, status

    async def evaluate(self, when: str, config: EvaluationConfig, records: RecordSink) -> Evaluation:
        """Evaluate on `config.problems` held-out problems, before the first iteration or after `finish`."""
        problems = held_out_problems(self._environment, config.problems)

        def report(done: int) -> None:
            self._evaluated = done
            self._record_timeline()
            self._publish(f"evaluates, {when} training: {done} of {len(problems)} held-out problems")

        evaluation_pass = self._evaluation_pass(problems, config, when)
        evaluation = await evaluate(evaluation_pass, self._client, slots=self._slots, records=records, on_progress=report)
        if evaluation.reward is not None:
            self._evaluations[when] = evaluation.reward
        self._actor_status.report("done" if self._stopping else "waiting", "", self._actor_progress)
        return evaluation

    def evaluate_online(
        self, config: EvaluationConfig, *, until: int, reached: int, on_done: Callable[[int, Evaluation], None]
    ) -> None:
        """Start evaluating between engine steps, every `config.every` versions (see `OnlineEvaluation`)."""
        problems = held_out_problems(self._environment, config.problems)
        latest = ""

        def done(version: int, evaluation: Evaluation) -> None:
            nonlocal latest
            self._evaluations.pop(latest, None)
            latest = f"v{version}"
            if evaluation.reward is not None:
                self._evaluations[latest] = evaluation.reward
            on_done(version, evaluation)

        if problems:
            self._online = OnlineEvaluation(
                lambda version: self._evaluation_pass(problems, config, f"v{version}"),
                every=config.every,
                until=until,
                slots=max(1, int(self._slots * config.share)),
                reached=reached,
                on_done=done,
            )

    def take_skipped(self) -> int:
        """Number of evaluations skipped since the last call."""
        if self._online is None:
            return 0
        skipped, self._online.skipped = self._online.skipped, 0
        return skipped

    def _evaluation_pass(self, problems: Sequence[Problem], config: EvaluationConfig, name: str) -> EvaluationPass:
        return EvaluationPass(
            self._environment,
            problems,
            client=self._client,
            tokenizer=self._tokenizer,
            sampling=msgspec.structs.replace(self._sampling, temperature=config.temperature, top_p=1.0, top_k=0),
            limits=self._limits,
            name=f"evaluation-{name}",
        )

    async def finish(self) -> None:
        """Stop starting groups and cancel running rollouts, which stay counted as in progress."""
        self._stopping = True
        self._groups.cancel()
        if self._online is not None:
            self._online.end()
        self._probe.cancel()
        await let_rollouts_run()  # they cancel their requests
        await self._client.step()  # the engine ends these requests
        self._hand_over()
        self._engine_status.report("done", "", self._engine_progress, now=True)
        self._actor_status.report("done", "", self._actor_progress, now=True)

    def _report(self, admission: Verdict, stepped: bool) -> None:
        self._record_timeline()
        if self._probe.unreported:  # publish at once, so that the trainer checks it soon
            self._probe.unreported = False
            self._engine_status.report(self._engine_state, "answered a weight probe", self._engine_progress, now=True)
        if not (self._actor_status.due("working" if stepped else "waiting") or self._engine_status.due(self._engine_state)):
            return
        if stepped:
            limit = "" if admission.allowed else f"; starts no more, waiting for {admission.waiting_for}"
            evaluates = f"; {self._online.status}" if self._online is not None and self._online.status else ""
            self._publish(f"{self._groups.running} rollouts running{limit}{evaluates}")
        elif self._running:
            self._publish("", Verdict(False, f"the environment: {self._running} rollouts run environment code"))
        else:
            self._publish("", admission if admission.waiting_for else Verdict(False, "its next iteration"))

    def _publish_slow(self, activity: str) -> None:
        """Publish which environment code blocks this thread. Called from the alarm's signal handler."""
        self._actor_status.report("working", activity, self._actor_progress)
        actor = self._stages.actor
        self._engine_status.report("waiting", f"the {actor}: {activity}", self._engine_progress, waits_for=(actor,))

    def _publish(self, activity: str, wait: Verdict = ALLOWED) -> None:
        """Publish the status of the actor (`activity`, or what it waits for if `wait` is a denial) and of the engine."""
        state: StageState = "working" if wait.allowed else "waiting"
        self._actor_status.report(state, wait.waiting_for or activity, self._actor_progress, waits_for=wait.waits_for)
        in_progress, actor = self._engine.in_progress, self._stages.actor
        detail = f"{in_progress} sequences in progress" if in_progress else f"requests from the {actor}"
        self._engine_status.report(
            self._engine_state, detail, self._engine_progress, waits_for=() if in_progress else (actor,)
        )

    @property
    def _running(self) -> int:
        """Rollouts that have not ended, including those of an evaluation."""
        return self._groups.running + (self._online.running if self._online is not None else 0)

    @property
    def _engine_state(self) -> StageState:
        return "working" if self._engine.in_progress else "waiting"

    def _record_timeline(self) -> None:
        if self._timeline is not None:
            self._timeline.note(self._engine.progress)

    def _engine_progress(self) -> EngineProgress:
        ready_s = self._clock() - self._ready_since_s
        progress = self._engine.progress()
        return msgspec.structs.replace(progress, slots=self._slots, ready_s=ready_s, probes=tuple(self._probe.readings))

    def _actor_progress(self) -> ActorProgress:
        dropped = self._failures.counts
        if self._rollouts_dropped_by_stream:
            dropped[STREAM_DROP] = self._rollouts_dropped_by_stream
        return ActorProgress(
            groups_started=self._groups.groups_started,
            rollouts_started=self._groups.groups_started * self._groups.group_size,
            rollouts_handed_over=self._rollouts_handed_over - self._rollouts_dropped_by_stream,
            rollouts_cut=self._rollouts_cut,
            rollouts_dropped=dropped,
            dropped_tokens=self._failures.tokens,
            rollouts_in_progress=self._groups.in_progress,
            started_length_mean=self._groups.started_length_mean,
            started_lengths=self._groups.started_lengths,
            recent_reward=fmean(self._recent_rewards) if self._recent_rewards else None,
            evaluations=dict(self._evaluations),
            evaluated=self._evaluated + (self._online.answered if self._online is not None else 0),
        )
