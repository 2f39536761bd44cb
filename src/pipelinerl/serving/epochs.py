"""Which session of which run updates the weights of an engine server."""

from __future__ import annotations

from pipelinerl.errors import WeightUpdateError


class StaleEpochError(WeightUpdateError):
    """The session was replaced by a later one."""


class Epochs:
    """The sessions that have updated a server, as they call themselves (`wire.WeightUpdateRequest`)."""

    def __init__(self) -> None:
        self._current = ("", 0)
        self._latest: dict[str, int] = {}  # by run

    def begins(self, run: str, epoch: int) -> bool:
        """Whether a request of the session would begin it here. Changes nothing: a request may still be refused.

        It begins if it is later than all others of its run; otherwise, and if it is not the current one, raises
        StaleEpochError. A client that is no run begins nothing.
        """
        if not run or (run, epoch) == self._current:
            return False
        if epoch <= self._latest.get(run, 0):
            raise StaleEpochError("a later session updates the weights of this server: nothing was changed")
        return True

    def begin(self, run: str, epoch: int) -> None:
        """The session has changed the server. It replaces the one before for good: a late request of that one is refused."""
        self._latest[run] = epoch
        self._current = (run, epoch)
