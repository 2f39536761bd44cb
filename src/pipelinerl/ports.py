"""Ports for servers that a run starts."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A loopback port that is free now. Another process may take it before the server does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port
