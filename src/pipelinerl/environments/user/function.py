"""A task that is a file of examples and a function: `reward(completion: str, example: dict) -> float`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta

from pipelinerl.environments.data import read_split
from pipelinerl.environments.pool.messages import Limits
from pipelinerl.environments.pool.pool import FunctionPool
from pipelinerl.environments.prompts import Message, encode_prompt, has_chat_template, text_decoder
from pipelinerl.environments.registry import checked
from pipelinerl.environments.single_turn import Epochs
from pipelinerl.environments.user.code import describe, find_function, finite_number, names_a_function
from pipelinerl.environments.user.trial import try_out
from pipelinerl.errors import EnvironmentSetupError, RolloutError
from pipelinerl.interfaces import GenerationClient, Tokenizer
from pipelinerl.types import Problem, Rollout, Turn

REMEMBERED_PROMPTS = 64
ENDED = (TimeoutError, MemoryError, ChildProcessError)
"""How a call ends that ran into a limit, or brought its process down."""

Prompt = str | list[Message]


class Calls(Protocol):
    """Calls of the user's functions, by name: `FunctionPool`, or `InProcess`."""

    async def call(self, name: str, *arguments: Any) -> Any: ...


class InProcess:
    """The user's functions, called where we are: at no cost, and with nothing between their mistakes and the run."""

    def __init__(self, specs: dict[str, str]) -> None:
        self._specs = specs
        self._functions = {name: find_function(spec) for name, spec in specs.items()}

    async def call(self, name: str, *arguments: Any) -> Any:
        try:
            return self._functions[name](*arguments)
        except Exception as error:
            raise RuntimeError(f"{name}: {describe(error, self._specs[name])}") from error


class Function:
    """Problems are the lines of a file; a function of the user says what an answer to one is worth.

    data        file of JSON lines, or a list of them: an object a line, of which the functions get a dict
    reward      `path/to/file.py:function`: (completion, example) -> a finite number. The completion is text without special
                tokens, and may be empty
    prompt      the field with the prompt, or `path/to/file.py:function` too: (example) -> a text or chat messages
    held_out    which examples evaluations use and training never sees: a share of `data` (by a hash of the prompt), or a
                file of them
    chat        whether a text becomes the user's message in the model's chat template (default: if it has one), after
                `system` as the system message ("": none). Otherwise the model continues it
    isolate     call the functions in `workers` processes, each call with at most `timeout_s` of time and `memory_mb` of
                memory on top of what the process has once it is loaded. false: call them here, while the engine waits
    ended_reward    what an answer is worth whose reward ran into a limit or crashed; null: the rollout is dropped, as it is
                when the function raises something or returns what isn't a number
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int,
        *,
        data: str | Sequence[str],
        reward: str,
        prompt: str = "prompt",
        held_out: float | str | Sequence[str] = 0.1,
        chat: bool | None = None,
        system: str = "",
        isolate: bool = True,
        workers: int = 2,
        timeout_s: float = 10.0,
        memory_mb: int = 1024,
        ended_reward: float | None = None,
    ) -> None:
        """Raises EnvironmentSetupError for data and functions that can't be used; both are called once to find out."""
        checked(
            _Types,
            reward=reward,
            prompt=prompt,
            chat=chat,
            system=system,
            isolate=isolate,
            workers=workers,
            timeout_s=timeout_s,
            memory_mb=memory_mb,
            ended_reward=ended_reward,
        )
        self._tokenizer = tokenizer
        self._decode = text_decoder(tokenizer)
        self._chat = has_chat_template(tokenizer) if chat is None else chat
        if self._chat and not has_chat_template(tokenizer):
            raise EnvironmentSetupError("environment.args.chat is true, but the model's tokenizer has no chat template")
        self._system = system
        self._ended_reward = ended_reward
        self._encoded: dict[str, tuple[int, ...]] = {}
        self._field = None if names_a_function(prompt) else prompt
        self._training, self._held_out = read_split(data, held_out, self._check, self._key)
        functions = {"reward": reward} | ({} if self._field else {"prompt": prompt})
        limits = Limits(timeout_s=timeout_s, memory_mb=memory_mb)
        self._isolate, self._workers, self._limits = isolate, workers, limits
        self._calls: Calls = FunctionPool(functions, workers=workers, limits=limits) if isolate else InProcess(functions)
        try_out(self._trial(self._training[0]), 2 * limits.start_timeout_s, "an empty answer to the first example")
        self._epochs = Epochs(len(self._training), f"function/{seed}")

    def problem(self, index: int) -> Problem:
        """Every example once an epoch, in an order that depends on the seed and the epoch."""
        return self._training[self._epochs.place(index)]

    def held_out(self, count: int) -> Sequence[Problem]:
        return self._held_out[:count]

    async def rollout(self, problem: Problem, client: GenerationClient) -> Rollout:
        key = self._key(problem)
        prompt_ids = self._encoded.get(key) or self._remember(key, await self._prompt(problem.payload))
        completion = await client.generate(prompt_ids)
        text = self._decode(completion.token_ids)
        reward, metrics = await self._judged(text, problem.payload)
        turn = Turn(prompt_ids=prompt_ids, completion=completion, text=text)
        return Rollout(turns=(turn,), reward=reward, metrics=metrics)

    async def _judged(self, text: str, example: dict[str, Any]) -> tuple[float, dict[str, float]]:
        """The reward, and the metrics about it."""
        ended = 0.0
        try:
            reward = await self._reward(text, example)
        except ENDED:
            if self._ended_reward is None:
                raise
            reward, ended = self._ended_reward, 1.0
        return reward, {} if self._ended_reward is None else {"reward_ended": ended}

    async def _reward(self, text: str, example: dict[str, Any]) -> float:
        return finite_number(await self._calls.call("reward", text, example), "reward")

    async def _prompt(self, example: dict[str, Any]) -> Prompt:
        value = example[self._field] if self._field else await self._calls.call("prompt", example)
        if wrong := _wrong_prompt(value):
            raise RolloutError(f"prompt returned {wrong}")
        if not self._chat or not isinstance(value, str):
            checked: Prompt = value
            return checked
        system: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, {"role": "user", "content": value}]

    def _remember(self, key: str, prompt: Prompt) -> tuple[int, ...]:
        """The prompt's ids; the attempts of a group share them."""
        while len(self._encoded) >= REMEMBERED_PROMPTS:
            del self._encoded[next(iter(self._encoded))]
        ids = self._encoded[key] = encode_prompt(self._tokenizer, prompt)
        return ids

    async def _trial(self, problem: Problem) -> None:
        """What a mistake in the functions would cost every rollout is better known before the first."""
        encode_prompt(self._tokenizer, await self._prompt(problem.payload))
        await self._reward("", problem.payload)

    def _check(self, example: dict[str, Any]) -> str | None:
        if self._field is None:
            return None
        if self._field not in example:
            there = ", ".join(example) or "none"
            return f"has no field `{self._field}` for the prompt (it has: {there}); set environment.args.prompt"
        wrong = _wrong_prompt(example[self._field])
        return f"has {wrong} as its `{self._field}`" if wrong else None

    def _key(self, problem: Problem) -> str:
        """What makes two examples the same problem: the prompt, or all of it where a function makes the prompt."""
        what = problem.payload[self._field] if self._field else problem.payload
        return msgspec.json.encode(what, order="deterministic").decode()


def _wrong_prompt(value: object) -> str | None:
    """What `value` is if it is neither a text nor chat messages."""
    if isinstance(value, str):
        return None if value else "an empty text"
    try:
        messages = msgspec.convert(value, list[dict[str, str]])
    except msgspec.ValidationError:
        return f"a {type(value).__name__} that is neither a text nor chat messages"
    if not messages or any(message.keys() != {"role", "content"} for message in messages):
        return "chat messages that are not objects of `role` and `content`"
    return None


class _Types(msgspec.Struct, kw_only=True):
    """What a run file's values for these arguments must be."""

    reward: str
    prompt: str
    chat: bool | None
    system: str
    isolate: bool
    workers: Annotated[int, Meta(ge=1)]
    timeout_s: Annotated[float, Meta(gt=0)]
    memory_mb: Annotated[int, Meta(ge=1)]
    ended_reward: float | None
