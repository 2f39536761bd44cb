"""The APIs for chats and texts: Chat Completions, Completions and Responses of OpenAI, and Messages of Anthropic.

    request ──read──▶ ChatBody or CompletionBody ──▶ Answer ──writer──▶ the API's answer

Responses and Messages are translated into a request of Chat Completions. What can't be translated is refused by name.
`pipelinerl serve` and the gateway of agents differ in how they get the answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pipelinerl.serving.server.api import messages, responses
from pipelinerl.serving.server.api.answers import ReadRequest, read_chat, read_completion

Read = Callable[[bytes], ReadRequest]


def api_routes(base: str, respond: Callable[[Request, Read], Awaitable[Response]]) -> list[Route]:
    """A route below `base` for each API. `respond` answers a request, given what reads its body."""

    def route(path: str, read: Read) -> Route:
        async def handle(request: Request) -> Response:
            return await respond(request, read)

        return Route(base + path, handle, methods=["POST"])

    return [
        route("/chat/completions", read_chat),
        route("/completions", read_completion),
        route("/responses", responses.read),
        route("/messages", messages.read),
        route("/v1/messages", messages.read),  # for a base URL that ends with `/v1`: Anthropic's clients add it
    ]
