"""Sockets and settings of our HTTP servers. Imports nothing of the engine."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Generator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from pipelinerl.errors import UserError
from pipelinerl.serving.server.options import Address


def uvicorn_config(app: ASGIApp, *, close_s: int, tls: tuple[Path, Path] | None = None) -> uvicorn.Config:
    """Settings of our HTTP servers. `close_s`: how long requests in progress may take when the server stops.

    `tls`: PEM files of a certificate and its key.
    """
    certificate, key = tls or (None, None)
    return uvicorn.Config(
        app,
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # it warns of every invalid request, so strangers could fill the log
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ssl_certfile=certificate,
        ssl_keyfile=key,
        # Longer than clients keep idle connections, so that no connection is closed just when a client uses it.
        timeout_keep_alive=75,
        timeout_graceful_shutdown=close_s,
    )


class QuietServer(uvicorn.Server):
    """A uvicorn server without signal handlers: the process has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def listening_for_http(address: tuple[Any, ...], family: socket.AddressFamily = socket.AF_INET) -> socket.socket:
    """A listening socket whose connections send at once (asyncio sets this only on sockets that name their protocol).

    Otherwise a response's body waits until the client has confirmed its head: 40 ms on Linux. Raises OSError.
    """
    listening = socket.create_server(address, family=family, backlog=1024)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def listen(address: Address) -> socket.socket:
    """Listen at `address`. Raises UserError."""
    try:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return listening_for_http(found[4][:2], family=found[0])
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise UserError(f"can't listen on {address.host}:{address.port}: {reason}; choose another port") from error


def url_of(listening: socket.socket, *, encrypted: bool = False) -> str:
    """The URL for clients on this machine."""
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - any address: the loopback one is among them
    scheme = "https" if encrypted else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
