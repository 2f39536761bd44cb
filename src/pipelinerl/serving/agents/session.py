"""The model calls of one rollout's agent, run in the generation loop."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, cast

import msgspec

from pipelinerl.environments.chat.conversation import ChatAnswer, Conversation, Prompt
from pipelinerl.environments.prompts import TextStream, plain_decoder
from pipelinerl.errors import RequestError, RolloutError
from pipelinerl.interfaces import GenerationClient
from pipelinerl.serving.server.api.answers import StopStrings
from pipelinerl.serving.server.api.bodies import OTHER_SAMPLING, ChatBody, CompletionBody, ResponseFormat, check_stops
from pipelinerl.serving.server.http import RefusedError, retrieve
from pipelinerl.types import Completion, SamplingParams, TokenEvent

# ---- requests of agents; the run file sets the sampling parameters, so requests that would change them are refused


ModelRequest = ChatBody | CompletionBody

_SUPPORTED = """
    max_completion_tokens max_tokens messages model prompt stop stream stream_options tool_choice tools
"""
_NEUTRAL = {"n": 1, "response_format": ResponseFormat(type="text")}


def check(request: ModelRequest, sampling: SamplingParams, *, ignore: bool = False) -> list[str]:
    """The parameters of a request that differ from this rollout's sampling and are ignored.

    Raises RequestError for those that can't be ignored, and for all of them unless `ignore`.
    """
    of_run = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    neutral = of_run | OTHER_SAMPLING | {"seed": None}
    given = {name: getattr(request, name) for name in neutral}
    if given["top_k"] == -1:
        given["top_k"] = None
    differing = [name for name, value in given.items() if value not in (None, neutral[name])]
    if differing and not ignore:
        name = differing[0]
        why = (
            f"this rollout is sampled with {of_run[name]:g}, as set in the run file"
            if name in of_run
            else "an agent in training can't set it"
        )
        raise RequestError(f"{name} {given[name]:g}: {why}; leave it out, or set environment.args.sampling: ignore")
    if request.grammar is not None:
        raise RequestError(f"{request.grammar.key}: an agent in training can't set it; leave it out")
    for field in msgspec.structs.fields(request):
        unset: tuple[object, ...] = (None, field.default, _NEUTRAL.get(field.name), False, [], (), {})
        if field.name not in {*_SUPPORTED.split(), *neutral} and getattr(request, field.name) not in unset:
            raise RequestError(f"{field.name}: an agent in training can't set it; leave it out")
    if request.most_tokens is not None and request.most_tokens < 1:
        raise RequestError(f"max_tokens {request.most_tokens}: ask for at least 1")
    check_stops(request.stops)
    return differing


class AgentSession:
    """One rollout's conversation with its agent.

    It is made, called and closed in the event loop of the rollout; the gateway's thread submits calls to that loop.
    """

    def __init__(
        self, client: GenerationClient, template_options: Mapping[str, Any] | None = None, *, ignore_sampling: bool = False
    ) -> None:
        """`ignore_sampling`: answer requests with other sampling parameters than the run's, with the run's."""
        self.loop = asyncio.get_running_loop()
        self.conversation = Conversation(client, template_options=template_options)
        self.ignored = 0
        """The requests of which a sampling parameter was ignored."""
        self._client = client
        self._ignore_sampling = ignore_sampling
        self._made = 0
        self._calls: set[asyncio.Task[Any]] = set()
        self._tries: Counter[bytes] = Counter()  # by body: the requests that were no retries
        self._sent: defaultdict[bytes, list[ChatAnswer]] = defaultdict(list)  # by body: those of the conversation
        self._closed = False

    @property
    def cancelled(self) -> int:
        """The answers that the agent never got, because it gave up its request. They are no turns."""
        return self._made - len(self.conversation.turns)

    def delivered(self, answer: ChatAnswer, body: bytes) -> None:
        """Add an answer to the conversation that is being sent to the agent."""
        if not self._closed:
            self._withdraw_lost(body)
            self.conversation.add(answer)
            self._sent[body].append(answer)

    def _withdraw_lost(self, body: bytes) -> None:
        """Drop the last answer to this request if it was sent, but lost: as many answers were sent as were asked for."""
        sent = self._sent[body]
        if sent and len(sent) >= self._tries[body] and not sent[-1].next:
            self.conversation.withdraw(sent.pop())

    async def answer(self, request: ModelRequest, body: bytes, *, retried: bool = False) -> ChatAnswer:
        """One call of the model. `delivered` adds it to the conversation.

        `body` identifies the request, in case a client sends it again. Raises RequestError for invalid requests, and
        RefusedError (`not_found`) if the rollout has ended or ends meanwhile.
        """
        task = asyncio.current_task()
        if self._closed or task is None:
            raise rollout_ended()
        self._calls.add(task)
        task.add_done_callback(retrieve)
        if retried:
            self._withdraw_lost(body)
        else:
            self._tries[body] += 1
        try:
            ignored = check(request, self._client.sampling, ignore=self._ignore_sampling)
            answered = await self._ask(request)
            self._made += 1
            self.ignored += bool(ignored)
            return answered
        except RolloutError as error:  # the rollout's client is closed
            raise rollout_ended() from error
        except asyncio.CancelledError:
            if not self._closed:
                self._made += 1
                raise  # the agent closed the connection
            raise rollout_ended() from None
        finally:
            self._calls.discard(task)

    def close(self) -> None:
        """End the session with its rollout. Calls in progress are cancelled, also in the engine, and not added."""
        self._closed = True
        for task in self._calls:
            task.cancel()

    async def _ask(self, request: ModelRequest) -> ChatAnswer:
        prompt, most = self._prompt(request), request.most_tokens
        if not request.stops:
            return self.conversation.answer_of(prompt, await self._client.generate(prompt.ids, max_tokens=most))
        completion, text, stop = await self._generate_until(request.stops, prompt.ids, most)
        return self.conversation.answer_of(prompt, completion, text=text, stop=stop)

    def _prompt(self, request: ModelRequest) -> Prompt:
        if isinstance(request, ChatBody):
            return self.conversation.prompt(request.messages, request.offered_tools)
        if isinstance(prompt := request.one_prompt, str):
            return self.conversation.text_prompt(prompt)
        return Prompt(tuple(prompt), "")

    async def _generate_until(
        self, stops: Sequence[str], prompt_ids: Sequence[int], max_tokens: int | None
    ) -> tuple[Completion, str | None, str | None]:
        """A completion that ends with the token that completes a stop string, the text before that string, and the string.

        Without one, both are None. All tokens are trained on: they were sampled.
        """
        text, stop, shown = TextStream(plain_decoder(self._client.tokenizer)), StopStrings(stops), ""
        events = self._client.stream(prompt_ids, max_tokens=max_tokens)
        async with aclosing(cast("AsyncGenerator[TokenEvent]", events)):
            async for event in events:
                if event.token_id not in self._client.sampling.stop_token_ids:
                    shown += stop.feed(text.feed([event.token_id]))
                if stop.found is not None:
                    break
        (completion,) = (one for one in self._client.completions if one.request_id == event.request_id)
        return completion, None if stop.found is None else shown, stop.found


def rollout_ended() -> RefusedError:
    """`not_found`, because clients retry after `unavailable`."""
    return RefusedError("not_found", "this rollout has ended: its address is no longer served")
