"""A task defined by a file of examples and a reward function: `reward(completion: str, example: dict) -> float`."""

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

CACHED_PROMPTS = 64
ENDED_BY_LIMIT = (TimeoutError, MemoryError, ChildProcessError)
"""Raised for a call that exceeded a limit or crashed its process."""

Prompt = str | list[Message]


class Calls(Protocol):
    """Calls user functions by name: `FunctionPool` or `InProcess`."""

    async def call(self, name: str, *arguments: Any) -> Any: ...


class InProcess:
    """Calls user functions in this process: no overhead, but no limits and no protection from crashes either."""

    def __init__(self, specs: dict[str, str]) -> None:
        self._specs = specs
        self._functions = {name: find_function(spec) for name, spec in specs.items()}

    async def call(self, name: str, *arguments: Any) -> Any:
        try:
            return self._functions[name](*arguments)
        except Exception as error:
            raise RuntimeError(f"{name}: {describe(error, self._specs[name])}") from error


class Function:
    """Problems are the lines of a file; a user function computes the reward of an answer.

    data        file of JSON lines, or a list of files. Each line is an object, passed to the functions as a dict
    reward      `path/to/file.py:function`: (completion, example) -> a finite number. The completion is text without special
                tokens, and may be empty
    prompt      name of the field with the prompt, or `path/to/file.py:function`: (example) -> a text or chat messages
    held_out    examples for evaluation, never used in training: a share of `data` (by a hash of the prompt), or a file of
                examples
    chat        whether a text prompt becomes the user's message in the model's chat template (default: if it has one), after
                the system message `system` ("": none). Otherwise the model continues the text
    isolate     call the functions in `workers` processes. Each call may take `timeout_s`, and `memory_mb` of memory beyond
                what the process uses after its imports. false: call them in this process, while the engine waits
    ended_reward    reward of an answer whose reward function exceeded a limit or crashed. null: the rollout is dropped, as
                it is when the function raises an error or does not return a number
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
        """Raises EnvironmentSetupError for unusable data or functions. Each function is called once to check it."""
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
        self._prompt_ids: dict[str, tuple[int, ...]] = {}
        self._field = None if names_a_function(prompt) else prompt
        self._training, self._held_out = read_split(data, held_out, self._check, self._key)
        functions = {"reward": reward} | ({} if self._field else {"prompt": prompt})
        limits = Limits(timeout_s=timeout_s, memory_mb=memory_mb)
        self._isolate, self._workers, self._limits = isolate, workers, limits
        self._calls: Calls = FunctionPool(functions, workers=workers, limits=limits) if isolate else InProcess(functions)
        try_out(self._trial(self._training[0]), 2 * limits.start_timeout_s, "an empty answer to the first example")
        self._epochs = Epochs(len(self._training), f"function/{seed}")

    def problem(self, index: int) -> Problem:
        """Each example once per epoch, in an order that depends on the seed and the epoch."""
        return self._training[self._epochs.place(index)]

    def held_out(self, count: int) -> Sequence[Problem]:
        return self._held_out[:count]

    async def rollout(self, problem: Problem, client: GenerationClient) -> Rollout:
        key = self._key(problem)
        prompt_ids = self._prompt_ids.get(key) or self._cache_prompt(key, await self._prompt(problem.payload))
        completion = await client.generate(prompt_ids)
        text = self._decode(completion.token_ids)
        reward, metrics = await self._score(text, problem.payload)
        turn = Turn(prompt_ids=prompt_ids, completion=completion, text=text)
        return Rollout(turns=(turn,), reward=reward, metrics=metrics)

    async def _score(self, text: str, example: dict[str, Any]) -> tuple[float, dict[str, float]]:
        """The reward, and whether the call was ended as a metric (only with `ended_reward`)."""
        ended = 0.0
        try:
            reward = await self._reward(text, example)
        except ENDED_BY_LIMIT:
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

    def _cache_prompt(self, key: str, prompt: Prompt) -> tuple[int, ...]:
        """Encode a prompt and cache its ids: the attempts of a group share them."""
        while len(self._prompt_ids) >= CACHED_PROMPTS:
            del self._prompt_ids[next(iter(self._prompt_ids))]
        ids = self._prompt_ids[key] = encode_prompt(self._tokenizer, prompt)
        return ids

    async def _trial(self, problem: Problem) -> None:
        """Call each function once, so that errors appear before the first rollout."""
        encode_prompt(self._tokenizer, await self._prompt(problem.payload))
        await self._reward("", problem.payload)

    def _check(self, example: dict[str, Any]) -> str | None:
        if self._field is None:
            return None
        if self._field not in example:
            fields = ", ".join(example) or "none"
            return f"has no field `{self._field}` for the prompt (it has: {fields}); set environment.args.prompt"
        wrong = _wrong_prompt(example[self._field])
        return f"has {wrong} as its `{self._field}`" if wrong else None

    def _key(self, problem: Problem) -> str:
        """Identifies a problem: its prompt, or the whole example if a function makes the prompt."""
        what = problem.payload[self._field] if self._field else problem.payload
        return msgspec.json.encode(what, order="deterministic").decode()


def _wrong_prompt(value: object) -> str | None:
    """A description of `value` if it is not a valid prompt; else None."""
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
    """Types and ranges of these arguments in a run file."""

    reward: str
    prompt: str
    chat: bool | None
    system: str
    isolate: bool
    workers: Annotated[int, Meta(ge=1)]
    timeout_s: Annotated[float, Meta(gt=0)]
    memory_mb: Annotated[int, Meta(ge=1)]
    ended_reward: float | None
