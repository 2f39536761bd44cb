"""The environment `agent`: each attempt runs an agent, i.e. a program that calls OpenAI's API at a given address."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from pipelinerl.environments.data import ProblemSet, read_split
from pipelinerl.environments.options import AtLeastOne, Files, FunctionName, Inner, Options, Share
from pipelinerl.environments.registry import make_inner
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


class AgentOptions(Options, kw_only=True):
    run: FunctionName
    """(problem, base_url, api_key) -> the reward, or a dict of `reward` and other numbers. Plain or `async def`. Attempts
    run concurrently, in threads. All requests to `base_url` become training data."""
    data: Files | None = None
    """Files of problems, one per line, passed to `run` as dicts."""
    held_out: Share | Files = 0.1
    """Problems for evaluations only, never trained on: a share of `data`, or files."""
    problems: Inner | None = None
    """Instead of `data`: another environment, `{kind: ..., args: {...}}`, whose problems are passed to `run`."""
    threads: AtLeastOne = 256
    """Largest number of concurrent attempts."""
    template_options: dict[str, Any] | None = None
    """Options of the model's chat template, such as `{enable_thinking: false}`."""

    def __post_init__(self) -> None:
        if (self.data is None) == (self.problems is None):
            raise EnvironmentSetupError("environment.args of agent: give either `data` or `problems`")


class Agent:
    """An attempt is a call of a user function, which gets the address of an API served by the model in training."""

    Options = AgentOptions

    def __init__(self, tokenizer: Tokenizer, seed: int, **args: Any) -> None:
        """Raises EnvironmentSetupError for a bad function, data or arguments, MissingDependencyError without the extra."""
        options = AgentOptions.read(args)
        self._agent = AgentThreads(find_function(options.run, allow_async=True), options.run, options.threads)
        self._template_options = options.template_options
        self._source: Environment | ProblemSet
        if options.problems is not None:
            self._source = make_inner("environment.args.problems", options.problems, tokenizer, seed)
        else:
            parts = read_split(options.data or [], options.held_out, lambda _: None, _key)
            self._source = ProblemSet(parts, f"agent/{seed}")
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


def _key(problem: Problem) -> str:
    return msgspec.json.encode(problem.payload, order="deterministic").decode()
