"""Environments whose attempts are runs of an agent: any program that speaks OpenAI's API, given an address to speak to."""

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
"""Clients of OpenAI's API want one. What lets a request in is the secret in its address."""


class Agent:
    """Attempts are calls of a function of the user, which gets an address at which the model being trained answers.

    run         `path/to/file.py:function`: (problem, base_url, api_key) -> the reward, or a dict of `reward` and other
                numbers. Plain or `async def`; attempts run at the same time, in threads. What it asks of the model at
                `base_url`, in whatever way, is what is trained on
    data        file of JSON lines, or a list of them: a problem a line, given to `run` as a dict
    held_out    which of them evaluations use and training never sees: a share, or a file of them
    problems    instead of `data`: another environment, `{kind: ..., args: {...}}`, whose problems `run` gets
    threads     how many attempts run at once
    template_options   for the model's chat template, such as `{enable_thinking: false}`
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
        """Raises EnvironmentSetupError for a function, data or arguments that can't be used, MissingDependencyError."""
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
            raise RolloutError("the agent has not asked the model anything at `base_url`")
        return Rollout(turns=conversation.turns, reward=reward, metrics={**conversation.metrics, **metrics})


def _gateway() -> Gateway:
    try:
        from pipelinerl.serving.agents.gateway import Gateway  # noqa: PLC0415 - an extra, which only agents need
    except ModuleNotFoundError as error:
        raise MissingDependencyError(f"agents need {error.name}: pip install 'pipelinerl[serve]'") from error
    return Gateway()


def _read(returned: object) -> tuple[float, dict[str, float]]:
    """The reward, and other numbers. Raises RolloutError for what is neither."""
    if not isinstance(returned, Mapping):
        return finite_number(returned, "the agent"), {}
    if "reward" not in returned:
        raise RolloutError(
            f"the agent returned a dict without `reward` (it has: {', '.join(map(str, returned)) or 'nothing'})"
        )
    numbers = {str(name): finite_number(value, f"the agent's {name}") for name, value in returned.items()}
    return numbers.pop("reward"), numbers


class _Examples:
    """Problems that are lines of files, each once an epoch."""

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
