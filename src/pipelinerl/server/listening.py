"""How our HTTP servers listen."""

from __future__ import annotations

import uvicorn
from starlette.types import ASGIApp


def uvicorn_config(app: ASGIApp, *, close_s: int) -> uvicorn.Config:
    """Quiet, without what we don't use. `close_s`: how long requests in progress may take once the server is to end."""
    return uvicorn.Config(
        app,
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        # Longer than clients keep idle connections: else one is closed here at the moment at which it is used there.
        timeout_keep_alive=75,
        timeout_graceful_shutdown=close_s,
    )
