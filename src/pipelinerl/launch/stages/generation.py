"""A generation process of a run: engine, environment and actor, in one thread.

first weights ─▶ evaluate ─▶ iterate ... iterate ─▶ finish ─▶ last weights ─▶ evaluate
                              (until the trainer has reached its goal, or the run is told to stop)

Of several, the first evaluates, while iterating too if the run file says so. Before training the others wait for it, as
admission is not open yet; after it they end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pipelinerl.actor.actor import Actor
from pipelinerl.actor.admission import Admission
from pipelinerl.actor.evaluation import Evaluation, held_out_problems, write_record
from pipelinerl.environments.registry import make_environment, no_held_out
from pipelinerl.errors import StalledError
from pipelinerl.files import JsonLines
from pipelinerl.interfaces import Board, Engine, Environment, StreamStats, StreamWriter, Tokenizer, WeightReceiver
from pipelinerl.launch.hosts.roles import starting
from pipelinerl.launch.session import Session
from pipelinerl.launch.stages.engines import make_engine, waits_for
from pipelinerl.launch.stages.weights import SenderAddress
from pipelinerl.ledger import GroupLedger
from pipelinerl.metrics.records import EvaluationRecord, When, read_records
from pipelinerl.metrics.sinks import make_sink
from pipelinerl.metrics.timeline import TimelineWriter
from pipelinerl.models.loading import load_tokenizer
from pipelinerl.status.reporter import GenerationStages, generation_stages
from pipelinerl.types import TRAINER, Group, TrainerProgress

# ------------------------------------------------------------------------------------------------------------------------
# Between a stream, which is made first, and the actor, which wants to know what a full stream replaced.


class DropRelay:
    """A stream's `on_drop`. `listener` is set before the first group is written."""

    def __init__(self) -> None:
        self.listener: Callable[[Group], None] | None = None

    def __call__(self, group: Group) -> None:
        if self.listener is not None:
            self.listener(group)


# ------------------------------------------------------------------------------------------------------------------------
# Where an actor's groups go: into the stream and, for readers, into `rollouts.jsonl`, each encoded once.


class Outlet:
    """Both `writer` and `records` of an `Actor`. Other actors write to the same places, one at a time."""

    def __init__(self, stream: StreamWriter[Group], rollouts: Path) -> None:
        self._stream = stream
        self._rollouts = rollouts
        self._encoder = msgspec.json.Encoder()
        self._group: Group | None = None
        self._json = b""
        self._lines: JsonLines | None = None

    def try_write(self, item: Group, encoded: bytes | None = None) -> bool:
        return self._stream.try_write(item, encoded or self._encoded(item))

    def write(self, record: Group) -> None:
        """Append to `rollouts.jsonl`. If another actor has written to it, it is opened anew: what that one has torn in its
        death is cut off.
        """
        if self._lines is not None and not self._lines.alone():
            self._lines.close()
            self._lines = None
        self._lines = self._lines or JsonLines(self._rollouts)
        self._lines.write(msgspec.Raw(self._encoded(record)))

    def stats(self) -> StreamStats:
        return self._stream.stats()

    def close(self) -> None:
        """Close the record. The stream is its owner's."""
        if self._lines is not None:
            self._lines.close()

    def _encoded(self, group: Group) -> bytes:
        if group is not self._group:
            self._group, self._json = group, self._encoder.encode(group)
        return self._json


T = TypeVar("T")

LOOK_EVERY_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Everything that generation process number `index` works with. Make it with `build_generation`, and `close` it."""

    session: Session
    index: int
    stages: GenerationStages
    board: Board
    writer: StreamWriter[Group]
    drops: DropRelay
    receiver: WeightReceiver
    environment: Environment
    tokenizer: Tokenizer
    engine: Engine
    slots: int
    stop_token_ids: tuple[int, ...]
    close: Callable[[], None]


def build_generation(
    session: Session,
    board: Board,
    writer: StreamWriter[Group],
    drops: DropRelay,
    receiver: WeightReceiver,
    *,
    index: int = 0,
    sender: SenderAddress | None = None,
) -> Generation:
    """Make the environment, then the engine: a mistake in the one should not wait for the other.

    `drops` is the writer's `on_drop`; `sender` is where engine servers receive weights from, if not through this process.
    """
    config = session.config
    stages = generation_stages(config.engine.processes)[index]
    starting(board, stages, "makes the environment")
    tokenizer = load_tokenizer(config.model)
    environment = make_environment(config.environment.kind, config.environment.args, tokenizer, config.seed)
    if index == 0 and config.evaluation.problems and not held_out_problems(environment, 1):
        raise no_held_out(config.environment.kind, config.evaluation.problems)
    starting(board, stages, waits_for(config.engine))
    engine = make_engine(session, stages.engine, tokenizer, sender)
    return Generation(
        session=session,
        index=index,
        stages=stages,
        board=board,
        writer=writer,
        drops=drops,
        receiver=receiver,
        environment=environment,
        tokenizer=tokenizer,
        engine=engine.engine,
        slots=engine.slots,
        stop_token_ids=tuple(engine.stop_token_ids),
        close=engine.close,
    )


async def generate(side: Generation, *, stop: Callable[[], bool], between: Callable[[], object] = lambda: None) -> None:
    """Run to the end. `between` is called again and again, after every iteration (the embedded launcher trains there).

    However it ends, the actor's last counts are on the board then.
    """
    if not await _wait_for_weights(side, stop):
        return
    session = side.session
    with (
        closing(_admission(side)) as admission,
        closing(Outlet(side.writer, session.run.rollouts / "rollouts.jsonl")) as outlet,
        closing(TimelineWriter(session.run.root, side.index, session.records_from_s)) as timeline,
    ):
        actor = _make_actor(side, admission, outlet, timeline)
        side.drops.listener = lambda group: actor.stream_dropped(
            session.plan.rollouts_left({group.index: len(group.rollouts)})
        )
        try:
            if side.index == 0:
                if session.plan.version == 0:
                    await _evaluate(side, actor, "before", stop, between)
                _evaluate_online(side, actor)
                admission.open()
            while not stop() and not _trainer(side).goal_reached:
                await actor.iterate()
                between()
            if not stop():
                await actor.finish()
                await _take_last_weights(side, stop)
                if side.index == 0:
                    await _evaluate(side, actor, "after", stop, between)
        finally:
            await actor.finish()


def _admission(side: Generation) -> Admission:
    session = side.session
    return Admission(
        session.run.admission,
        session.schedule,
        side.board,
        taken=GroupLedger.from_record(session.plan.taken),
        processes=session.config.engine.processes,
    )


def _make_actor(side: Generation, admission: Admission, outlet: Outlet, timeline: TimelineWriter) -> Actor:
    return Actor(
        environment=side.environment,
        engine=side.engine,
        tokenizer=side.tokenizer,
        admission=admission,
        writer=outlet,
        receiver=side.receiver,
        board=side.board,
        records=outlet,
        config=side.session.config.actor,
        seed=side.session.config.seed,
        slots=side.slots,
        stop_token_ids=side.stop_token_ids,
        stages=side.stages,
        timeline=timeline,
    )


async def _wait_for_weights(side: Generation, stop: Callable[[], bool]) -> bool:
    """Take the trainer's first weights: those of the checkpoint in a resumed run, else those the model came with."""
    starting(side.board, side.stages, "waits for the trainer's first weights")
    while not stop():
        update = side.receiver.poll()
        if update is not None:
            side.receiver.acknowledge(side.engine.update_weights(update))
            return True
        await asyncio.sleep(0.01)
    return False


async def _take_last_weights(side: Generation, stop: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + side.session.config.launch.watchdog_s
    while side.engine.version != _trainer(side).version and not stop():
        update = side.receiver.poll()
        if update is not None:
            side.receiver.acknowledge(side.engine.update_weights(update))
        elif time.monotonic() > deadline_s:
            raise StalledError(
                f"the trainer reached version {_trainer(side).version} but its weights have not come; the engine has "
                f"version {side.engine.version}"
            )
        await asyncio.sleep(0.002)


async def _evaluate(
    side: Generation,
    actor: Actor,
    when: When,
    stop: Callable[[], bool],
    between: Callable[[], object],
) -> None:
    """Evaluate and write it down; nothing is written of an evaluation that is stopped."""
    config = side.session.config.evaluation
    if config.problems == 0:
        return
    with closing(JsonLines(side.session.run.evaluation(when))) as records:
        evaluation = await _unless_stopped(actor.evaluate(when, config, records), stop, between)
    if evaluation is not None:
        _record(side, actor, evaluation, when, side.engine.version)


def _evaluate_online(side: Generation, actor: Actor) -> None:
    """Have the actor evaluate while it iterates, if the run file asks for it, from where the run's records end."""
    session = side.session
    config = session.config.evaluation
    if config.every == 0:
        return

    def done(version: int, evaluation: Evaluation) -> None:
        path = session.run.evaluation(f"v{version}")
        path.unlink(missing_ok=True)  # of the time before a resume
        with closing(JsonLines(path)) as records:
            for problem in evaluation.problems:
                write_record(records, problem)
        _record(side, actor, evaluation, "online", version)

    records = read_records(session.run.evaluations, EvaluationRecord)
    known = [record.version for record in records if record.newest_version <= session.plan.version]
    actor.evaluate_online(config, until=session.config.trainer.steps, reached=max(known, default=0), on_done=done)


def _record(side: Generation, actor: Actor, evaluation: Evaluation, when: When, version: int) -> None:
    """Write an evaluation's line, of what began with the weights of `version`."""
    session = side.session
    answered = [problem for problem in evaluation.problems if problem.failure is None]
    record = EvaluationRecord.of(
        [problem.reward for problem in evaluation.problems],
        [problem.length for problem in answered],
        when=when,
        version=version,
        time_s=time.monotonic() - session.records_from_s,
        tokens_by_version=evaluation.tokens_by_version,
        failed=evaluation.failed,
        skipped=actor.take_skipped(),
        metrics=[problem.metrics for problem in answered],
    )
    with closing(make_sink(session.run.root, tensorboard=session.config.metrics.tensorboard)) as sink:
        sink.write(record)


async def _unless_stopped(work: Coroutine[Any, Any, T], stop: Callable[[], bool], between: Callable[[], object]) -> T | None:
    """The result of `work`, or None if `stop` says so before it is done: it is cancelled then."""
    task = asyncio.create_task(work)
    try:
        while not task.done() and not stop():
            await asyncio.wait({task}, timeout=LOOK_EVERY_S)
            between()
    finally:
        task.cancel()
        await asyncio.wait({task})
    return None if task.cancelled() else task.result()


def _trainer(side: Generation) -> TrainerProgress:
    status = side.board.read(TRAINER)
    if status is not None and isinstance(status.progress, TrainerProgress):
        return status.progress
    return TrainerProgress()
