"""Loads an environment of verifiers and runs its rollouts, with the policy model as a client of verifiers."""

from __future__ import annotations

import asyncio
import inspect
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from verifiers.clients.client import Client
from verifiers.envs.env_group import EnvGroup
from verifiers.envs.environment import Environment
from verifiers.errors import OverlongPromptError
from verifiers.rubrics.rubric import Rubric
from verifiers.rubrics.rubric_group import RubricGroup
from verifiers.types import Response, ResponseMessage, ResponseTokens, ToolCall, Usage
from verifiers.utils.env_utils import env_module_name

from pipelinerl.environments.chat.conversation import ChatAnswer, Conversation
from pipelinerl.environments.user.code import in_daemon_thread, is_unreachable
from pipelinerl.errors import EnvironmentSetupError, PromptTooLongError, RolloutError
from pipelinerl.interfaces import GenerationClient
from pipelinerl.types import Problem, Rollout
from pipelinerl.user_code import describe, find_function

# ---- loading: by name, or by a function in a user's file


class LoadedEnvironment(NamedTuple):
    """An environment and its rows as problems. `evaluation` is None if it has no `eval_dataset`."""

    name: str
    environment: Environment
    training: list[Problem]
    evaluation: list[Problem] | None


def load_environment(installed: str, load: str, arguments: Mapping[str, Any]) -> LoadedEnvironment:
    """The environment named `installed`, or what the function `load` returns. The other argument is "".

    Raises EnvironmentSetupError, with one line, if it can't be loaded or has no data to train on.
    """
    spec = load or f"{env_module_name(installed)}:load_environment"
    module = load.rpartition(":")[0]
    name = installed or (Path(module).stem if module.endswith(".py") else module)  # in problem ids
    with _signal_handlers_kept():
        function = find_function(spec)
        try:
            environment = function(**arguments)
        except Exception as error:
            raise EnvironmentSetupError(f"environment {name} can't be loaded: {describe(error, spec)}") from error
        if not isinstance(environment, Environment):
            raise EnvironmentSetupError(f"{spec} returned a {type(environment).__name__}, not a verifiers.Environment")
        environment.env_id, environment.env_args = environment.env_id or name, environment.env_args or dict(arguments)
        try:
            dataset, eval_dataset = environment.build_dataset(), environment.build_eval_dataset()
        except Exception as error:
            raise EnvironmentSetupError(
                f"the data of environment {name} can't be loaded: {describe(error, spec)}"
            ) from error
    training = _problems(name, dataset)
    if not training:
        raise EnvironmentSetupError(f"environment {name} has no dataset to train on")
    evaluation = None if eval_dataset is None else _problems(f"{name}/held-out", eval_dataset)
    return LoadedEnvironment(name, environment, training, evaluation)


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Restore the handlers of SIGINT and SIGTERM, which every environment of verifiers replaces."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def _problems(name: str, dataset: Any) -> list[Problem]:
    """Each row is a payload, unchanged. Raises EnvironmentSetupError if the first row can't be encoded as JSON."""
    problems = [Problem(id=f"{name}/{number}", payload=dict(row)) for number, row in enumerate(dataset or ())]
    try:
        msgspec.json.encode(problems[:1])
    except TypeError as error:
        raise EnvironmentSetupError(f"the rows of environment {name} are not JSON: {error}") from error
    return problems


# ---- the policy model: messages become exact ids, and sampled tokens are never encoded again

MODEL = "policy"


class PolicyClient(Client):  # type: ignore[misc]  # verifiers is not typed for mypy
    """The model calls of one rollout. Sampling follows the run's settings; `sampling_args` of an environment are ignored.

    `failure` is the exception of the latest call. `too_long` is set when a prompt did not fit: verifiers then ends the
    rollout and scores it as it is.
    """

    def __init__(self, client: GenerationClient, template_options: Mapping[str, Any]) -> None:
        self.conversation = Conversation(client, template_options=template_options)
        super().__init__(self.conversation)
        self.failure: Exception | None = None
        self.too_long: PromptTooLongError | None = None

    def setup_client(self, config: Any) -> Any:
        raise TypeError(f"a client of the policy can't be made from a {type(config).__name__}")

    async def close(self) -> None:
        """Does nothing."""

    async def to_native_tool(self, tool: Any) -> dict[str, Any]:
        """The tool without `strict`: it is a decoding option of APIs, and a template would show it to the model."""
        function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        return {"type": "function", "function": function}

    async def to_native_prompt(self, messages: Sequence[Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        return [_openai_message(message) for message in messages], {}

    async def get_native_response(
        self,
        prompt: list[dict[str, Any]],
        model: str,  # noqa: ARG002 - there is only one
        sampling_args: Mapping[str, Any],  # noqa: ARG002 - the run's settings apply
        tools: list[dict[str, Any]] | None = None,
        **_: Any,
    ) -> ChatAnswer:
        self.failure = None
        try:
            return await self.conversation.ask(prompt, tools or ())
        except PromptTooLongError as error:
            self.too_long = error
            raise OverlongPromptError(str(error)) from error
        except Exception as error:
            self.failure = error
            raise

    async def raise_from_native_response(self, response: ChatAnswer) -> None:
        """Accepts every answer, even an empty one: it is the model's behaviour, and the reward should see it."""

    async def from_native_response(self, response: ChatAnswer) -> Any:
        prompt_ids, sampled = list(response.prompt.ids), list(response.completion.token_ids)
        calls = [
            ToolCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
            for call in response.message.get("tool_calls", ())
        ]
        return Response(
            id=response.completion.request_id,
            created=0,
            model=MODEL,
            usage=Usage(
                prompt_tokens=len(prompt_ids),
                reasoning_tokens=0,
                completion_tokens=len(sampled),
                total_tokens=len(prompt_ids) + len(sampled),
            ),
            message=ResponseMessage(
                content=response.message["content"] or "",
                tool_calls=calls or None,
                finish_reason=response.finish_reason,
                is_truncated=response.finish_reason == "length",
                tokens=ResponseTokens(
                    prompt_ids=prompt_ids,
                    prompt_mask=[0] * len(prompt_ids),
                    completion_ids=sampled,
                    completion_mask=[1] * len(sampled),
                    completion_logprobs=list(response.completion.logprobs),
                ),
            ),
        )


def _openai_message(message: Any) -> dict[str, Any]:
    plain: dict[str, Any] = message.model_dump(exclude_none=True)
    if plain["role"] == "text":  # a plain-text prompt becomes the user's message, as in verifiers' own chat clients
        plain["role"] = "user"
    if calls := plain.get("tool_calls"):
        plain["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in calls
        ]
    return plain


# ---- reward functions: check them, run them in threads, record their errors
# verifiers logs a function that raises and counts it as 0. Recording the error as well makes it visible in the metrics.


_errors: ContextVar[list[str] | None] = ContextVar("_errors", default=None)
"""Receives the errors of the reward functions of a rollout: "" for an error that tells something of the answer."""


def prepare_rubrics(environment: Environment, name: str, *, threads: bool) -> None:
    """Record the errors of the environment's reward functions; with `threads`, run plain functions in threads.

    Raises EnvironmentSetupError if rollouts can't be scored one by one, or if every reward would be 0.
    """
    rubrics = list({id(rubric): rubric for rubric in _rubrics(environment)}.values())
    if any(rubric.has_group_rewards or rubric.has_advantages for rubric in rubrics):
        raise EnvironmentSetupError(
            f"environment {name} has reward functions of whole groups (of states, completions, ...); here each rollout is "
            "scored by itself, so it can't be trained on"
        )
    if all(_is_standard(rubric) and not any(rubric.weights) for rubric in rubrics):
        raise EnvironmentSetupError(f"environment {name} has no reward function with a weight: every rollout is worth 0")
    for rubric in filter(_is_standard, rubrics):
        if not rubric.funcs:  # verifiers can't score a single rollout without functions, only a group
            rubric.score_rollout = rubric.dummy_score_rollout
        rubric.funcs = [_recording_errors(function, threads) for function in rubric.funcs]


def _rubrics(part: Environment | Rubric) -> Iterator[Rubric]:
    """The rubrics of an environment or a group of environments or rubrics."""
    match part:
        case EnvGroup(envs=parts) | RubricGroup(rubrics=parts):
            for inner in parts:
                yield from _rubrics(inner)
        case Environment(rubric=rubric):
            yield from _rubrics(rubric)
        case _:
            yield part


def _is_standard(rubric: Rubric) -> bool:
    """Whether the rubric uses the scoring method of its base class, which only calls its functions."""
    return type(rubric).score_rollout is Rubric.score_rollout


def _recording_errors(function: Callable[..., Any], threads: bool) -> Callable[..., Any]:
    """The function with its errors recorded. Keeps name and signature, which verifiers inspects; verifiers awaits it."""
    in_thread = threads and not inspect.iscoroutinefunction(function)

    @wraps(function)
    async def wrapper(*arguments: Any, **named: Any) -> float:
        call = partial(function, *arguments, **named)
        try:
            value = await asyncio.wrap_future(in_daemon_thread(partial(copy_context().run, call))) if in_thread else call()
            return float(await value if inspect.isawaitable(value) else value)
        except Exception as error:
            # Signals, SQLite and math-verify raise such errors in threads. The thread is at fault, not the answer.
            of_thread = in_thread and "thread" in str(error)
            line = f"{wrapper.__name__} raised {type(error).__name__}: {' '.join(str(error).split())}"
            hint = " (set environment.args.threads to false)" if of_thread else ""
            if (errors := _errors.get()) is not None:
                errors.append(line + hint if of_thread or is_unreachable(error) else "")
            raise

    return wrapper


# ---- attempts


async def play(
    row: Mapping[str, Any], client: GenerationClient, loaded: LoadedEnvironment, template_options: Mapping[str, Any]
) -> Rollout:
    """Run one rollout.

    Metrics are the rubric's, the conversation's, `reward_errors` (number of functions that raised) and `prompt_too_long`
    (1 if that ended the rollout). If an error ended the rollout, raises the error of the model call, else RolloutError.
    It also does so if a server that a reward function asks can't be reached.
    """
    policy = PolicyClient(client, template_options)
    raised = list[str]()
    _errors.set(raised)
    output = await loaded.environment.run_rollout(dict(row), policy, MODEL, sampling_args={})
    turns = policy.conversation.turns
    if (error := output["error"]) is not None:
        raise policy.failure or RolloutError(f"environment {loaded.name} ended with {error['error_chain_repr']}")
    if policy.too_long is not None and not turns:
        raise policy.too_long
    if line := next(filter(None, raised), ""):
        raise RolloutError(f"reward function {line}")
    metrics = {
        **policy.conversation.metrics,
        "prompt_too_long": float(policy.too_long is not None),
        "reward_errors": float(len(raised)),
        **(output["metrics"] or {}),
    }
    return Rollout(turns=turns, reward=output["reward"], metrics=metrics)
