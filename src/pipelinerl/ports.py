"""Ports for servers that a run starts."""

from __future__ import annotations

import socket


def free_port(address: str = "127.0.0.1") -> int:
    """A port of this address of the machine that is free now. Another process may take it before the server does."""
    with socket.create_server((address, 0)) as listener:
        port: int = listener.getsockname()[1]
    return port
