"""The hub's connections over a network: both ends prove that they have the session's key, before anything else is read."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress

from pipelinerl.channel import Acceptor, ProtocolError, listen, prove
from pipelinerl.errors import StageDiedError
from pipelinerl.hub import wire
from pipelinerl.hub.client import HubClient

PROOF_S = 10.0
"""Time for a worker to prove that it belongs to the run."""
DIAL_S = 30.0


class Listener(Acceptor):
    """Accepts workers. `admit` is called with each connection, in a thread of its own."""

    def __init__(self, host: str, key: str, admit: Callable[[socket.socket], object]) -> None:
        listening = listen(host)
        self.address: tuple[str, int] = (host, listening.getsockname()[1])
        self._key, self._admit = key, admit
        super().__init__(listening, self._prove)

    def _prove(self, connected: socket.socket) -> None:
        with suppress(OSError, EOFError, ProtocolError):  # somebody else
            self._admit(prove(connected, self._key, dialled=False, bound_s=PROOF_S))


def dial(address: tuple[str, int], key: str, role: str, machine: str) -> HubClient:
    """The connection of the worker `role` on another machine. Raises StageDiedError if the hub can't be reached."""
    try:
        connected = socket.create_connection(address, timeout=DIAL_S)
        proven = prove(connected, key, dialled=True, bound_s=DIAL_S)
    except (OSError, EOFError, ProtocolError) as error:
        where = f"{address[0]}:{address[1]}"
        raise StageDiedError(f"the {role} process has no connection with the launcher at {where}: {error}") from error
    client = HubClient(proven)
    client.send(wire.Hello(role, machine))
    return client
