"""Base classes of tasks with one prompt and one completion: subclasses define the prompt and the reward."""

from __future__ import annotations

import random
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

from pipelinerl.environments.prompts import Message, encode_prompt, has_chat_template, text_decoder
from pipelinerl.errors import EnvironmentSetupError
from pipelinerl.interfaces import GenerationClient, Tokenizer
from pipelinerl.types import Problem, Rollout, Turn

CACHED_PROMPTS = 64


class SingleTurn(ABC):
    """A subclass defines `problem`, `prompt` and `reward`, and `held_out` if evaluations use it.

    Constructor arguments of a subclass (after `tokenizer` and `seed`) are `environment.args` of the run file.
    """

    max_tokens: int | None = None
    """Maximum tokens of a completion for this task. None, or a value above `actor.max_tokens`, means `actor.max_tokens`."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.tokenizer = tokenizer
        self.seed = seed
        self._decode = text_decoder(tokenizer)
        self._prompt_ids: dict[str, tuple[int, ...]] = {}

    @abstractmethod
    def problem(self, index: int) -> Problem:
        """Training problem number `index`: a pure function of `index` and `self.seed`."""

    @abstractmethod
    def prompt(self, problem: Problem) -> str | Sequence[Message]:
        """The prompt: a text for the model to continue, or chat messages."""

    @abstractmethod
    def reward(self, problem: Problem, text: str) -> float:
        """The reward for the answer `text` (without special tokens)."""

    def held_out(self, count: int) -> Sequence[Problem]:  # noqa: ARG002 - for subclasses to use
        """The first `count` evaluation problems, which `problem` never returns. None by default."""
        return ()

    async def rollout(self, problem: Problem, client: GenerationClient) -> Rollout:
        prompt_ids = self._encode(self.prompt(problem))
        completion = await client.generate(prompt_ids, max_tokens=self.max_tokens)
        text = self._decode(completion.token_ids)
        turn = Turn(prompt_ids=prompt_ids, completion=completion, text=text)
        return Rollout(turns=(turn,), reward=self.reward(problem, text))

    def _encode(self, prompt: str | Sequence[Message]) -> tuple[int, ...]:
        """The prompt's ids, from a cache: encoding is the slowest step here, and the attempts of a group share a prompt."""
        key = prompt if isinstance(prompt, str) else repr(prompt)
        ids = self._prompt_ids.get(key)
        if ids is None:
            while len(self._prompt_ids) >= CACHED_PROMPTS:
                del self._prompt_ids[next(iter(self._prompt_ids))]
            ids = self._prompt_ids[key] = encode_prompt(self.tokenizer, prompt)
        return ids


# ---- a finite set of problems as an endless stream: each problem once per epoch


class Epochs:
    """Maps an index of the stream to one of `size` problems. The order depends on `name`, which includes the seed."""

    def __init__(self, size: int, name: str) -> None:
        self._size = size
        self._name = name
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def place(self, index: int) -> int:
        epoch, place = divmod(index, self._size)
        return self._order(epoch)[place]

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(self._size))
        random.Random(f"{self._name}/{epoch}").shuffle(order)
        return order


# ---- tasks that are a set of questions with answers

HELD_OUT_IN = 10


class QuestionPrompt:
    """Formats a question as a prompt: as a user message after `system` if `chat`, else by inserting it into `text`.

    `chat` defaults to whether the tokenizer has a chat template. Raises EnvironmentSetupError if `chat` is true without a
    template, or if `text` has no `{question}`.
    """

    def __init__(self, tokenizer: Tokenizer, *, chat: bool | None, system: str, text: str) -> None:
        if chat and not has_chat_template(tokenizer):
            raise EnvironmentSetupError(
                "environment.args.chat is true, but the model's tokenizer has no chat template: remove it, and set "
                "environment.args.text to a prompt with {question} in it"
            )
        if "{question}" not in text:
            raise EnvironmentSetupError("environment.args.text must have {question} in it, where the question goes")
        self._chat = has_chat_template(tokenizer) if chat is None else chat
        self._system = system
        self._text = text

    def __call__(self, question: str) -> str | Sequence[Message]:
        if not self._chat:
            return self._text.replace("{question}", question)
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, {"role": "user", "content": question}]


class QuestionSet(SingleTurn):
    """Problems with a `question` in their payload, read from files by `read`.

    The problems in `held_out_path` are for evaluation; without it, one in ten of `path` (by a hash of the question).
    A held-out question is never trained on, even if `path` has it too.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int,
        *,
        path: str | Sequence[str],
        held_out_path: str | Sequence[str] | None,
        read: Callable[[Path], list[Problem]],
        question_prompt: QuestionPrompt,
    ) -> None:
        """Raises EnvironmentSetupError if no problem is left to train on, and what `read` raises."""
        super().__init__(tokenizer, seed)
        self._question_prompt = question_prompt
        problems = _read_all(path, read)
        if held_out_path is None:
            self._held_out = [problem for problem in problems if is_held_out(problem.payload["question"])]
        else:
            self._held_out = _read_all(held_out_path, read)
        held_out_questions = {problem.payload["question"] for problem in self._held_out}
        self._training = [problem for problem in problems if problem.payload["question"] not in held_out_questions]
        if not self._training:
            raise EnvironmentSetupError(f"{path}: all of its {len(problems)} problems are held out; give it more")
        self._epochs = Epochs(len(self._training), f"math/{seed}")

    def problem(self, index: int) -> Problem:
        """Each problem once per epoch, in an order that depends on the seed and the epoch."""
        return self._training[self._epochs.place(index)]

    def held_out(self, count: int) -> Sequence[Problem]:
        return self._held_out[:count]

    def prompt(self, problem: Problem) -> str | Sequence[Message]:
        return self._question_prompt(problem.payload["question"])


def is_held_out(question: str) -> bool:
    """One question in ten, by a hash: independent of the order of the file."""
    return zlib.crc32(question.encode()) % HELD_OUT_IN == 0


def checked_format_reward(format_reward: float) -> float:
    """Raises EnvironmentSetupError unless `format_reward` is at least 0 and below the reward of a right answer, 1."""
    if not 0 <= format_reward < 1:
        raise EnvironmentSetupError(
            f"environment.args.format_reward is {format_reward}; it must be at least 0 and less than 1, what a right "
            "answer is worth"
        )
    return format_reward


def _read_all(paths: str | Sequence[str], read: Callable[[Path], list[Problem]]) -> list[Problem]:
    names = [paths] if isinstance(paths, str) else paths
    if not isinstance(names, (list, tuple)) or not names or not all(isinstance(name, str) for name in names):
        raise EnvironmentSetupError(f"environment.args.path is {paths!r}; it must be a file, or a list of files")
    problems = []
    for name in names:
        found = read(Path(name).expanduser())
        if not found:
            raise EnvironmentSetupError(f"{name} has no problems: it is empty")
        problems += found
    return problems
