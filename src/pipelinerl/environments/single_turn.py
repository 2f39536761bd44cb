"""Base classes of tasks with one prompt and one completion: subclasses define the prompt and the reward."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from pipelinerl.environments.prompts import text_decoder
from pipelinerl.errors import EnvironmentSetupError
from pipelinerl.interfaces import GenerationClient, Tokenizer
from pipelinerl.models.encoding import NO_OPTIONS, Message, encode_prompt
from pipelinerl.types import Problem, Rollout, Turn

if TYPE_CHECKING:
    from pipelinerl.environments.user.pool import FunctionPool

CACHED_PROMPTS = 64
HELD_OUT_IN = 10


def is_held_out(question: str) -> bool:
    """One question in ten, by a hash: independent of the order of a file, of the seed and of the difficulty."""
    return zlib.crc32(question.encode()) % HELD_OUT_IN == 0


Score: TypeAlias = tuple[float, Mapping[str, float]]
"""The reward of an attempt, and its metrics."""


class Task(ABC):
    """A subclass defines `problem` and `rollout`, and `held_out` if evaluations use it.

    Constructor arguments of a subclass (after `tokenizer` and `seed`) are `environment.args` of the run file.
    """

    max_tokens: int | None = None
    """Maximum tokens of a turn for this task. None, or a value above `actor.max_tokens`, means `actor.max_tokens`."""
    template_options: Mapping[str, Any] = NO_OPTIONS
    """Options of the model's chat template, such as `{"enable_thinking": False}`."""
    isolate_reward = True
    """Whether the `reward` of a user's class runs in processes with limits, each with an instance of its own. False: in this
    process, for a reward that needs the state of this instance."""
    reward_limits: Mapping[str, Any] = {}
    """Limits of these processes that differ from the defaults of the arguments of `function`."""
    reward_pool: FunctionPool | None = None
    """Set by `make_environment`."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.tokenizer = tokenizer
        self.seed = seed

    @abstractmethod
    def problem(self, index: int) -> Problem:
        """Training problem number `index`: a pure function of `index` and `self.seed`."""

    def held_out(self, count: int) -> Sequence[Problem]:  # noqa: ARG002 - for subclasses to use
        """The first `count` evaluation problems, which `problem` never returns. None by default."""
        return ()

    @abstractmethod
    async def rollout(self, problem: Problem, client: GenerationClient) -> Rollout:
        """One attempt at a problem."""

    async def call_reward(self, problem: Problem, *answer: Any) -> Any:
        """What `reward`, the method of a subclass, returns for an answer. It runs in the pool if there is one."""
        if self.reward_pool is not None:
            return await self.reward_pool.call("reward", problem, *answer)
        reward = getattr(self, "reward")  # noqa: B009 - only some tasks have it
        return reward(problem, *answer)


class SingleTurn(Task):
    """A subclass defines `problem`, `prompt` and `reward` or `judge`, and `held_out` if evaluations use it.

    `reward(problem, text)` returns a number, also with metrics, in a dict or a pair.
    """

    costs = False
    """Whether judging may cost money: then only an empty answer is tried before a run."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        """Raises EnvironmentSetupError for a subclass with neither `reward` nor `judge`."""
        super().__init__(tokenizer, seed)
        if type(self).judge is SingleTurn.judge and not hasattr(self, "reward"):
            raise EnvironmentSetupError(f"{type(self).__name__} has no method `reward(self, problem, text)`")
        self._decode = text_decoder(tokenizer)
        self._prompt_ids: dict[str, tuple[int, ...]] = {}

    @abstractmethod
    def prompt(self, problem: Problem) -> str | Sequence[Message]:
        """The prompt: a text for the model to continue, or chat messages."""

    def teacher_prompt(self, problem: Problem) -> str | Sequence[Message] | None:  # noqa: ARG002 - for subclasses to use
        """The prompt with which `trainer.teacher` scores answers, such as one with a hint. None: the model's prompt."""
        return None

    async def judge(self, problem: Problem, turn: Turn) -> Score:
        """The score of the answer `turn.text`, which has no stop token: by default, what `reward` returns.

        It may await something, such as a function in another process, while generation continues.
        """
        returned = await self.call_reward(problem, turn.text)
        if isinstance(returned, float):
            return returned, {}
        from pipelinerl.environments.user.code import score_of  # noqa: PLC0415 - the rewards of this package are floats

        return score_of(returned, "reward")

    async def rollout(self, problem: Problem, client: GenerationClient) -> Rollout:
        prompt_ids, teacher_prompt = self._encode(self.prompt(problem)), self.teacher_prompt(problem)
        completion = await client.generate(prompt_ids, max_tokens=self.max_tokens)
        turn = Turn(
            prompt_ids=prompt_ids,
            completion=completion,
            text=self._decode(completion.answer_ids),
            teacher_prompt_ids=() if teacher_prompt is None else self._encode(teacher_prompt),
        )
        reward, metrics = await self.judge(problem, turn)
        return Rollout(turns=(turn,), reward=reward, metrics=dict(metrics))

    def _encode(self, prompt: str | Sequence[Message]) -> tuple[int, ...]:
        key = prompt if isinstance(prompt, str) else repr(prompt)
        prompt_ids = self._prompt_ids.get(key)
        if prompt_ids is None:  # encoding is the slowest step here, and the attempts of a group share a prompt
            while len(self._prompt_ids) >= CACHED_PROMPTS:
                del self._prompt_ids[next(iter(self._prompt_ids))]
            prompt_ids = self._prompt_ids[key] = encode_prompt(self.tokenizer, prompt, self.template_options)
        return prompt_ids
