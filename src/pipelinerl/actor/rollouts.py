"""Runs one attempt at one problem: the environment's code under a time limit, with everything it returns checked.

`RolloutContext` is what all attempts of a generation process share.

An attempt ends in a checked `Rollout` or in a `Failure`. Errors of the environment are not propagated, so that a bad
attempt costs only itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar, cast

import msgspec

from pipelinerl.actor.client import Awake, RolloutClient
from pipelinerl.actor.failures import Failure, failure_of
from pipelinerl.config.schema import ActorConfig, PrefixPolicy
from pipelinerl.errors import RolloutError
from pipelinerl.interfaces import AsyncEngine, Environment, ScoresGroups, Tokenizer
from pipelinerl.types import Completion, Problem, Rollout, SamplingParams, Turn, finite, type_name

T = TypeVar("T")

IDLE_S = 0.002  # a pause after a step of an engine that had nothing to do
GRACE_S = 1.0
"""Time that cancelled code has to end."""


async def advance(engine: AsyncEngine, awake: Awake) -> None:
    """Let the running attempts submit their requests, and step the engine; pause if it has nothing to do."""
    await awake.settle()
    if not await engine.advance():
        await asyncio.sleep(IDLE_S)


def sampling_of(config: ActorConfig, stop_token_ids: Sequence[int]) -> SamplingParams:
    """The sampling parameters of a run file, for a model with these stop tokens."""
    return SamplingParams(
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        stop_token_ids=tuple(stop_token_ids),
    )


class RolloutContext:
    """What training rollouts and evaluations of a generation process share: `slots` is the engine's H, and `sampling` and
    the time limit are those of `config`. `prefix`: the run file's `engine.prefix`.
    """

    def __init__(
        self,
        config: ActorConfig,
        environment: Environment,
        engine: AsyncEngine,
        tokenizer: Tokenizer,
        *,
        seed: int,
        slots: int,
        stop_token_ids: Sequence[int],
        prefix: PrefixPolicy = "keep",
        notes: tuple[str, ...] = (),
    ) -> None:
        self.environment, self.engine, self.tokenizer = environment, engine, tokenizer
        self.sampling = sampling_of(config, stop_token_ids)
        self.rollout_timeout_s = config.rollout_timeout_s
        self.seed, self.slots, self.notes = seed, slots, notes
        self.awake = Awake()
        self._prefix = prefix

    def rollout_client(self, name: str, seed: int, began: int | None = None) -> RolloutClient:
        """The client of a rollout that is about to start. `began`: version with which its group began, if it has one."""

        def reuses_from() -> int | None:
            oldest = self.engine.version if began is None or self._prefix == "version" else began
            return None if self._prefix == "off" else oldest

        return RolloutClient(
            self.engine, self.tokenizer, self.sampling, name=name, seed=seed, awake=self.awake, reuses_from=reuses_from
        )


async def attempt(environment: Environment, problem: Problem, client: RolloutClient, timeout_s: float) -> Rollout | Failure:
    """Run one rollout until it ends, fails or times out. Cancelling this cancels the rollout and raises CancelledError."""

    async def play() -> Rollout:
        return check_rollout(await environment.rollout(problem, client), client.produced())

    try:
        return await guarded(play, timeout_s, "the rollout")
    finally:
        client.close()


async def guarded(code: Callable[[], Coroutine[Any, Any, T]], timeout_s: float, what: str) -> T | Failure:
    """The result of user code, which is cancelled at its time limit. Cancelling this raises CancelledError.

    Code that refuses to be cancelled is closed after `GRACE_S`: no event loop could be closed otherwise. Code that computes
    without yielding blocks the thread, so the run's watchdog ends the run.
    """

    async def contained() -> T | Failure:
        try:
            return await code()
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except asyncio.CancelledError as error:
            return failure_of(error)._replace(message="the environment awaited something that was cancelled")
        except BaseException as error:  # noqa: BLE001 - user code may raise anything: it is a failure of this attempt
            return failure_of(error)

    running = contained()
    task = asyncio.create_task(running)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
    finally:
        expired = not task.done()
        if expired:
            task.cancel()
            try:
                await asyncio.wait({task}, timeout=GRACE_S)
            finally:  # also when this is cancelled meanwhile, as all tasks are at the end of a loop, which waits for them
                if not task.done():
                    with suppress(RuntimeError):  # if it refuses this, too, it is left suspended
                        running.close()
                    task.cancel()
            await asyncio.wait({task}, timeout=GRACE_S)
    if not expired:
        return task.result()
    ended = task.result() if task.done() and task.exception() is None else None
    where = ended.traceback if isinstance(ended, Failure) else ""
    return Failure("timeout", f"{what} took longer than {timeout_s:g} s", where)


def problem_for(environment: Environment, index: int) -> tuple[Problem, Problem] | Failure:
    """Problem number `index`: the environment's object, and a copy that went through JSON, as it is recorded."""
    try:
        problem = environment.problem(index)
        if not isinstance(cast("object", problem), Problem):
            return Failure("raised", f"problem({index}) returned {type_name(problem)}, not a Problem")
        return problem, msgspec.json.decode(msgspec.json.encode(problem), type=Problem)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything
        failure = failure_of(error)
        return failure._replace(message=f"problem({index}): {failure.message}")


def check_rollout(returned: object, produced: Mapping[str, Turn]) -> Rollout:
    """Check and normalise `returned`: turns must be exactly what the engine produced; reward and metrics must be finite.

    Raises RolloutError, saying what is wrong.
    """
    if not isinstance(returned, Rollout):
        raise RolloutError(f"the environment returned {type_name(returned)}, not a Rollout")
    if not isinstance(returned.turns, (tuple, Sequence)) or not returned.turns:
        raise RolloutError("the rollout has no turns")
    turns: dict[str, Turn] = {}
    for number, turn in enumerate(returned.turns):
        checked = _check_turn(turn, number, produced)
        if checked.completion.request_id in turns:
            raise RolloutError(f"turn {number} repeats request {checked.completion.request_id}")
        turns[checked.completion.request_id] = checked
    reward, metrics = finite(returned.reward, "the reward"), metrics_of(returned.metrics)
    return Rollout(turns=tuple(turns.values()), reward=reward, metrics=metrics)


def metrics_of(metrics: object) -> dict[str, float]:
    if not isinstance(metrics, (dict, Mapping)):
        raise RolloutError(f"metrics are {type_name(metrics)}, not a dict of numbers")
    return {str(name): finite(value, f"metric {name!r}") for name, value in metrics.items()}


def _check_turn(turn: object, number: int, produced: Mapping[str, Turn]) -> Turn:
    if not isinstance(turn, Turn) or not isinstance(turn.completion, Completion):
        raise RolloutError(f"turn {number} is {type_name(turn)}, not a Turn with a Completion")
    request_id = turn.completion.request_id
    if request_id not in produced:
        raise RolloutError(f"turn {number}: this rollout's client has produced no completion {request_id!r}")
    prompt_ids, completion = produced[request_id].prompt_ids, produced[request_id].completion
    fields = () if turn.completion is completion else Completion.__struct_fields__
    for field in fields:
        if getattr(turn.completion, field) != getattr(completion, field):
            raise RolloutError(f"turn {number}: `{field}` of {request_id} is not what the engine produced")
    if tuple(turn.prompt_ids) != prompt_ids:
        raise RolloutError(f"turn {number}: `prompt_ids` are not the ids that {request_id} was generated from")
    if not completion.token_ids:
        raise RolloutError(f"turn {number}: {request_id} has no tokens")
    if not isinstance(turn.text, str):
        raise RolloutError(f"turn {number}: `text` is {type_name(turn.text)}, not a string")
    text = turn.text.encode(errors="replace").decode()  # a lone surrogate can't be written as JSON
    reward = None if turn.reward is None else finite(turn.reward, f"the reward of turn {number}")
    teachers = tuple(turn.teacher_prompt_ids)
    if not all(isinstance(token, int) and token >= 0 for token in teachers):
        raise RolloutError(f"turn {number}: `teacher_prompt_ids` are not token ids")
    return Turn(prompt_ids=prompt_ids, completion=completion, text=text, reward=reward, teacher_prompt_ids=teachers)


async def score(
    environment: ScoresGroups, problem: Problem, rollouts: Sequence[Rollout], timeout_s: float
) -> list[Rollout] | Failure:
    """The rollouts of a group with the rewards and metrics that the environment gives them when all have ended."""

    async def compare() -> list[Rollout]:
        scored = await environment.score_group(problem, rollouts)
        if not isinstance(scored, Sequence) or len(scored) != len(rollouts):
            raise RolloutError(f"score_group returned {type_name(scored)}, not a list of {len(rollouts)} rollouts")
        made = []
        for before, after in zip(rollouts, scored, strict=True):
            if not isinstance(cast("object", after), Rollout) or after.turns != before.turns:
                raise RolloutError("score_group may change only rewards and metrics, and not the order of the rollouts")
            reward, metrics = finite(after.reward, "the reward"), metrics_of(after.metrics)
            made.append(msgspec.structs.replace(before, reward=reward, metrics=metrics))
        return made

    return await guarded(compare, timeout_s, "score_group")
