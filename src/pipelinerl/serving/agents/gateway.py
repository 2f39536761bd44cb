"""The APIs of OpenAI and Anthropic on the loopback interface, with an address per rollout, and what its agent asks there.

    /rollouts/<secret>/v1/chat/completions, /completions, /responses, /messages, /models
    /rollouts/<secret>/inference/v1/generate                                                  vLLM's, with token ids

One thread reads and writes HTTP. The call itself runs in the event loop of the rollout, between two engine steps.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from hashlib import blake2b
from typing import Any, cast

import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pipelinerl.environments.chat.conversation import ChatAnswer, Conversation, encode_text
from pipelinerl.environments.prompts import TextStream, plain_decoder
from pipelinerl.errors import RequestError, RolloutError
from pipelinerl.interfaces import GenerationClient
from pipelinerl.serving.server.chat import OTHER_SAMPLING, Answer, AnyBody, ChatBody, StopStrings
from pipelinerl.serving.server.dialects import GENERATE, Read, TokensBody, api_routes, read_tokens, tokens_of
from pipelinerl.serving.server.http import (
    RefusedError,
    answer_of,
    application,
    body_of,
    check_stops,
    listen,
    retrieve,
    unless_gone,
    uvicorn_config,
)
from pipelinerl.types import Completion, SamplingParams, TokenEvent

HOST = "127.0.0.1"
CLOSE_S = 5.0
MODEL = "policy"
"""The model's name in responses. Requests may use any name."""
SESSION_HEADER = "x-session-id"
"""Says to which of the sessions at one address a request belongs."""
RETRY_HEADER = "x-stainless-retry-count"
"""How often the clients of OpenAI and Anthropic have sent this request before, without getting an answer."""
_REFUSED = "stop_token_ids ignore_eos logprobs return_token_ids return_weight_versions chat_template_kwargs"
"""What only the server supports."""


def check(request: AnyBody, sampling: SamplingParams, *, ignore: bool = False) -> list[str]:
    """The parameters of a request that differ from this rollout's sampling, which the run file sets, and are ignored.

    Raises RequestError for what can't be ignored, and for all of them unless `ignore`.
    """
    of_run = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    neutral = of_run | OTHER_SAMPLING | {"seed": None}
    given = {name: getattr(request, name) for name in neutral} | ({"top_k": None} if request.top_k == -1 else {})
    differing = [name for name, value in given.items() if value not in (None, neutral[name])]
    if differing and not ignore:
        name = differing[0]
        why = (
            f"this rollout is sampled with {of_run[name]:g}, as set in the run file"
            if name in of_run
            else "an agent in training can't set it"
        )
        raise RequestError(f"{name} {given[name]:g}: {why}; leave it out, or set environment.args.sampling: ignore")
    for name in _REFUSED.split():
        if getattr(request, name, None) and not (name == "stop_token_ids" and isinstance(request, TokensBody)):
            raise RequestError(f"{name}: an agent in training can't set it; leave it out")
    if request.most_tokens is not None and request.most_tokens < 1:
        raise RequestError(f"max_tokens {request.most_tokens}: ask for at least 1")
    check_stops(request.stops)
    return differing


def rollout_ended() -> RefusedError:
    """`not_found`, because clients retry after `unavailable`."""
    return RefusedError("not_found", "this rollout has ended: its address is no longer served")


class AgentSession:
    """One rollout's conversation with its agent.

    It is made, called and closed in the event loop of the rollout; the gateway's thread submits calls to that loop.
    `ignored`: how many requests had a sampling parameter that was ignored. `made`: how many answers were made. Those that
    the agent never got, because it gave up its request, are no turns. `sent`: by a hash of its body, the answer that was
    sent to a request; a client that repeats the request has not got it.
    """

    def __init__(
        self,
        client: GenerationClient,
        template_options: Mapping[str, Any] | None = None,
        *,
        ignore_sampling: bool = False,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """`ignore_sampling`: answer requests with other sampling parameters than the run's, with the run's.

        `loop`: the loop of the rollout, if another thread makes the session.
        """
        self.loop = loop or asyncio.get_running_loop()
        self.conversation = Conversation(client, template_options=template_options)
        self.ignored = self.made = 0
        self.sent: dict[bytes, ChatAnswer] = {}
        self._client = client
        self._ignore_sampling = ignore_sampling
        self._calls: set[asyncio.Task[Any]] = set()
        self._closed = False

    def delivered(self, answer: ChatAnswer) -> None:
        """Add an answer to the conversation that is being sent to the agent."""
        if not self._closed:
            self.conversation.answers.append(answer)

    async def answer(self, request: AnyBody) -> ChatAnswer:
        """One call of the model. `delivered` adds it to the conversation.

        Raises RequestError for invalid requests, and RefusedError (`not_found`) if the rollout has ended or ends meanwhile.
        """
        task = asyncio.current_task()
        if self._closed or task is None:
            raise rollout_ended()
        self._calls.add(task)
        task.add_done_callback(retrieve)
        try:
            ignored = check(request, self._client.sampling, ignore=self._ignore_sampling)
            if isinstance(request, ChatBody):
                prompt = self.conversation.prompt(request.messages, request.offered_tools)
            elif isinstance(request.prompt, str):
                ids = encode_text(self._client.tokenizer, request.prompt, special=True)
                prompt = self.conversation.plain_prompt(ids, request.prompt)
            else:
                prompt = self.conversation.plain_prompt(request.prompt)
            answered = self.conversation.answer_of(prompt, *await self._generate(request, prompt.ids))
            self.made += 1
            self.ignored += bool(ignored)
            return answered
        except RolloutError as error:  # the rollout's client is closed
            raise rollout_ended() from error
        except asyncio.CancelledError:
            if not self._closed:
                self.made += 1
                raise  # the agent closed the connection
            raise rollout_ended() from None
        finally:
            self._calls.discard(task)

    def close(self) -> None:
        """End the session with its rollout. Calls in progress are cancelled, also in the engine, and not added."""
        self._closed = True
        for task in self._calls:
            task.cancel()

    async def _generate(self, request: AnyBody, prompt_ids: Sequence[int]) -> tuple[Completion, str | None, str | None]:
        """A completion; with a stop string, it ends with the token that completes it, and has the text before it.

        Without one, text and stop string are None. A stop token of the request ends it, too, with the stop string "". All
        tokens are trained on: they were sampled.
        """
        most, ends = request.most_tokens, self._client.sampling.stop_token_ids
        own_ends = set(request.stop_token_ids or ()) - set(ends)
        if not (request.stops or own_ends):
            return await self._client.generate(prompt_ids, max_tokens=most), None, None
        text, stop, shown = TextStream(plain_decoder(self._client.tokenizer)), StopStrings(request.stops), ""
        events = self._client.stream(prompt_ids, max_tokens=most)
        async with aclosing(cast("AsyncGenerator[TokenEvent]", events)):
            async for event in events:
                if event.token_id not in ends:
                    shown += stop.feed(text.feed([event.token_id]))
                if stop.found is not None or event.token_id in own_ends:
                    break
        (completion,) = (one for one in self._client.completions if one.request_id == event.request_id)
        if stop.found is not None:
            return completion, shown, stop.found
        return completion, None, "" if event.token_id in own_ends else None


class Gateway:
    """Starts listening at the first call of `serving`."""

    def __init__(self) -> None:
        self._server: uvicorn.Server | None = None
        self._url = ""
        self._thread: threading.Thread | None = None
        self._sessions: dict[str, AgentSession | Mapping[str, AgentSession]] = {}

    @contextmanager
    def serving(self, session: AgentSession | Mapping[str, AgentSession]) -> Iterator[str]:
        """The session's base URL, served while inside. Closes the session at the end.

        Several sessions at one address are told apart by `SESSION_HEADER`. Their owner adds and closes them.
        """
        self._start()
        secret = secrets.token_urlsafe(16)
        self._sessions[secret] = session
        try:
            yield f"{self._url}/rollouts/{secret}/v1"
        finally:
            del self._sessions[secret]
            if isinstance(session, AgentSession):
                session.close()

    def close(self) -> None:
        """Stop listening. May be called twice."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            if self._thread is not threading.current_thread():  # where the garbage collector may run
                self._thread.join(CLOSE_S)

    # ---- the gateway's thread

    def _start(self) -> None:
        if self._server is not None:
            return
        listening = listen((HOST, 0))
        self._url = f"http://{HOST}:{listening.getsockname()[1]}"
        top = "/rollouts/{secret}"

        async def generate(request: Request) -> Response:
            return await self._respond(request, read_tokens)

        routes = [Route(f"{top}/v1/models", self._models), Route(top + GENERATE, generate, methods=["POST"])]
        app = application([*api_routes(f"{top}/v1", self._respond), *routes])
        self._server = uvicorn.Server(uvicorn_config(app, close_s=1))
        # A daemon thread, so that open requests of agents do not keep the process from exiting.
        self._thread = threading.Thread(target=self._server.run, args=([listening],), name="agents' gateway", daemon=True)
        self._thread.start()

    async def _models(self, request: Request) -> Response:
        if request.path_params["secret"] not in self._sessions:
            raise rollout_ended()
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "pipelinerl"}
        return answer_of({"object": "list", "data": [model]})

    async def _respond(self, request: Request, read: Read) -> Response:
        session = self._session(request)
        body = await body_of(request)
        asked, name = read(body), blake2b(request.url.path.encode() + body).digest()
        repeated = session.sent.get(name) if request.headers.get(RETRY_HEADER, "0") != "0" else None
        if repeated is None:
            with _while_open():
                call = asyncio.run_coroutine_threadsafe(session.answer(asked.body), session.loop)
            reply = await unless_gone(request, asyncio.wrap_future(call))
        else:
            reply = repeated
        answered = Answer(
            message=reply.message,
            finish_reason=reply.finish_reason,
            stop=reply.stop,
            prompt_tokens=len(reply.prompt.ids),
            completion_tokens=len(reply.completion.token_ids),
            beyond=tokens_of(reply.completion) if isinstance(asked.body, TokensBody) else {},
        )
        response = asked.writer(reply.completion.request_id, asked.body.model or MODEL).response(answered)
        if repeated is None:
            session.sent[name] = reply
            with _while_open():  # before the response is written: the turn is recorded before the agent can go on or return
                session.loop.call_soon_threadsafe(session.delivered, reply)
        return response

    def _session(self, request: Request) -> AgentSession:
        session = self._sessions.get(request.path_params["secret"])
        if isinstance(session, Mapping):
            session = session.get(request.headers.get(SESSION_HEADER, ""))
        if session is None:
            raise rollout_ended()
        return session


@contextmanager
def _while_open() -> Iterator[None]:
    """Pass work to the loop of a rollout. Raises as `rollout_ended` if it is closed."""
    try:
        yield
    except RuntimeError:
        raise rollout_ended() from None
