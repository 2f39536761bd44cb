"""The environment `agent`: each attempt runs an agent, i.e. a program that calls OpenAI's API at a given address."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from pipelinerl.environments.combine.nested import make_inner, read_inner
from pipelinerl.environments.data import read_split
from pipelinerl.environments.registry import checked
from pipelinerl.environments.single_turn import Epochs
from pipelinerl.environments.user.code import find_function, finite_number
from pipelinerl.errors import EnvironmentSetupError, MissingDependencyError, RolloutError
from pipelinerl.interfaces import Environment, GenerationClient, Tokenizer
from pipelinerl.serving.agents.running import AgentThreads
from pipelinerl.serving.agents.session import Session
from pipelinerl.types import Problem, Rollout

if TYPE_CHECKING:
    from pipelinerl.serving.agents.gateway import Gateway

API_KEY = "rollout"
"""A placeholder, as clients of OpenAI's API require a key. Requests are authorised by the secret in their address."""


class Agent:
    """An attempt is a call of a user function, which gets the address of an API served by the model in training.

    run         `path/to/file.py:function`: (problem, base_url, api_key) -> the reward, or a dict of `reward` and other
                numbers. Plain or `async def`. Attempts run concurrently, in threads. All requests to `base_url` become
                training data
    data        JSON lines file, or a list of such files: one problem per line, passed to `run` as a dict
    held_out    problems for evaluations only, never trained on: a share of `data`, or a file (or several)
    problems    instead of `data`: another environment, `{kind: ..., args: {...}}`, whose problems are passed to `run`
    threads     largest number of concurrent attempts
    template_options   options of the model's chat template, such as `{enable_thinking: false}`
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int,
        *,
        run: str,
        data: str | Sequence[str] | None = None,
        held_out: float | str | Sequence[str] = 0.1,
        problems: Mapping[str, Any] | None = None,
        threads: int = 256,
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Raises EnvironmentSetupError for a bad function, data or arguments, MissingDependencyError without the extra."""
        checked(_Types, run=run, threads=threads, template_options=template_options)
        if (data is None) == (problems is None):
            raise EnvironmentSetupError("environment.args of agent: give either `data` or `problems`")
        self._agent = AgentThreads(find_function(run, allow_async=True), run, threads)
        self._template_options = template_options
        self._source: Environment | _Examples
        if problems is not None:
            where = "environment.args.problems"
            self._source = make_inner(where, read_inner(where, problems), tokenizer, seed)
        else:
            self._source = _Examples(data or (), held_out, seed)
        self._gateway = _gateway()
        weakref.finalize(self, self._gateway.close)

    def problem(self, index: int) -> Problem:
        return self._source.problem(index)

    def held_out(self, count: int) -> Sequence[Problem]:
        return self._source.held_out(count)

    async def rollout(self, problem: Problem, client: GenerationClient) -> Rollout:
        session = Session(client, self._template_options)
        with self._gateway.serving(session) as base_url:
            returned = await self._agent.call(dict(problem.payload), base_url, API_KEY)
        reward, metrics = _read(returned)
        conversation = session.conversation
        if not conversation.turns:
            raise RolloutError("the agent sent no request to the model at `base_url`")
        return Rollout(turns=conversation.turns, reward=reward, metrics={**conversation.metrics, **metrics})


def _gateway() -> Gateway:
    try:
        from pipelinerl.serving.agents.gateway import Gateway  # noqa: PLC0415 - needs an extra
    except ModuleNotFoundError as error:
        raise MissingDependencyError(f"agents need {error.name}: pip install 'pipelinerl[serve]'") from error
    return Gateway()


def _read(returned: object) -> tuple[float, dict[str, float]]:
    """The reward and other numbers that the agent returned. Raises RolloutError for other values."""
    if not isinstance(returned, Mapping):
        return finite_number(returned, "the agent"), {}
    if "reward" not in returned:
        raise RolloutError(
            f"the agent returned a dict without `reward` (it has: {', '.join(map(str, returned)) or 'nothing'})"
        )
    numbers = {str(name): finite_number(value, f"the agent's {name}") for name, value in returned.items()}
    return numbers.pop("reward"), numbers


class _Examples:
    """Problems from the lines of files, each once per epoch."""

    def __init__(self, data: str | Sequence[str], held_out: float | str | Sequence[str], seed: int) -> None:
        self._parts = read_split(data, held_out, lambda _: None, _key)
        self._epochs = Epochs(len(self._parts.training), f"agent/{seed}")

    def problem(self, index: int) -> Problem:
        return self._parts.training[self._epochs.place(index)]

    def held_out(self, count: int) -> Sequence[Problem]:
        return self._parts.held_out[:count]


def _key(problem: Problem) -> str:
    return msgspec.json.encode(problem.payload, order="deterministic").decode()


class _Types(msgspec.Struct, kw_only=True):
    run: str
    threads: Annotated[int, Meta(ge=1)]
    template_options: dict[str, Any] | None
