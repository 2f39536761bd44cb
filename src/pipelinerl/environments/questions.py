"""Base of tasks that are a set of questions with answers, and how a question is put to a model."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from pipelinerl.environments.epochs import Epochs
from pipelinerl.environments.prompts import Message, has_chat_template
from pipelinerl.environments.single_turn import SingleTurn
from pipelinerl.errors import EnvironmentSetupError
from pipelinerl.interfaces import Tokenizer
from pipelinerl.types import Problem

HELD_OUT_IN = 10


class Asking:
    """A question as chat messages (`chat`; default: if the model has a template) after `system`, or within `text`.

    Raises EnvironmentSetupError for a chat without a template, and for a text without a place for the question.
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
    """Problems with a `question` in their payload, from files that `read` reads.

    Those of `held_out_path` are for evaluation, else every tenth of `path` is. A question that is held out is never
    trained on, even if `path` has it too.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int,
        *,
        path: str | Sequence[str],
        held_out_path: str | Sequence[str] | None,
        read: Callable[[Path], list[Problem]],
        asking: Asking,
    ) -> None:
        """Raises EnvironmentSetupError if no problem is left to train on, and what `read` raises."""
        super().__init__(tokenizer, seed)
        self.prompt_of = asking
        problems = _read_all(path, read)
        if held_out_path is None:
            self._held_out = [problem for problem in problems if is_held_out(problem.payload["question"])]
        else:
            self._held_out = _read_all(held_out_path, read)
        unseen = {problem.payload["question"] for problem in self._held_out}
        self._training = [problem for problem in problems if problem.payload["question"] not in unseen]
        if not self._training:
            raise EnvironmentSetupError(f"{path}: all of its {len(problems)} problems are held out; give it more")
        self._epochs = Epochs(len(self._training), f"math/{seed}")

    def problem(self, index: int) -> Problem:
        """Every problem once an epoch, in an order that depends on the seed and the epoch."""
        return self._training[self._epochs.place(index)]

    def held_out(self, count: int) -> Sequence[Problem]:
        return self._held_out[:count]

    def prompt(self, problem: Problem) -> str | Sequence[Message]:
        return self.prompt_of(problem.payload["question"])


def is_held_out(question: str) -> bool:
    """One question in ten, whatever the order of the file."""
    return zlib.crc32(question.encode()) % HELD_OUT_IN == 0


def checked_format_reward(format_reward: float) -> float:
    """Raises EnvironmentSetupError unless it is less than what a right answer is worth."""
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
