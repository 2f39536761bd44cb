"""The generation side of a run: engine, environment and actor, in one thread.

first weights ─▶ evaluate ─▶ iterate ... iterate ─▶ finish ─▶ last weights ─▶ evaluate
                              (until the trainer has reached its goal, or the run is told to stop)
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pipelinerl.actor.actor import Actor
from pipelinerl.config.schema import RunConfig
from pipelinerl.engine import LocalEngine
from pipelinerl.environments.registry import make_environment
from pipelinerl.errors import StalledError
from pipelinerl.files import JsonLines
from pipelinerl.interfaces import Board, Environment, Schedule, StreamWriter, WeightReceiver
from pipelinerl.launch.plan import StartPlan
from pipelinerl.launch.run_directory import RunDirectory
from pipelinerl.metrics.records import EvaluationRecord
from pipelinerl.metrics.sinks import make_sink
from pipelinerl.models.loading import load_model, load_tokenizer, model_max_length, stop_token_ids
from pipelinerl.types import Group, StageStatus, TrainerProgress

LONGEST_SLOT = 2048
"""Slots are no longer than this unless `engine.max_length` says so: KV memory grows with it."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Everything that the generation side works with. Make it with `build_generation`."""

    config: RunConfig
    run: RunDirectory
    board: Board
    schedule: Schedule
    plan: StartPlan
    writer: StreamWriter[Group]
    receiver: WeightReceiver
    environment: Environment
    tokenizer: object
    engine: LocalEngine
    stop_token_ids: tuple[int, ...]
    started_s: float


def build_generation(
    config: RunConfig,
    run: RunDirectory,
    *,
    board: Board,
    schedule: Schedule,
    plan: StartPlan,
    writer: StreamWriter[Group],
    receiver: WeightReceiver,
    started_s: float,
) -> Generation:
    """Load model and environment. `started_s` is when the run started, by `time.monotonic`."""
    _starting(board, "loads the model")
    tokenizer = load_tokenizer(config.model)
    model = load_model(config.model, config.engine.device)
    stop = stop_token_ids(model, tokenizer)
    limit = config.engine.max_length or min(model_max_length(model) or LONGEST_SLOT, LONGEST_SLOT)
    engine = LocalEngine(
        model,
        slots=config.engine.slots,
        max_length=limit,
        prefill_tokens=config.engine.prefill_tokens,
        kv_on_update=config.engine.kv_on_update,
    )
    environment = make_environment(config.environment.kind, config.environment.args, tokenizer, config.seed)
    return Generation(
        config=config,
        run=run,
        board=board,
        schedule=schedule,
        plan=plan,
        writer=writer,
        receiver=receiver,
        environment=environment,
        tokenizer=tokenizer,
        engine=engine,
        stop_token_ids=stop,
        started_s=started_s,
    )


async def generate(side: Generation, *, stop: Callable[[], bool], between: Callable[[], object] = lambda: None) -> None:
    """Run to the end. `between` is called after every iteration (the embedded launcher trains there)."""
    engine, config = side.engine, side.config
    if not await _wait_for_weights(side, stop):
        return
    records = JsonLines(side.run.rollouts / "rollouts.jsonl")
    actor = Actor(
        environment=side.environment,
        engine=engine,
        tokenizer=side.tokenizer,  # type: ignore[arg-type]
        schedule=side.schedule,
        writer=side.writer,
        receiver=side.receiver,
        board=side.board,
        records=records,
        config=config.actor,
        seed=config.seed,
        slots=config.engine.slots,
        start_indices=side.plan.indices_to_start(),
        stop_token_ids=side.stop_token_ids,
        in_stream=[(kept.group, kept.left) for kept in side.plan.kept],
        settled_before=side.plan.settled,
    )
    if side.plan.checkpoint is None:
        await _evaluate(side, actor, "before")
    while not stop() and not _trainer(side).goal_reached:
        await actor.iterate()
        between()
    await actor.finish()
    records.close()
    if _trainer(side).goal_reached and not stop():
        await _take_last_weights(side, stop)
        await _evaluate(side, actor, "after")
    await actor.finish()


async def _wait_for_weights(side: Generation, stop: Callable[[], bool]) -> bool:
    """Take the trainer's first weights: those of the checkpoint in a resumed run, else those the model came with."""
    _starting(side.board, "waits for the trainer's first weights")
    while not stop():
        update = side.receiver.poll()
        if update is not None:
            side.receiver.acknowledge(side.engine.update_weights(update))
            return True
        await asyncio.sleep(0.01)
    return False


async def _take_last_weights(side: Generation, stop: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + side.config.launch.watchdog_s
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


async def _evaluate(side: Generation, actor: Actor, when: Literal["before", "after"]) -> None:
    config = side.config.evaluation
    if config.problems == 0:
        return
    records = JsonLines(side.run.rollouts / f"evaluation-{when}.jsonl")
    evaluation = await actor.evaluate(when, config, records)
    records.close()
    sink = make_sink(side.run.root)
    sink.write(
        EvaluationRecord.of(
            [problem.reward for problem in evaluation.problems],
            [problem.length for problem in evaluation.problems if problem.failure is None],
            when=when,
            version=side.engine.version,
            time_s=time.monotonic() - side.started_s,
        )
    )
    sink.close()


def _trainer(side: Generation) -> TrainerProgress:
    status = side.board.read("trainer")
    if status is not None and isinstance(status.progress, TrainerProgress):
        return status.progress
    return TrainerProgress()


def _starting(board: Board, detail: str) -> None:
    now = time.monotonic()
    for stage in ("engine", "actor"):
        board.publish(
            StageStatus(
                stage=stage,
                pid=os.getpid(),
                state="starting",
                detail=detail,
                since_s=now,
                written_s=now,
            )
        )
