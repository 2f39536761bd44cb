"""The model calls of one rollout's agent, run in the generation loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from pipelinerl.environments.chat.conversation import Answer, Conversation
from pipelinerl.errors import RequestError, RolloutError
from pipelinerl.interfaces import GenerationClient
from pipelinerl.serving.server.http import RefusedError
from pipelinerl.serving.server.openai.bodies import ChatBody, CompletionBody, ResponseFormat
from pipelinerl.types import SamplingParams

# ---- requests of agents; the run file sets the sampling parameters, so requests that would change them are refused


ModelRequest = ChatBody | CompletionBody

_SUPPORTED = frozenset(
    {
        "model",
        "messages",
        "prompt",
        "tools",
        "tool_choice",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "stream",
        "stream_options",
    }
)

_NEUTRAL = {"n": 1, "repetition_penalty": 1, "response_format": ResponseFormat(type="text")}


def check(request: ModelRequest, sampling: SamplingParams) -> None:
    """Raises RequestError for parameters that differ from this rollout's sampling."""
    for name, requested, of_run in (
        ("temperature", request.temperature, sampling.temperature),
        ("top_p", request.top_p, sampling.top_p),
        ("top_k", None if request.top_k == -1 else request.top_k, sampling.top_k),
    ):
        if requested is not None and requested != of_run:
            raise RequestError(
                f"{name} {requested:g}: this rollout is sampled with {of_run:g}, as set in the run file; leave it out"
            )
    if request.grammar is not None:
        raise RequestError(f"{request.grammar.key}: an agent in training can't set it; leave it out")
    for field in msgspec.structs.fields(request):
        neutral: tuple[object, ...] = (None, field.default, _NEUTRAL.get(field.name), False, [], (), {})
        if field.name not in _SUPPORTED and getattr(request, field.name) not in neutral:
            raise RequestError(f"{field.name}: an agent in training can't set it; leave it out")
    if request.most_tokens is not None and request.most_tokens < 1:
        raise RequestError(f"max_tokens {request.most_tokens}: ask for at least 1")


class Session:
    """One rollout's conversation with its agent.

    It is made, called and closed in the event loop of the rollout; the gateway's thread submits calls to that loop.
    """

    def __init__(self, client: GenerationClient, template_options: Mapping[str, Any] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        self.conversation = Conversation(client, template_options=template_options)
        self._sampling = client.sampling
        self._calls: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def answer(self, request: ModelRequest) -> Answer:
        """One call of the model, added to the conversation when it is complete.

        Raises RequestError for invalid requests, RefusedError (`not_found`) if the rollout has ended or ends meanwhile.
        """
        task = asyncio.current_task()
        if self._closed or task is None:
            raise rollout_ended()
        self._calls.add(task)
        try:
            check(request, self._sampling)
            return await self._ask(request)
        except RolloutError as error:  # the rollout's client is closed
            raise rollout_ended() from error
        except asyncio.CancelledError:
            if not self._closed:
                raise  # the agent closed the connection
            raise rollout_ended() from None
        finally:
            self._calls.discard(task)

    def close(self) -> None:
        """End the session with its rollout. Calls in progress are cancelled, also in the engine, and not added."""
        self._closed = True
        for task in self._calls:
            task.cancel()

    async def _ask(self, request: ModelRequest) -> Answer:
        most = request.most_tokens
        if isinstance(request, ChatBody):
            return await self.conversation.ask(request.messages, request.offered_tools, max_tokens=most)
        prompt = request.one_prompt
        if isinstance(prompt, str):
            return await self.conversation.continue_text(prompt, max_tokens=most)
        return await self.conversation.continue_ids(prompt, max_tokens=most)


def rollout_ended() -> RefusedError:
    """`not_found`, because clients retry after `unavailable`."""
    return RefusedError("not_found", "this rollout has ended: its address is no longer served")
