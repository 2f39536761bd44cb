"""A generation process: engine, environment and actor, in one thread.

first weights ─▶ evaluate ─▶ iterate ... iterate ─▶ stop ─▶ last weights ─▶ evaluate
                              (until the trainer has reached its goal, or the run is asked to stop)

With several generation processes, only the first evaluates: before and after training, and during it if `evaluation.every`
is set. The others wait for its first evaluation, because admission opens only then. After training they end.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, closing, nullcontext
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from pipelinerl.actor.actor import Actor
from pipelinerl.actor.client import EngineClient
from pipelinerl.actor.evaluation import Evaluations, held_out_problems
from pipelinerl.actor.groups import GroupRunner
from pipelinerl.actor.rollouts import RolloutContext
from pipelinerl.config.schema import EvaluationConfig, RunConfig
from pipelinerl.environments.registry import make_environment, make_inner, notes_of
from pipelinerl.errors import ConfigError, EnvironmentSetupError, RunDirectoryError, StalledError, WeightUpdateError
from pipelinerl.files import JsonLines, OpenLines, remedy
from pipelinerl.hub.client import Claims, HubClient, RecordLines
from pipelinerl.interfaces import Admission, AsyncEngine, Board, Environment, Tokenizer
from pipelinerl.launch.session import Session
from pipelinerl.metrics.evaluations import EvaluatedProblem, EvaluationRecord
from pipelinerl.metrics.records import TimelineWriter
from pipelinerl.models.contract import Contract, read_contract
from pipelinerl.models.loading import load_tokenizer
from pipelinerl.process import lower_priority, stop_on_sigterm
from pipelinerl.status.board import generation_stages, starting
from pipelinerl.types import ENGINE, TRAINER, TrainerProgress, trainer_progress
from pipelinerl.weights.receiving import Receiver, SharedWeightReceiver

if TYPE_CHECKING:
    from pipelinerl.engine import LocalEngine

T = TypeVar("T")

LOOK_EVERY_S = 0.1
POLL_S = 0.002


def run_generation(session: Session, hub: HubClient, index: int) -> None:
    """Generation process number `index`, to its end."""
    torch.set_num_threads(session.here.threads)
    admission, stopping = Claims(hub, session.schedule), threading.Event()
    config, device = session.config, session.config.engine.device
    if config.engine.kind != "local":
        receiver = Receiver(hub)
    elif config.weights.kind == "collective":  # the engine joins a broadcast when it has loaded its model
        from pipelinerl.weights.broadcast.receiver import CollectiveWeightReceiver  # noqa: PLC0415 - few runs need it

        name, timeout_s = generation_stages(config.engine.processes)[index].engine, config.launch.startup_timeout_s
        joins = partial(CollectiveWeightReceiver, hub, session.plan.weights_key, index, torch.device(device))
        receiver = joins(name=name, timeout_s=timeout_s)
    else:
        receiver = SharedWeightReceiver(session.here.weights, hub, device)
    with closing(receiver):
        lines = partial(RecordLines, hub, session.run.root)
        generation = Generation(session, hub, admission, receiver, lines=lines, index=index)
        gc.collect()
        gc.freeze()  # the objects of the model and the libraries live until the end
        asyncio.run(generation.run(stop=stop_on_sigterm(stopping)))


class Generation:
    """Generation process number `index`: its environment, its engine and its actor. Only the first one evaluates."""

    def __init__(
        self,
        session: Session,
        board: Board,
        admission: Admission,
        receiver: Receiver,
        *,
        lines: OpenLines = JsonLines,
        index: int = 0,
    ) -> None:
        """Make the environment, then the engine: errors in the environment are found before the model is loaded."""
        config = session.config
        self.session, self._index, self._lines = session, index, lines
        self._board, self._admission, self._receiver = board, admission, receiver
        self._stages = generation_stages(config.engine.processes)[index]
        self._evaluation = config.evaluation if index == 0 else EvaluationConfig()
        starting(board, self._stages, "makes the environment")
        self._tokenizer = load_tokenizer(config.model)
        self._environment = make_environment(config.environment.kind, config.environment.args, self._tokenizer, config.seed)
        self._sets: dict[str, Environment] = {}
        if self._evaluation.problems:
            _, self._sets = held_out_sets(config, self._environment, self._tokenizer, most=1)
        servers = f"waits for the engine servers {', '.join(config.engine.urls)}".rstrip()
        starting(board, self._stages, "loads the model" if config.engine.kind == "local" else servers)
        self._engine = make_engine(session, self._stages.engine, self._tokenizer, receiver)

    async def run(self, *, stop: Callable[[], bool], between: Callable[[], object] = lambda: None) -> None:
        """Run to the end. `between` is called after every iteration (the embedded launcher trains there).

        The actor's final counts are published on the status board however this ends.
        """
        async with AsyncExitStack() as stack:
            entered = await _unless_stopped(stack.enter_async_context(self._engine), stop)
            if entered is None:
                return
            session, (engine, contract) = self.session, entered
            if session.here.yields:  # not before it has loaded: nobody trains
                lower_priority()
            starting(self._board, self._stages, "waits for the trainer's first weights")
            await self._take_weights(engine, stop, until=lambda: engine.progress().weight_updates > 0)
            if stop():
                return
            timeline = TimelineWriter(session.run.root, self._index, session.records_from_s, lines=self._lines)
            stack.enter_context(closing(timeline))
            actor = stack.enter_context(closing(self._make_actor(engine, contract, timeline)))
            try:
                if self._evaluation.problems and session.plan.version == 0 and not self._admission.opened:
                    await _unless_stopped(actor.evaluate("before"), stop, between)
                if self._index == 0:
                    self._admission.open()  # the other processes have waited for the evaluation
                while not stop() and not self._trainer.goal_reached:
                    await actor.iterate()
                    between()
            finally:
                await actor.stop()
            if stop():
                return
            last, timeout_s = lambda: engine.version == self._trainer.version, session.config.launch.watchdog_s
            await self._take_weights(engine, stop, until=last, timeout_s=timeout_s)
            if self._evaluation.problems:
                await _unless_stopped(actor.evaluate("after"), stop, between)

    def _make_actor(self, engine: AsyncEngine, contract: Contract, timeline: TimelineWriter) -> Actor:
        session, config = self.session, self.session.config
        context = RolloutContext(
            config.actor,
            self._environment,
            engine,
            self._tokenizer,
            seed=config.seed,
            slots=engine.progress().slots,
            stop_token_ids=contract.stop_token_ids,
            prefix=config.engine.prefix,
            notes=(*(f"model: {note}" for note in contract.notes), *notes_of(self._environment, config)),
        )
        skips, plan = None, session.plan
        if config.actor.online_filter is not None:
            from pipelinerl.actor.difficulty import OnlineFilter  # noqa: PLC0415 - few runs have one

            skips = OnlineFilter(config.actor.online_filter, config.seed)
            skips.read(session.run.recorded, plan.taken, plan.rollouts_bytes)
        evaluations = Evaluations(
            context,
            self._evaluation,
            sets=self._sets,
            on_done=self._record,
            elapsed_s=lambda: time.monotonic() - session.records_from_s,
            until=config.trainer.steps,
            reached=plan.evaluated,
        )
        return Actor(
            groups=GroupRunner(context, config.actor, skips),
            evaluations=evaluations,
            board=self._board,
            admission=self._admission,
            receiver=self._receiver,
            stages=self._stages,
            timeline=timeline,
        )

    @property
    def _trainer(self) -> TrainerProgress:
        """What the trainer published last."""
        return trainer_progress(self._board.read(TRAINER)) or TrainerProgress()

    def _record(self, record: EvaluationRecord, answers: Sequence[EvaluatedProblem]) -> None:
        """Write the answers of an evaluation, and append its record. Raises RunDirectoryError."""
        run = self.session.run
        try:
            with self._lines(run.evaluation(record.name), empty=True) as file:  # it may be left from before a resume
                for answer in answers:
                    file.write(answer)
        except OSError as error:
            why = f"{error.strerror or error}; {remedy(error)} and resume"
            raise RunDirectoryError(f"can't write the answers of an evaluation: {why}") from error
        with self._lines(run.evaluations) as evaluations:
            evaluations.write(record)

    async def _take_weights(
        self, engine: AsyncEngine, stop: Callable[[], bool], *, until: Callable[[], bool], timeout_s: float = inf
    ) -> None:
        """Apply the trainer's weights as they arrive, outside training, until `until()` or `stop()`.

        The first weights are those of the checkpoint in a resumed run, else the model's own. Raises StalledError if nothing
        arrives within `timeout_s`, and WeightUpdateError if the engine refuses what arrives.
        """
        deadline_s = time.monotonic() + timeout_s
        while not until() and not stop():
            update = self._receiver.poll()
            if update is not None:
                receipt = await engine.update_weights(update)
                self._receiver.acknowledge(receipt)
                # The trainer may have ended, and reads no receipt of the last update.
                if (problem := receipt.problem(update.version, update.checksum)) is not None:
                    raise WeightUpdateError(problem)
                deadline_s = time.monotonic() + timeout_s  # servers that are started again may take longer than that
            elif time.monotonic() > deadline_s:
                raise StalledError(
                    f"the trainer reached version {self._trainer.version} but its weights have not arrived; the engine has "
                    f"version {engine.version}"
                )
            else:
                await asyncio.sleep(POLL_S)


def make_engine(
    session: Session, name: str, tokenizer: Tokenizer, receiver: Receiver | None = None
) -> AbstractAsyncContextManager[tuple[AsyncEngine, Contract]]:
    """The engine of the run file, with the contract of its model and tokenizer: loaded now, or over servers, which are
    connected with on entry. `receiver` knows where servers join the trainer's broadcast, if weights are broadcast.

    Raises ModelLoadError and UnsupportedModelError; for servers also StalledError, UserError and the errors of
    `RemoteEngine.connect`.
    """
    config = session.config
    if config.engine.kind == "local":
        model, engine = load_local_engine(config, name)
        return nullcontext((EngineClient(engine), read_contract(model, tokenizer, config.engine.max_length)))
    from pipelinerl.launch.stages.servers import connected_engine  # noqa: PLC0415 - a run without servers does not need it

    return connected_engine(session, name, receiver)


def load_local_engine(config: RunConfig, name: str = ENGINE) -> tuple[Any, LocalEngine]:
    """The run file's model and the embedded engine over it. Raises ModelLoadError and UnsupportedModelError."""
    from pipelinerl.engine import LocalEngine  # noqa: PLC0415 - only the process that computes needs it
    from pipelinerl.models.loading import load_model, slot_length  # noqa: PLC0415 - as above

    model = load_model(config.model, config.engine.device)
    make: Callable[..., LocalEngine] = LocalEngine
    if config.engine.decoding == "static" or config.engine.device != "cpu":
        from pipelinerl.engine.static import engine_for  # noqa: PLC0415 - as above

        make = partial(engine_for, decoding=config.engine.decoding)
    engine = make(
        model,
        slots=config.engine.slots,
        max_length=slot_length(model, config.engine.max_length),
        prefill_tokens=config.engine.prefill_tokens,
        kv_on_update=config.engine.kv_on_update,
        name=name,
    )
    return model, engine


def held_out_sets(
    config: RunConfig, environment: Environment, tokenizer: Tokenizer, most: int | None = None
) -> tuple[int, dict[str, Environment]]:
    """The number of held-out problems of `environment` that the run evaluates, and the environments of `evaluation.sets`.

    With `most`, no more problems of `environment` are asked for. Raises ConfigError if it has none and the run evaluates;
    EnvironmentSetupError for a set that can't be built, has no held-out problems, or some of the training data.
    """
    from pipelinerl.environments.data import ProblemSet  # noqa: PLC0415 - not every run evaluates

    kind, wanted, made = config.environment.kind, config.evaluation.problems, {}
    found = len(held_out_problems(environment, wanted if most is None else min(wanted, most))) if wanted else 0
    if wanted and not found:
        raise ConfigError(
            f"evaluation.problems is {wanted}, but environment {kind} has no held-out problems: define "
            "`held_out(self, count)` in its class, or set evaluation.problems to 0"
        )
    for name, args in config.evaluation.sets.items():
        where = f"evaluation.sets.{name}"
        made[name] = make_inner(where, kind, {**config.environment.args, **args}, tokenizer, config.seed)
        problems = held_out_problems(made[name], wanted)
        if not problems:
            raise EnvironmentSetupError(f"{where}: it has no held-out problems")
        if isinstance(environment, ProblemSet) and (trained := environment.trained_on(problems)):
            raise EnvironmentSetupError(
                f"{where}: {len(trained)} of its {len(problems)} problems are also training problems ({trained[0]}); hold "
                "them out of environment.args.data"
            )
    return found, made


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
