"""The calls of one rollout's agent, in the loop that generates."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Literal

from pipelinerl.environments.chat.conversation import Answer, Conversation
from pipelinerl.errors import RequestError, RolloutError
from pipelinerl.interfaces import GenerationClient
from pipelinerl.serving.server.http import RefusedError
from pipelinerl.serving.server.openai.bodies import Body, CompletionBody
from pipelinerl.types import SamplingParams

# ------------------------------------------------------------------------------------------------------------------------
# What an agent may ask for. How tokens are sampled is the run's to say: what would change it is refused by name.


class ChatRequest(Body, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    logprobs: bool | None = None

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        return [] if self.tool_choice == "none" else self.tools or []


class TextRequest(CompletionBody, frozen=True, kw_only=True):
    """`prompt` is a text or token ids; `max_tokens` is the run's limit by default, not OpenAI's 16."""


Request = ChatRequest | TextRequest


def check(request: Request, sampling: SamplingParams) -> None:
    """Raises RequestError for what this rollout's tokens are not sampled with."""
    for name, asked, there in (
        ("temperature", request.temperature, sampling.temperature),
        ("top_p", request.top_p, sampling.top_p),
        ("top_k", None if request.top_k == -1 else request.top_k, sampling.top_k),
    ):
        if asked is not None and asked != there:
            raise RequestError(
                f"{name} {asked:g}: this rollout is sampled with {there:g}, as the run file says; leave it out"
            )
    for name in ("seed", "stop", "stop_token_ids", "ignore_eos", "logprobs", "return_token_ids", "return_weight_versions"):
        value = getattr(request, name)
        if value not in (None, False, [], ()):
            raise RequestError(f"{name}: an agent in training can't set it; leave it out")
    if request.most_tokens is not None and request.most_tokens < 1:
        raise RequestError(f"max_tokens {request.most_tokens}: ask for at least 1")


class Session:
    """Made and closed in the loop in which the rollout runs, as are its calls; the gateway's thread sends them there."""

    def __init__(self, client: GenerationClient, template_options: Mapping[str, Any] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        self.conversation = Conversation(client, template_options=template_options)
        self._sampling = client.sampling
        self._calls: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def answer(self, request: Request) -> Answer:
        """One call of the model, noted in the conversation when it is done.

        Raises RequestError for what can't be asked, RefusedError (`not_found`) if the rollout has ended, or ends meanwhile.
        """
        task = asyncio.current_task()
        if self._closed or task is None:
            raise over()
        self._calls.add(task)
        try:
            check(request, self._sampling)
            return await self._ask(request)
        except RolloutError as error:  # its client is closed already
            raise over() from error
        except asyncio.CancelledError:
            if not self._closed:
                raise  # whoever asked has gone
            raise over() from None
        finally:
            self._calls.discard(task)

    def close(self) -> None:
        """The rollout has ended: what still runs is cancelled, in the engine as well, and is no part of it."""
        self._closed = True
        for task in self._calls:
            task.cancel()

    async def _ask(self, request: Request) -> Answer:
        most = request.most_tokens
        if isinstance(request, ChatRequest):
            return await self.conversation.ask(request.messages, request.offered_tools, max_tokens=most)
        prompt = request.one_prompt
        if isinstance(prompt, str):
            return await self.conversation.continue_text(prompt, max_tokens=most)
        return await self.conversation.continue_ids(prompt, max_tokens=most)


def over() -> RefusedError:
    """Not `unavailable`: clients would ask again."""
    return RefusedError("not_found", "this rollout has ended: its address answers no more")
