"""Addresses and ports of servers."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

LOOPBACK = "127.0.0.1"


def is_this_machine(address: str) -> bool:
    """Whether the host of an address (`HOST`, `HOST:PORT`, or a URL) is a name or address of the loopback interface."""
    try:
        host = urlsplit(address if "//" in address else f"//{address}").hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def free_port(address: str = "127.0.0.1") -> int:
    """A port of this address of the machine that is free now. Another process may take it before the server does."""
    with socket.create_server((address, 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def source_address(url: str) -> str:
    """This machine's address for packets to the host of a URL. Raises OSError if there is no route."""
    family, kind, _, _, address = socket.getaddrinfo(urlsplit(url).hostname, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # connecting a datagram socket sends nothing
        found: str = probe.getsockname()[0]
    return LOOPBACK if found == "::1" else found
