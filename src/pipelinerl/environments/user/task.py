"""The `reward` of a user's class in processes of the pool (`pool.py`), each of which makes an instance of the class."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta

from pipelinerl.environments.options import AtLeastOne, Seconds
from pipelinerl.environments.registry import build
from pipelinerl.environments.single_turn import Task
from pipelinerl.environments.user.code import UserFunction, retried
from pipelinerl.environments.user.pool import FunctionPool
from pipelinerl.environments.user.worker import Limits, TaskSource
from pipelinerl.errors import EnvironmentSetupError
from pipelinerl.interfaces import Tokenizer
from pipelinerl.types import Problem

START_TIMEOUT_S = 600.0
"""How long an instance may take to construct. The rollouts that wait for it have their own limit."""
REWARD = "reward"


class _Attributes(msgspec.Struct):
    """The attributes of a class that are the limits of its reward."""

    reward_workers: AtLeastOne
    reward_timeout_s: Seconds
    reward_retries: Annotated[int, Meta(ge=0)]
    reward_memory_mb: AtLeastOne
    reward_writes: tuple[str, ...] | None


class RewardPool:
    """Calls the `reward` of a user's class in processes with limits. No process is started before the first call."""

    def __init__(self, task: Task, kind: str, args: Mapping[str, Any], tokenizer: Tokenizer, seed: int) -> None:
        """Raises EnvironmentSetupError for limits that are none, and for arguments that can't be sent to a process."""
        try:
            limits = msgspec.convert(task, _Attributes, from_attributes=True)
        except msgspec.ValidationError as error:
            raise EnvironmentSetupError(f"environment {kind}: its attribute is wrong: {error}") from error
        source = TaskSource(
            kind=kind,
            args=dict(args),
            seed=seed,
            tokenizer=getattr(tokenizer, "name_or_path", ""),
            chat_template=getattr(tokenizer, "chat_template", None),
            remote_code=type(tokenizer).__module__.startswith("transformers_modules"),
            search=[str(place) for place in sys.path],
        )
        try:
            msgspec.json.encode(source)
        except TypeError as error:
            raise EnvironmentSetupError(
                f"environment.args of {kind} are not JSON, so no other process can have them ({error}); use JSON, or set "
                "`isolate_reward = False` in the class"
            ) from error
        self._retries = limits.reward_retries
        self._pool = FunctionPool(
            {REWARD: kind},
            workers=limits.reward_workers,
            limits=Limits(
                timeout_s=limits.reward_timeout_s,
                memory_mb=limits.reward_memory_mb,
                start_timeout_s=START_TIMEOUT_S,
                writes=limits.reward_writes,
            ),
            task=source,
        )

    async def call(self, problem: Problem, *answer: Any) -> Any:
        """What `reward` returns. Raises as `FunctionPool.call`."""
        try:
            return await retried(partial(self._pool.call, REWARD, problem, *answer), self._retries)
        except RuntimeError as error:
            if not any(f": {name}: " in str(error) for name in ("AttributeError", "KeyError")):
                raise
            raise RuntimeError(
                f"{error} (`reward` has another process and instance than the other methods; if it needs what they have "
                "stored, set `isolate_reward = False` in the class)"
            ) from None

    def close(self) -> None:
        """End the processes; they also end with this one."""
        self._pool.close()


# ---- in a process of the pool


def reward_of(source: TaskSource) -> UserFunction:
    """The `reward` of a new instance. Raises EnvironmentSetupError."""
    sys.path += [place for place in source.search if place not in sys.path]
    tokenizer = _LazyTokenizer(source)
    task: Any = build(source.kind, source.args, cast("Tokenizer", tokenizer), source.seed)
    if "tokenizer" in getattr(getattr(task.reward, "__code__", None), "co_names", ()):
        tokenizer.load()  # a call has no time for it

    def reward(problem: object, *answer: Any) -> Any:
        return task.reward(msgspec.convert(problem, Problem), *answer)

    return reward


class _LazyTokenizer:
    """The model's tokenizer, loaded when it is first used: that takes seconds, and few rewards need it."""

    def __init__(self, source: TaskSource) -> None:
        self._source = source
        self.chat_template = source.chat_template
        self._loaded: Any = None

    def load(self) -> Any:
        """The tokenizer itself."""
        if not self._source.tokenizer:
            raise EnvironmentSetupError(
                f"where the tokenizer of {self._source.kind} comes from is not known, so the process of `reward` has none; "
                "set `isolate_reward = False` in the class"
            )
        if self._loaded is None:
            from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds

            self._loaded = AutoTokenizer.from_pretrained(self._source.tokenizer, trust_remote_code=self._source.remote_code)
        return self._loaded

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.load()(*arguments, **options)

    def __len__(self) -> int:
        return len(self.load())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.load(), name)
