"""Base classes of tasks with one prompt and one completion: subclasses define the prompt and the reward."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple, TypeAlias

from msgspec import Meta

from pipelinerl.environments.options import AtLeastOne, Options
from pipelinerl.environments.prompts import Message, chat_messages, check_chat, encode_prompt, text_decoder
from pipelinerl.errors import EnvironmentSetupError
from pipelinerl.interfaces import GenerationClient, Tokenizer
from pipelinerl.types import Problem, Rollout, Turn

CACHED_PROMPTS = 64


class Judgement(NamedTuple):
    """The reward of an attempt, and its metrics."""

    reward: float
    metrics: Mapping[str, float] = {}


class Task(ABC):
    """A subclass defines `problem` and `rollout`, and `held_out` if evaluations use it.

    Constructor arguments of a subclass (after `tokenizer` and `seed`) are `environment.args` of the run file.
    """

    max_tokens: int | None = None
    """Maximum tokens of a turn for this task. None, or a value above `actor.max_tokens`, means `actor.max_tokens`."""

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


class JudgedTurn(Task):
    """A subclass defines `problem`, `prompt` and `judge`, and `held_out` if evaluations use it.

    `judge` may await something, such as a function in another process, while generation continues.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        super().__init__(tokenizer, seed)
        self._decode = text_decoder(tokenizer)
        self._prompt_ids: dict[str, tuple[int, ...]] = {}

    @abstractmethod
    def prompt(self, problem: Problem) -> str | Sequence[Message]:
        """The prompt: a text for the model to continue, or chat messages."""

    @abstractmethod
    async def judge(self, problem: Problem, turn: Turn) -> Judgement:
        """Judges the answer `turn.text` (without special tokens)."""

    async def rollout(self, problem: Problem, client: GenerationClient) -> Rollout:
        prompt_ids = self._encode(self.prompt(problem))
        completion = await client.generate(prompt_ids, max_tokens=self.max_tokens)
        turn = Turn(prompt_ids=prompt_ids, completion=completion, text=self._decode(completion.token_ids))
        reward, metrics = await self.judge(problem, turn)
        return Rollout(turns=(turn,), reward=reward, metrics=dict(metrics))

    def _encode(self, prompt: str | Sequence[Message]) -> tuple[int, ...]:
        """The prompt's ids, from a cache: encoding is the slowest step here, and the attempts of a group share a prompt."""
        key = prompt if isinstance(prompt, str) else repr(prompt)
        ids = self._prompt_ids.get(key)
        if ids is None:
            while len(self._prompt_ids) >= CACHED_PROMPTS:
                del self._prompt_ids[next(iter(self._prompt_ids))]
            ids = self._prompt_ids[key] = encode_prompt(self.tokenizer, prompt)
        return ids


class SingleTurn(JudgedTurn):
    """A subclass defines `problem`, `prompt` and `reward`, and `held_out` if evaluations use it."""

    @abstractmethod
    def reward(self, problem: Problem, text: str) -> float:
        """The reward for the answer `text` (without special tokens)."""

    async def judge(self, problem: Problem, turn: Turn) -> Judgement:
        return Judgement(self.reward(problem, turn.text))


# ---- tasks that are questions with answers

HELD_OUT_IN = 10
FormatReward: TypeAlias = Annotated[float, Meta(ge=0, lt=1)]
"""The reward of a wrong answer in the right format: less than that of a right answer, 1."""


class QuestionOptions(Options, kw_only=True):
    """How a question becomes a prompt. Subclasses set the defaults of `system` and `text`."""

    chat: bool | None = None
    """Whether the question is the user's message in the model's chat template. null: if the model has one."""
    system: str = ""
    """The system message of a chat; "" for none."""
    text: str = "{question}"
    """The prompt if it is not a chat, with the question in place of `{question}`."""
    max_tokens: AtLeastOne | None = None
    """Longest completion, if `actor.max_tokens` is too long for this task."""

    def __post_init__(self) -> None:
        if "{question}" not in self.text:
            raise EnvironmentSetupError("environment.args.text must have {question} in it, where the question goes")


class QuestionPrompt:
    """Formats a question as `options` say. Raises EnvironmentSetupError if `chat` is true without a chat template."""

    def __init__(self, tokenizer: Tokenizer, options: QuestionOptions) -> None:
        self._chat = check_chat(tokenizer, options.chat)
        self._options = options

    def __call__(self, question: str) -> str | Sequence[Message]:
        if not self._chat:
            return self._options.text.replace("{question}", question)
        return chat_messages(self._options.system, question)


def is_held_out(question: str) -> bool:
    """One question in ten, by a hash: independent of the order of a file, of the seed and of the difficulty."""
    return zlib.crc32(question.encode()) % HELD_OUT_IN == 0
