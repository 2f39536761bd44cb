"""An ASGI middleware for vLLM: every route asks for a key. vLLM's own asks for one below /v1 only, and not for weights."""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

KEY_VARIABLE = "PIPELINERL_SERVER_KEY"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class RequireKey:
    """Answers 401 to requests without `Authorization: Bearer KEY`. The key is in the environment variable `KEY_VARIABLE`."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ[KEY_VARIABLE]}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or hmac.compare_digest(
            dict(scope["headers"]).get(b"authorization", b""), self._expected
        ):
            await self._app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": b'{"error": "a key is needed: Authorization: Bearer KEY"}'})
