"""The APIs of OpenAI and Anthropic on the loopback interface, with an address per rollout.

    /rollouts/<secret>/v1/chat/completions, /completions, /responses, /messages, /models

One thread reads and writes HTTP. The call itself runs in the event loop of the rollout, between two engine steps.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pipelinerl.environments.chat.conversation import ChatAnswer
from pipelinerl.errors import EnvironmentSetupError
from pipelinerl.serving.agents.session import AgentSession, rollout_ended
from pipelinerl.serving.server.api import Read, api_routes
from pipelinerl.serving.server.api.answers import Json, choice_of, usage_of
from pipelinerl.serving.server.api.bodies import ChatBody
from pipelinerl.serving.server.http import (
    answer,
    application,
    body_of,
    listening_for_http,
    unless_gone,
    uvicorn_config,
)

HOST = "127.0.0.1"
CLOSE_S = 5.0
MODEL = "policy"
"""The model's name in responses. Requests may use any name."""
RETRY_HEADER = "x-stainless-retry-count"
"""The clients of OpenAI and Anthropic send in it how often they have sent the request before."""


class Gateway:
    """Starts listening at the first call of `serving`. Event loops in several threads may use one gateway."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # for `_start`
        self._server: uvicorn.Server | None = None
        self._url = ""
        self._thread: threading.Thread | None = None
        self._sessions: dict[str, AgentSession] = {}

    @contextmanager
    def serving(self, session: AgentSession) -> Iterator[str]:
        """The session's base URL, served while inside. Closes the session at the end."""
        self._start()
        secret = secrets.token_urlsafe(16)
        self._sessions[secret] = session
        try:
            yield f"{self._url}/rollouts/{secret}/v1"
        finally:
            del self._sessions[secret]
            session.close()

    def close(self) -> None:
        """Stop listening. May be called twice."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            if self._thread is not threading.current_thread():  # where the garbage collector may run
                self._thread.join(CLOSE_S)

    # ---- the gateway's thread

    def _start(self) -> None:
        with self._lock:
            if self._server is not None:
                return
            try:
                listening = listening_for_http((HOST, 0))
            except OSError as error:
                raise EnvironmentSetupError(f"can't listen on {HOST} for agents: {error}") from error
            self._url = f"http://{HOST}:{listening.getsockname()[1]}"
            self._server = uvicorn.Server(uvicorn_config(self._app(), close_s=1))
            # A daemon thread, so that open requests of agents do not keep the process from exiting.
            self._thread = threading.Thread(
                target=self._server.run, args=([listening],), name="agents' gateway", daemon=True
            )
            self._thread.start()

    def _app(self) -> Starlette:
        base = "/rollouts/{secret}/v1"
        return application([*api_routes(base, self._respond), Route(f"{base}/models", self._models)])

    async def _models(self, request: Request) -> Response:
        self._session(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "pipelinerl"}
        return answer({"object": "list", "data": [model]})

    async def _respond(self, request: Request, read: Read) -> Response:
        session = self._session(request)
        data = await body_of(request)
        asked = read(data)
        retried = request.headers.get(RETRY_HEADER, "0") != "0"
        with _while_open():
            call = asyncio.run_coroutine_threadsafe(session.answer(asked.body, data, retried=retried), session.loop)
        reply: ChatAnswer = await unless_gone(request, asyncio.wrap_future(call))
        content: Json = {"text": reply.text}
        if isinstance(asked.body, ChatBody):
            content = {"message": {**reply.message, "refusal": None}}
        choice = choice_of(content, reply.finish_reason)
        if reply.stop is not None:
            choice["stop_reason"] = reply.stop
        usage = usage_of(len(reply.prompt.ids), len(reply.completion.token_ids))
        writer = asked.writer(reply.completion.request_id, asked.body.model or MODEL)
        response = asked.answered(writer, [choice], usage)
        with _while_open():  # before the response is written: so the turn is recorded before the agent can go on or return
            session.loop.call_soon_threadsafe(session.delivered, reply, data)
        return response

    def _session(self, request: Request) -> AgentSession:
        session = self._sessions.get(request.path_params["secret"])
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
