"""Chooses the server for each request. Pure bookkeeping: no clock, no I/O, no waiting.

The least loaded server gets the next request. Requests with the same prompt go to the same server, so that the prompt is
processed once, unless that would leave another server idle: see `_over_share`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

Prompt = tuple[int, ...]


@dataclass(slots=True)
class _Home:
    """The server for a prompt's requests, while one of them is in progress there."""

    server: str
    in_progress: int = 0


@dataclass(slots=True)
class _Load:
    slots: int
    open: bool = True
    requests: dict[str, Prompt] = field(default_factory=dict)

    @property
    def fraction(self) -> float:
        return len(self.requests) / self.slots

    @property
    def has_room(self) -> bool:
        return self.open and len(self.requests) < self.slots


class Router:
    """Places requests on servers, at most one per slot."""

    def __init__(self) -> None:
        self._loads: dict[str, _Load] = {}
        self._homes: dict[Prompt, _Home] = {}
        self._servers: dict[str, str] = {}

    @property
    def slots(self) -> int:
        """Total slots of all open servers."""
        return sum(load.slots for load in self._loads.values() if load.open)

    def loads(self) -> Mapping[str, int]:
        """Number of requests placed on each server."""
        return {server: len(load.requests) for server, load in self._loads.items()}

    def set_server(self, server: str, slots: int, *, open_: bool = True) -> None:
        """Add or update a server. A server that is not open gets no new requests. Raises ValueError."""
        if slots < 1:
            raise ValueError(f"server {server} has {slots} slots")
        load = self._loads.setdefault(server, _Load(slots))
        load.slots, load.open = slots, open_

    def place(self, request_id: str, prompt: Prompt, *, only: Collection[str] | None = None) -> str | None:
        """Choose a server and count the request as in progress there. Returns None if no open server has room.

        `only`: the servers that are allowed. Raises ValueError if the request is already placed.
        """
        if request_id in self._servers:
            raise ValueError(f"request {request_id!r} is already placed")
        home = self._homes.get(prompt)
        candidates = [server for server, load in self._loads.items() if load.has_room and (only is None or server in only)]
        if home is not None and home.server in candidates and not self._over_share(home.server):
            server = home.server
        elif candidates:
            server = min(candidates, key=lambda name: self._loads[name].fraction)
        else:
            return None
        if only is None and (home is None or home.server not in candidates):
            home = self._homes[prompt] = _Home(server)
        if home is not None and home.server == server:
            home.in_progress += 1
        self._loads[server].requests[request_id] = prompt
        self._servers[request_id] = server
        return server

    def release(self, request_id: str) -> None:
        """Remove a request that is no longer in progress. Unknown ids are ignored."""
        server = self._servers.pop(request_id, None)
        if server is None:
            return
        prompt = self._loads[server].requests.pop(request_id)
        home = self._homes.get(prompt)
        if home is not None and home.server == server:
            home.in_progress -= 1
            if home.in_progress <= 0:
                del self._homes[prompt]

    def _over_share(self, server: str) -> bool:
        """Whether the server has its fair share of all requests, in proportion to its slots.

        False up to half of its slots: a single group stays together, since small batches cost little.
        """
        load = self._loads[server]
        if 2 * len(load.requests) < load.slots:
            return False
        total = 1 + sum(len(other.requests) for other in self._loads.values() if other.open)
        return len(load.requests) * self.slots >= total * load.slots
