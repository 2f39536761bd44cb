"""The actor: keeps the engine full of rollouts and hands finished groups to the stream.

    admission ─index─▶ group: K attempts ─▶ requests ─▶ engine ─▶ tokens ─▶ K outcomes ─▶ writer, rollouts.jsonl
    (schedule admits)                               ▲  one step an iteration
                                    receiver ─weights┘  (between two steps, if the schedule lets it)

consumes   group indices; weights
produces   groups, in the order in which they finish; the statuses of its two stages (engine, actor) on the board
waits for  the trainer (lag bound, round, full stream), or an environment; it never blocks: it says so and returns

A run may have several generation processes, with an actor each. They meet in `admission`, and nowhere else.
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
    Answers,
    Evaluation,
    OnlineEvaluation,
    RecordSink,
    evaluate,
    held_out_problems,
    write_record,
)
from pipelinerl.actor.groups import GroupRunner
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

OPEN_ROLLOUTS_PER_SLOT = 4
"""The default of `actor.max_open_rollouts`, for each slot."""
RECENT_ROLLOUTS = 256
LONGEST_IDLE = 8
"""How many times `idle_s` it sleeps when there has been nothing to do for a while: what idles leaves the cores to others."""
STREAM_DROP = "stream_full"


class Actor:
    """Algorithm 2's actor process, one iteration at a time, in the thread and event loop of whoever calls `iterate`."""

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
        """`admission` says which groups to start, and when; `slots` is the engine's H; `stages` its names on the board.

        `idle_s` is slept when there is nothing to do, by `clock`; up to `LONGEST_IDLE` times as long if that lasts.
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
        # Rollouts that wait for a tool or a slow reward leave their slots to others. A round is its own limit.
        self._most_open = None if admission.in_rounds else config.max_open_rollouts or OPEN_ROLLOUTS_PER_SLOT * slots
        self._clock = clock
        self._idle_s = idle_s
        self._idle_turns = 0
        gives_up = config.max_failure_fraction < 1
        self._alarm = CodeAlarm(config.code_timeout_s, stays=True, gives_up=gives_up, on_slow=self._publish_slow)
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
        """Whether environment code that computes without yielding is interrupted after `code_timeout_s`."""
        return deadlines_work()

    # -------------------------------------------------------------------------------------------- one iteration

    async def iterate(self) -> None:
        """Take weights, start groups, make one engine step, hand over what is finished, report.

        Raises TooManyFailuresError when too many rollouts fail, and what engine, stream or weight receiver raise.
        """
        if not self._admission.opened:
            self._ready_since_s = self._clock()  # another engine is being evaluated: this one has had nothing to do yet
        self._hand_over()
        self._take_weights()
        if self._probe.asked != self._engine.version:
            self._probe.ask(self._probe_ids)
        if self._online is not None and self._online.turn(self._engine.version):
            await let_rollouts_run(2)  # what they ask of the engine leaves groups less room
        started = self._groups.groups_started
        admission = self._start_groups()
        if self._groups.groups_started > started:
            await let_rollouts_run(2)  # one turn to begin, one to submit
        stepped = await self._client.step()
        for completion in self._client.take_cancelled():
            self._failures.cancelled(rollout_of(completion.request_id), len(completion.token_ids))
        self._groups.check()
        self._hand_over()
        self._report(admission, stepped)
        await self._rest(stepped)

    async def _rest(self, stepped: bool) -> None:
        """Sleep if there was nothing to do; longer and longer while no rollout is running that could want something."""
        self._idle_turns = 0 if stepped or self._running else self._idle_turns + 1
        if not stepped:
            await asyncio.sleep(self._idle_s * min(max(1, self._idle_turns), LONGEST_IDLE))

    def _take_weights(self) -> None:
        version = self._receiver.offered()
        if version is None or not self._admission.may_take(version).allowed:
            return
        update = self._receiver.poll()
        if update is not None:
            self._receiver.acknowledge(self._engine.update_weights(update))

    @property
    def _probe_ids(self) -> Sequence[int]:
        """What the trainer wants to know the engine's answer to."""
        if not self._known_probe_ids:
            trainer = self._board.read(TRAINER)
            if trainer is not None and isinstance(trainer.progress, TrainerProgress):
                self._known_probe_ids = trainer.progress.probe_ids
        return self._known_probe_ids

    def _start_groups(self) -> Verdict:
        """Start groups while the engine has room. Returns the last verdict: allowed, or why no more were started."""
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
        return Verdict(True)

    def _may_start(self) -> Verdict:
        """What speaks against more groups here, whatever the others do."""
        if self._stopping:
            return Verdict(False, "nothing any more: it was told to stop")
        if self._groups.finished:
            return Verdict(False, f"the trainer: the stream is full ({self._writer.stats().pending} groups)", (TRAINER,))
        if self._most_open is not None and self._groups.running >= self._most_open:
            return Verdict(False, f"the environment: {self._groups.running} rollouts are open and do not ask for tokens")
        return Verdict(True)

    def _hand_over(self) -> None:
        """Write finished groups, oldest first, until the stream is full."""
        while self._groups.finished:
            group = self._groups.finished[0]
            version, started, rollouts = group.started_version, group.started, len(group.rollouts)
            if not self._admission.hand_over(version, started=started, rollouts=rollouts, write=self._write_first):
                return

    def _write_first(self) -> bool:
        """Write the first of the finished groups. Within the lock of `admission`: other actors write the same files."""
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
        """The stream replaced a group by a fresher one (its `on_drop`): its rollouts are dropped, not handed over."""
        self._admission.stream_dropped(rollouts)
        self._rollouts_dropped_by_stream += rollouts

    # ------------------------------------------------------------------------------------------------ the rest

    async def evaluate(self, when: str, config: EvaluationConfig, records: RecordSink) -> Evaluation:
        """Answer `config.problems` held-out problems, before the first or after the last iteration (`finish`)."""
        problems = held_out_problems(self._environment, config.problems)

        def report(done: int) -> None:
            self._evaluated = done
            self._note_timeline()
            self._publish(f"evaluates, {when} training: {done} of {len(problems)} held-out problems")

        answers = self._answers(problems, config, when)
        evaluation = await evaluate(answers, self._client, slots=self._slots, records=records, on_progress=report)
        if evaluation.reward is not None:
            self._evaluations[when] = evaluation.reward
        self._actor_status.report("done" if self._stopping else "waiting", "", self._actor_progress)
        return evaluation

    def evaluate_online(
        self, config: EvaluationConfig, *, until: int, reached: int, on_done: Callable[[int, Evaluation], None]
    ) -> None:
        """From now on evaluate between engine steps, `config.every` versions apart (see `OnlineEvaluation`)."""
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
                lambda version: self._answers(problems, config, f"v{version}"),
                every=config.every,
                until=until,
                slots=max(1, int(self._slots * config.share)),
                reached=reached,
                on_done=done,
            )

    def take_skipped(self) -> int:
        """How many evaluations were left out since the last call."""
        if self._online is None:
            return 0
        skipped, self._online.skipped = self._online.skipped, 0
        return skipped

    def _answers(self, problems: Sequence[Problem], config: EvaluationConfig, name: str) -> Answers:
        return Answers(
            self._environment,
            problems,
            client=self._client,
            tokenizer=self._tokenizer,
            sampling=msgspec.structs.replace(self._sampling, temperature=config.temperature, top_p=1.0, top_k=0),
            limits=self._limits,
            name=f"evaluation-{name}",
        )

    async def finish(self) -> None:
        """Start nothing any more and cancel what is running: rollouts stay counted as in progress."""
        self._stopping = True
        self._groups.cancel()
        if self._online is not None:
            self._online.end()
        self._probe.cancel()
        await let_rollouts_run()  # they cancel their requests
        await self._client.step()  # the engine lets go of them
        self._hand_over()
        self._alarm.release()
        self._engine_status.report("done", "", self._engine_progress, now=True)
        self._actor_status.report("done", "", self._actor_progress, now=True)

    def _report(self, admission: Verdict, stepped: bool) -> None:
        self._note_timeline()
        if self._probe.news:  # the trainer is to know at once
            self._probe.news = False
            self._engine_status.report(self._engine_state, "has answered a probe", self._engine_progress, now=True)
        if not (self._actor_status.due("working" if stepped else "waiting") or self._engine_status.due(self._engine_state)):
            return
        if stepped:
            limit = "" if admission.allowed else f"; starts no more, waiting for {admission.waiting_for}"
            evaluates = f"; {self._online.doing}" if self._online is not None and self._online.doing else ""
            self._publish(f"{self._groups.running} rollouts running{limit}{evaluates}")
        elif self._running:
            self._publish("", Verdict(False, f"the environment: {self._running} rollouts run code of their own"))
        else:
            self._publish("", admission if admission.waiting_for else Verdict(False, "its next iteration"))

    def _publish_slow(self, doing: str) -> None:
        """Says on the board what holds this thread, from within it."""
        self._actor_status.report("working", doing, self._actor_progress)
        actor = self._stages.actor
        self._engine_status.report("waiting", f"the {actor}: {doing}", self._engine_progress, waits_for=(actor,))

    def _publish(self, doing: str, wait: Verdict = ALLOWED) -> None:
        """The statuses of the actor, which is `doing` something unless it has to `wait`, and of the engine."""
        state: StageState = "working" if wait.allowed else "waiting"
        self._actor_status.report(state, wait.waiting_for or doing, self._actor_progress, waits_for=wait.waits_for)
        in_progress, actor = self._engine.in_progress, self._stages.actor
        detail = f"{in_progress} sequences in progress" if in_progress else f"requests from the {actor}"
        self._engine_status.report(
            self._engine_state, detail, self._engine_progress, waits_for=() if in_progress else (actor,)
        )

    @property
    def _running(self) -> int:
        """Rollouts that have not ended, those of an evaluation included."""
        return self._groups.running + (self._online.running if self._online is not None else 0)

    @property
    def _engine_state(self) -> StageState:
        return "working" if self._engine.in_progress else "waiting"

    def _note_timeline(self) -> None:
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
