"""How long the client waits, and for what."""

from __future__ import annotations

from typing import NamedTuple


class Bounds(NamedTuple):
    """In seconds, but for `tries`.

    A server is gone when it has failed for `silent_s`, or when nothing has listened at its address for `refused_s`.
    """

    startup_s: float = 180.0
    """For all servers to answer at first."""
    health_every_s: float = 2.0
    refused_s: float = 3.0
    silent_s: float = 30.0
    join_s: float = 120.0
    """For all servers and the trainer to become a group, if weights are broadcast."""
    update_s: float = 120.0
    """For a server to take new weights."""
    overload_s: float = 600.0
    """For servers that are well to take a request which they refuse for now; then the engine fails."""
    cancel_s: float = 5.0
    """For a server to let go of a cancelled request; then the connection is closed."""
    tries: int = 40
    """How often one request may be without an answer at servers that are well; then the engine fails."""


def back_off_s(failures: int) -> float:
    """How long to wait after so many failures in a row (1, 2, ...): 0.05 s, doubled each time, up to 2 s."""
    return min(2.0, 0.05 * 2.0 ** (min(failures, 10) - 1))
