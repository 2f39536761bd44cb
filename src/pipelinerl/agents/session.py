"""The calls of one rollout's agent, in the loop that generates."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from pipelinerl.agents.requests import ChatRequest, Request, check
from pipelinerl.environments.conversation import Answer, Conversation
from pipelinerl.errors import RolloutError
from pipelinerl.interfaces import GenerationClient
from pipelinerl.server.refusal import RefusedError


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
