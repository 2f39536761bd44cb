"""The APIs for chats and texts: Chat Completions, Completions and Responses of OpenAI, and Messages of Anthropic.

    request ──read──▶ ChatBody or CompletionBody ──▶ choices of Chat Completions ──writer──▶ answer

The last two are translated into a request of Chat Completions, and its answer back. What can't be translated is refused by
name. `pipelinerl serve` and the gateway of agents differ in how they get the choices.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pipelinerl.errors import PipelineRLError
from pipelinerl.serving.server.api import messages, responses
from pipelinerl.serving.server.api.answers import ReadRequest, read_chat, read_completion
from pipelinerl.serving.server.http import error_answer

Read = Callable[[bytes], ReadRequest]
Respond = Callable[[Request, Read], Awaitable[Response]]


def api_routes(base: str, respond: Respond) -> list[Route]:
    """A route below `base` for each API. `respond` answers a request, given what reads its body."""

    def route(path: str, read: Read) -> Route:
        async def handle(request: Request) -> Response:
            return await respond(request, read)

        async def handle_messages(request: Request) -> Response:
            try:
                return await respond(request, read)
            except PipelineRLError as error:
                return error_answer(error, messages.error_of_messages)

        return Route(base + path, handle_messages if read is messages.read else handle, methods=["POST"])

    return [
        route("/chat/completions", read_chat),
        route("/completions", read_completion),
        route("/responses", responses.read),
        route("/messages", messages.read),
        route("/v1/messages", messages.read),  # for a base URL that ends with `/v1`: Anthropic's clients add it
    ]
