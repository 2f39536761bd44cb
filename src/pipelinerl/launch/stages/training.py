"""The training process: the policy, and the trainer, which reads prepared groups."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from pipelinerl.channel import LOOPBACK, listen, source_address
from pipelinerl.checkpoint import Checkpoint, CheckpointState, load_checkpoint
from pipelinerl.config.schema import RunConfig
from pipelinerl.config.secrets import without_secrets
from pipelinerl.errors import UserError
from pipelinerl.files import SHARED_MEMORY, JsonLines, OpenLines, write_atomically
from pipelinerl.hub.client import HubClient, HubReader, RecordLines
from pipelinerl.interfaces import Board, StreamReader, WeightSender
from pipelinerl.launch.session import Session
from pipelinerl.launch.stages.preprocessing import make_preprocessor, scores_in_the_step
from pipelinerl.metrics.records import SessionRecord, StepRecord
from pipelinerl.models.loading import load_model, load_tokenizer, refuse_adapter
from pipelinerl.process import stop_on_sigterm
from pipelinerl.resources.machine import this_computer
from pipelinerl.resources.roles import TRAINING, rank_roles
from pipelinerl.status.board import starting
from pipelinerl.trainer.queue import SampleQueue
from pipelinerl.trainer.saving import restore_rng, rng_state
from pipelinerl.trainer.status import TrainerOutput
from pipelinerl.trainer.step import Learner
from pipelinerl.trainer.trainer import Trainer
from pipelinerl.types import TRAINER, Group, Prepared, TrainingSample

if TYPE_CHECKING:
    from pipelinerl.models.lora import LoraModel
    from pipelinerl.trainer.sharding.learner import ShardedPolicy
    from pipelinerl.trainer.sharding.ranks import Team

POLL_S = 0.02
ANSWER_S, NOTICED_S = 120.0, 30.0
"""How long engines may take to acknowledge weights; and how much longer than the watchdog, which notices a hung engine."""


def run_training(session: Session, hub: HubClient) -> None:
    """The training process, to its end. SIGTERM asks it to stop with a checkpoint.

    With several `trainer.ranks`, this is rank 0, at which the others arrive.
    """
    torch.set_num_threads(session.here.threads)
    stopping, config = threading.Event(), session.config
    with ExitStack() as stack:
        team = stack.enter_context(lead_ranks(session, hub)) if config.trainer.ranks > 1 else None
        starting(hub, [TRAINER], "loads the model")
        policy = load_policy(session, team)
        reader: HubReader[Prepared]
        if config.launch.preprocessor == "process":
            reader = HubReader(hub, Prepared)
        else:
            reader = HubReader(hub, Group, prepare=make_preprocessor(config, policy.lora))
        sender = stack.enter_context(closing(_sender(session, hub, stopping.is_set)))
        files = partial(RecordLines, hub, session.run.root)
        opened = open_trainer(session, hub, policy, reader, sender, lines=files, settle=hub.require_sync)
        trainer = stack.enter_context(opened)
        try:
            trainer.run(stop_on_sigterm(stopping))
        except BaseException:
            stopping.set()  # then the sender does not wait for engines
            raise


def run_rank(session: Session, role: str) -> None:
    """Another rank of the trainer, to its end. It ends with rank 0, so that SIGTERM leaves time for a checkpoint."""
    torch.set_num_threads(session.here.threads)
    while not (ready := session.run.ready_file(TRAINING)).exists():  # the launcher watches how long
        time.sleep(POLL_S)
    meeting = msgspec.json.decode(ready.read_bytes(), type=tuple[str, int])
    with _joined(session, 1 + rank_roles(session.config).index(role), meeting) as team:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        learner: Any = load_policy(session, team).learner(session.config)
        learner.follow()


@contextmanager
def lead_ranks(session: Session, board: Board) -> Iterator[Team]:
    """Be rank 0 of a sharded trainer while inside. Its ready file tells the others where to connect."""
    starting(board, [TRAINER], "waits for the other ranks to start")
    meeting = listen(session.here.address)
    write_atomically(session.run.ready_file(TRAINING), msgspec.json.encode(meeting.getsockname()[:2]))
    with _joined(session, 0, meeting) as team:
        yield team
        team.call("end")


def _joined(session: Session, rank: int, meeting: socket.socket | tuple[str, int]) -> AbstractContextManager[Team]:
    from pipelinerl.trainer.sharding.ranks import join  # noqa: PLC0415 - only for several ranks

    launch = session.config.launch
    return join(
        session.config.trainer,
        rank,
        meeting,
        session.plan.ranks_key,
        start_s=launch.startup_timeout_s,
        stall_s=launch.watchdog_s / 2,  # before the watchdog, which can't say which rank it is
    )


def _sender(session: Session, hub: HubClient, give_up: Callable[[], bool]) -> WeightSender:
    """The trainer's end of the weight transfer. Raises UserError if there is no route to a server of a broadcast."""
    config = session.config
    engine, launch = config.engine, config.launch
    timeout_s = max(ANSWER_S, launch.watchdog_s + NOTICED_S)
    if config.weights.kind == "collective":
        from pipelinerl.weights.broadcast.sender import CollectiveWeightSender  # noqa: PLC0415 - few runs need it

        return CollectiveWeightSender(
            session.here.address if session.here.machine else _broadcast_address(engine.urls),
            session.plan.weights_key,
            engine.processes if engine.kind == "local" else len(engine.urls) or engine.servers,
            hub,
            engines=engine.processes,
            timeout_s=timeout_s,
            join_timeout_s=launch.startup_timeout_s,
            device=torch.device(config.trainer.device),
            encoding=config.weights.encoding,
            give_up=give_up,
        )
    from pipelinerl.weights.sending import SharedWeightSender, WeightFolder  # noqa: PLC0415 - not for a broadcast

    parents = [Path(engine.weights_dir)] if engine.weights_dir else [SHARED_MEMORY, session.run.control]
    file = session.here.weights if engine.kind == "local" else WeightFolder(*parents)
    options = {"encoding": config.weights.encoding, "timeout_s": timeout_s, "give_up": give_up}
    return SharedWeightSender(file, hub, engine.processes, **options)


def _broadcast_address(urls: Iterable[str]) -> str:
    """The address of this machine that all engine servers reach: loopback, unless one is on another machine."""
    found = LOOPBACK
    for url in urls:
        try:
            address = source_address(url)
        except OSError as error:
            raise UserError(f"engine.urls: there is no route to {url}: {error.strerror or error}") from error
        found = address if found == LOOPBACK else found
    return found


@dataclass(frozen=True)
class Policy:
    """The model to train and the checkpoint it was loaded from, if any. With `model.lora`, it has the adapters of `lora`.

    `sharded`: with several `trainer.ranks`, of which only rank 0 has a checkpoint.
    """

    model: Any
    lora: LoraModel | None
    tokenizer: Any
    checkpoint: Checkpoint | None
    sharded: ShardedPolicy | None = None

    def learner(self, config: RunConfig) -> Learner:
        options: dict[str, Any] = {
            "temperature": config.actor.temperature,
            "correction": config.correction,
            "skip_zero_advantage": config.preprocess.zero_advantage == "skip",
        }
        if self.sharded is None:
            return Learner(self.model, config.trainer, lora=self.lora, **options)
        from pipelinerl.trainer.sharding.learner import ShardedLearner  # noqa: PLC0415 - as above

        reference = config.trainer.reference(config.model) if scores_in_the_step(config) else None
        return ShardedLearner(self.sharded, config.trainer, reference=reference, **options)


def load_policy(session: Session, team: Team | None = None) -> Policy:
    """Load the model, or the checkpoint that the plan names. With a `team`, it is sharded over it, and rank 0 reads it.

    With adapters: load the run's initial model and the checkpoint's adapters.
    """
    config, plan = session.config, session.plan
    checkpoint = load_checkpoint(Path(plan.checkpoint)) if plan.checkpoint and (team is None or team.rank == 0) else None
    merged = config.model.model_copy(update={"path": str(checkpoint.path)}) if checkpoint else config.model
    if checkpoint and config.model.lora is None:
        refuse_adapter(checkpoint.path)
    tokenizer = load_tokenizer(merged)
    if team is not None:
        from pipelinerl.trainer.sharding.learner import ShardedPolicy  # noqa: PLC0415 - as above

        adapter = checkpoint.path if checkpoint and config.model.lora else None
        model = config.model if adapter else merged
        sharded = ShardedPolicy(model, config.trainer, team, seed=config.seed, adapter=adapter)
        return Policy(sharded.model, sharded.lora, tokenizer, checkpoint, sharded)
    if config.model.lora is None:
        return Policy(load_model(merged, config.trainer.device), None, tokenizer, checkpoint)
    from pipelinerl.models import lora as adapters  # noqa: PLC0415 - needs an extra, and takes seconds

    lora = adapters.LoraModel(load_model(config.model, config.trainer.device), config.model.lora, seed=config.seed)
    if checkpoint:
        lora.load_adapter(checkpoint.path)
    return Policy(lora.model, lora, tokenizer, checkpoint)


@contextmanager
def open_trainer(
    session: Session,
    board: Board,
    policy: Policy,
    reader: StreamReader[Prepared],
    sender: WeightSender,
    *,
    record: Callable[[StepRecord], object] | None = None,
    lines: OpenLines = JsonLines,
    settle: Callable[[], object] = lambda: None,
) -> Iterator[Trainer]:
    """The trainer of `policy`, with the state of its checkpoint. It publishes that it failed if the block does.

    `record` gets the metrics, in place of the run's file. `settle` waits until all that was written is there, before a
    checkpoint.
    """
    config, run, checkpoint = session.config, session.run, policy.checkpoint
    learner = policy.learner(config)
    state = checkpoint.state if checkpoint else CheckpointState(version=0)
    if checkpoint:
        learner.load_optimizer(checkpoint)
        restore_rng(state.rng)
    begun = session_record(session)

    def begin() -> None:
        with lines(run.sessions) as sessions:
            sessions.write(begun)

    if checkpoint is None:  # a resume is recorded with its first step: a failure before it changes nothing
        begin()
    warm_start: tuple[Iterable[Sequence[TrainingSample]], float] = ((), 0.0)
    if (warm := config.trainer.warm_start) and checkpoint is None:
        from pipelinerl.preprocess.warm_start import batches_of, read_examples  # noqa: PLC0415 - few runs have one

        warm_start = (batches_of(read_examples(warm, policy.tokenizer), warm, config.seed), warm.learning_rate)
    queue = SampleQueue(reader, by_index=session.schedule.in_rounds, position=state.positions, counts=state.counters.queue)
    with (
        lines(run.metrics) as metrics,
        lines(run.trained) as trained,
        lines(run.published) as published,
    ):
        output = TrainerOutput(
            board=board,
            record=record or metrics.write,
            trained_log=trained,
            published_log=published,
            on_begin=begin if checkpoint else lambda: None,
            started_s=session.records_from_s,
            weighs_products=config.correction.sequence == "truncate",
        )
        trainer = Trainer(
            config.trainer,
            learner,
            queue,
            session.schedule,
            sender,
            output=output,
            stopped=run.stop_request.exists,
            checkpoints=run.checkpoints,
            tokenizer=policy.tokenizer,
            check=settle,
            state=state,
            checksum=session.plan.checksum,
            warm_start=warm_start,
        )
        try:
            yield trainer
        except BaseException as error:
            trainer.fail(type(error).__name__)
            raise


def session_record(session: Session) -> SessionRecord:
    """What a replay needs to know of this session, when its model is loaded."""
    plan = session.plan
    return SessionRecord(
        version=plan.version,
        inputs=plan.inputs,
        config=without_secrets(session.config),
        threads=torch.get_num_threads(),
        machine=this_computer(),
        rng=rng_state(),
        rollouts_bytes=plan.rollouts_bytes,
        trained_bytes=plan.trained_bytes,
    )
