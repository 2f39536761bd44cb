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
        """Whether the session begins here. It replaces the one before for good: a late request of that one is refused.

        It begins if it is later than all others of its run; otherwise, and if it is not the current one, raises
        StaleEpochError. A client that is no run begins nothing.
        """
        if not run or (run, epoch) == self._current:
            return False
        if epoch <= self._latest.get(run, 0):
            raise StaleEpochError("a later session updates the weights of this server: nothing was changed")
        self._latest[run] = epoch
        self._current = (run, epoch)
        return True
