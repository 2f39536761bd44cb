"""A generation process: engine, environment and actor, in one thread.

first weights ─▶ evaluate ─▶ iterate ... iterate ─▶ stop ─▶ last weights ─▶ evaluate
                              (until the trainer has reached its goal, or the run is told to stop)

With several generation processes, only the first evaluates: before and after training, and during it if `evaluation.every`
is set. The others wait for its first evaluation, because admission opens only then. After training they end.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, closing, nullcontext
from dataclasses import dataclass, field
from math import inf
from typing import Any, TypeVar

import torch

from pipelinerl.actor.actor import Actor
from pipelinerl.actor.evaluation import Evaluation, Evaluations, held_out_problems, write_record
from pipelinerl.actor.groups import GroupRunner
from pipelinerl.actor.rollouts import RolloutContext
from pipelinerl.config.schema import EvaluationConfig
from pipelinerl.environments.registry import make_environment, notes_of
from pipelinerl.errors import StalledError
from pipelinerl.files import JsonLines, OpenLines
from pipelinerl.hub.client import Claims, HubClient
from pipelinerl.interfaces import Admission, AsyncEngine, Board, Environment, Tokenizer, WeightReceiver
from pipelinerl.launch.session import Session
from pipelinerl.launch.stages.engines import EngineHandle, local_engine
from pipelinerl.metrics.evaluations import EvaluationRecord
from pipelinerl.metrics.sinks import JsonlSink
from pipelinerl.metrics.timeline import TimelineWriter
from pipelinerl.models.loading import load_tokenizer
from pipelinerl.process import lower_priority, stop_on_sigterm
from pipelinerl.status.board import GenerationStages, generation_stages, starting
from pipelinerl.types import TRAINER, TrainerProgress, trainer_progress
from pipelinerl.weights.receiving import Receiver, SharedWeightReceiver

T = TypeVar("T")

LOOK_EVERY_S = 0.1
POLL_S = 0.002


def run_generation(session: Session, hub: HubClient, index: int) -> None:
    """Generation process number `index`, to its end."""
    torch.set_num_threads(session.here.threads)
    stage = generation_stages(session.config.engine.processes)[index].engine
    admission, stopping = Claims(hub, session.schedule), threading.Event()
    with closing(_receiver(session, hub, index, stage)) as receiver:
        generation = build_generation(session, hub, admission, receiver, lines=hub.opener(session.run.root), index=index)
        gc.collect()
        gc.freeze()  # the objects of the model and the libraries live until the end
        stop = stop_on_sigterm(stopping)
        asyncio.run(generate(generation, stop=stop))


def _receiver(session: Session, hub: HubClient, index: int, engine: str) -> WeightReceiver:
    """The engine's end of the weight transfer."""
    config = session.config
    if config.engine.kind != "local":
        return Receiver(hub)
    if config.weights.kind == "collective":
        from pipelinerl.weights.broadcast.receiver import CollectiveWeightReceiver  # noqa: PLC0415 - few runs need it

        return CollectiveWeightReceiver(
            hub,
            session.plan.weights_key,
            index,
            engine=engine,
            join_timeout_s=config.launch.startup_timeout_s,
            device=torch.device(config.engine.device),
        )
    return SharedWeightReceiver(session.here.weights, hub, config.engine.device)


@dataclass(kw_only=True)
class Generation:
    """What generation process number `index` works with. Made by `build_generation`.

    `groups` is set once the engine is ready.
    """

    session: Session
    index: int
    stages: GenerationStages
    board: Board
    receiver: WeightReceiver
    environment: Environment
    sets: dict[str, Environment]
    tokenizer: Tokenizer
    engine: AbstractAsyncContextManager[EngineHandle]
    admission: Admission
    lines: OpenLines
    groups: GroupRunner = field(init=False)

    @property
    def evaluation(self) -> EvaluationConfig:
        """The evaluations of this process: only the first one evaluates."""
        return self.session.config.evaluation if self.index == 0 else EvaluationConfig()

    @property
    def trainer(self) -> TrainerProgress:
        """What the trainer published last."""
        return trainer_progress(self.board.read(TRAINER)) or TrainerProgress()


def build_generation(
    session: Session,
    board: Board,
    admission: Admission,
    receiver: WeightReceiver,
    *,
    lines: OpenLines = JsonLines,
    index: int = 0,
) -> Generation:
    """Make the environment, then the engine: errors in the environment are found before the slow loading of the model."""
    config = session.config
    stages = generation_stages(config.engine.processes)[index]
    starting(board, stages, "makes the environment")
    tokenizer = load_tokenizer(config.model)
    environment = make_environment(config.environment.kind, config.environment.args, tokenizer, config.seed)
    if index == 0 and config.evaluation.problems and not held_out_problems(environment, 1):
        from pipelinerl.launch.stages.held_out import no_held_out  # noqa: PLC0415 - only for an error

        raise no_held_out(config.environment.kind, config.evaluation.problems)
    sets: dict[str, Environment] = {}
    other_data = session.plan.other_data and not config.evaluation.accept_trained
    if index == 0 and (config.evaluation.sets or other_data):
        from pipelinerl.launch.stages.held_out import evaluation_sets, refuse_trained  # noqa: PLC0415 - few runs need them

        sets = evaluation_sets(config, environment, tokenizer)
        if other_data:
            refuse_trained(environment, sets.values(), session)
    servers = f"waits for the engine servers {', '.join(config.engine.urls)}".rstrip()
    starting(board, stages, "loads the model" if config.engine.kind == "local" else servers)
    engine = make_engine(session, stages.engine, tokenizer, receiver)
    return Generation(
        session=session,
        index=index,
        stages=stages,
        board=board,
        receiver=receiver,
        environment=environment,
        sets=sets,
        tokenizer=tokenizer,
        engine=engine,
        admission=admission,
        lines=lines,
    )


async def generate(
    generation: Generation, *, stop: Callable[[], bool], between: Callable[[], object] = lambda: None
) -> None:
    """Run to the end. `between` is called after every iteration (the embedded launcher trains there).

    The actor's final counts are published on the status board however this ends.
    """
    async with AsyncExitStack() as stack:
        handle = await _unless_stopped(stack.enter_async_context(generation.engine), stop)
        if handle is not None:
            await _generate(generation, handle, stop, between)


async def _generate(
    generation: Generation, handle: EngineHandle, stop: Callable[[], bool], between: Callable[[], object]
) -> None:
    session, engine = generation.session, handle.engine
    if session.here.yields:  # not before it has loaded: nobody trains
        lower_priority()
    starting(generation.board, generation.stages, "waits for the trainer's first weights")
    await _take_weights(generation, engine, stop, until=lambda: engine.progress().weight_updates > 0)
    if stop():
        return
    generation.groups = _groups(generation, handle)
    with (
        closing(
            TimelineWriter(session.run.root, generation.index, session.records_from_s, lines=generation.lines)
        ) as timeline,
        closing(_actor_of(generation, timeline)) as actor,
    ):
        try:
            if generation.evaluation.problems and session.plan.version == 0 and not generation.admission.opened:
                await _unless_stopped(actor.evaluate("before"), stop, between)
            if generation.index == 0:
                generation.admission.open()  # the other processes have waited for the evaluation
            while not stop() and not generation.trainer.goal_reached:
                await actor.iterate()
                between()
        finally:
            await actor.stop()
        if not stop():
            timeout_s = session.config.launch.watchdog_s
            await _take_weights(
                generation, engine, stop, until=lambda: engine.version == generation.trainer.version, timeout_s=timeout_s
            )
            if generation.evaluation.problems:
                await _unless_stopped(actor.evaluate("after"), stop, between)


def _groups(generation: Generation, handle: EngineHandle) -> GroupRunner:
    config = generation.session.config
    context = RolloutContext.of(
        config.actor,
        generation.environment,
        handle.engine,
        generation.tokenizer,
        seed=config.seed,
        slots=handle.slots,
        stop_token_ids=handle.contract.stop_token_ids,
        notes=(*(f"model: {note}" for note in handle.contract.notes), *notes_of(generation.environment, config)),
    )
    skips = None
    if config.actor.online_filter is not None:
        from pipelinerl.actor.difficulty import OnlineFilter  # noqa: PLC0415 - few runs have one

        run, plan = generation.session.run, generation.session.plan
        skips = OnlineFilter(config.actor.online_filter, config.seed)
        skips.read(run.recorded, plan.taken, plan.rollouts_bytes)
    return GroupRunner(context, config.actor, skips)


def _actor_of(generation: Generation, timeline: TimelineWriter) -> Actor:
    session = generation.session
    evaluations = Evaluations(
        generation.groups.context,
        generation.evaluation,
        sets=generation.sets,
        on_done=lambda evaluation: _record(session, generation.lines, evaluation),
        until=session.config.trainer.steps,
        reached=session.plan.evaluated,
    )
    return Actor(
        groups=generation.groups,
        evaluations=evaluations,
        board=generation.board,
        admission=generation.admission,
        receiver=generation.receiver,
        stages=generation.stages,
        timeline=timeline,
    )


def _record(session: Session, lines: OpenLines, evaluation: Evaluation) -> None:
    """Write the answers of an evaluation, and append its record."""
    path = session.run.evaluation(evaluation.name)
    with lines(path, empty=True) as answers:  # it may be left from before a resume
        for problem in evaluation.problems:
            write_record(answers, problem)
    answered = [problem for problem in evaluation.own if problem.failure is None]
    record = EvaluationRecord.of(
        [problem.reward for problem in evaluation.own],
        [problem.length for problem in answered],
        when=evaluation.when,
        version=evaluation.version,
        time_s=time.monotonic() - session.records_from_s,
        tokens_by_version=evaluation.tokens_by_version,
        failed=evaluation.failed,
        skipped=evaluation.skipped,
        metrics=[*(problem.metrics for problem in answered), *evaluation.rewards_of_sets],
    )
    with closing(JsonlSink(session.run.root, lines)) as sink:
        sink.write(record)


async def _take_weights(
    generation: Generation,
    engine: AsyncEngine,
    stop: Callable[[], bool],
    *,
    until: Callable[[], bool],
    timeout_s: float = inf,
) -> None:
    """Apply the trainer's weights as they arrive, outside training, until `until()` or `stop()`.

    The first weights are those of the checkpoint in a resumed run, else the model's own. Raises StalledError if nothing
    arrives within `timeout_s`.
    """
    deadline_s = time.monotonic() + timeout_s
    while not until() and not stop():
        update = generation.receiver.poll()
        if update is not None:
            generation.receiver.acknowledge(await engine.update_weights(update))
        elif time.monotonic() > deadline_s:
            raise StalledError(
                f"the trainer reached version {generation.trainer.version} but its weights have not arrived; the engine "
                f"has version {engine.version}"
            )
        else:
            await asyncio.sleep(POLL_S)


def make_engine(
    session: Session, name: str, tokenizer: Tokenizer, receiver: WeightReceiver | None = None
) -> AbstractAsyncContextManager[EngineHandle]:
    """The engine that the run file configures: loaded now, or over servers, which are connected with on entry.

    `receiver` knows where servers join the trainer's broadcast, if weights are broadcast.

    Raises ModelLoadError and UnsupportedModelError; for servers also StalledError, UserError and the errors of
    `RemoteEngine.connect`.
    """
    if session.config.engine.kind == "local":
        return nullcontext(local_engine(session.config, name, tokenizer))
    from pipelinerl.launch.stages.servers import connected_engine  # noqa: PLC0415 - a run without servers does not need it

    return connected_engine(session, name, receiver)


async def _unless_stopped(
    work: Coroutine[Any, Any, T], stop: Callable[[], bool], between: Callable[[], object] = lambda: None
) -> T | None:
    """The result of `work`. If `stop` returns True first, cancel it and return None."""
    task = asyncio.create_task(work)
    try:
        while not task.done() and not stop():
            await asyncio.wait({task}, timeout=LOOK_EVERY_S)
            between()
    finally:
        task.cancel()
        await asyncio.wait({task})
    return None if task.cancelled() else task.result()
