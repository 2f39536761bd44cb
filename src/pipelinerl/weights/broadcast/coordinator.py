"""Who decides when engine servers take weights that are broadcast to them: the generation process, without any weights."""

from __future__ import annotations

from pipelinerl.interfaces import WeightUpdate
from pipelinerl.types import UpdateReceipt
from pipelinerl.weights.broadcast.control import PROTOCOL, Answer, Arrived, FromSender, Hello
from pipelinerl.weights.broadcast.link import SenderLink


class CollectiveWeightCoordinator:
    """The `WeightReceiver` of a process whose engine is servers that receive for themselves.

    An update is offered once every server has all of it, verified: taking it then costs the servers no more than the copy.
    Its `tensors` are empty. One receipt, for all servers, answers it.
    """

    def __init__(
        self, host: str, port: int, *, engine: str = "", receivers: int | None = None, join_timeout_s: float = 120.0
    ) -> None:
        """`engine`: the name of all servers together, for messages. `receivers`: how many they are, for the sender to check.

        `join_timeout_s`: how long to wait for the sender, and then for the servers.
        """
        self._arrived: Arrived | None = None
        self._taken: Arrived | None = None
        hello = Hello(protocol=PROTOCOL, index=None, engine=engine, receivers=receivers)
        self._link = SenderLink(host, port, hello, join_timeout_s=join_timeout_s, on_order=self._note)
        self._link.start()

    def offered(self) -> int | None:
        """The version of the update that every server has, if it was not taken yet. Less than a microsecond."""
        if (arrived := self._arrived) is not None:
            return arrived.version
        self._link.raise_problem()
        return None

    def poll(self) -> WeightUpdate | None:
        """The same update; its tensors are with the servers. Raises WeightUpdateError if the transfer has failed."""
        if self.offered() is None:
            return None
        arrived, self._arrived = self._arrived, None
        self._taken = arrived
        return None if arrived is None else WeightUpdate(arrived.version, arrived.checksum, {})

    def acknowledge(self, receipt: UpdateReceipt) -> None:
        """Answer for the update that was taken last. Raises ValueError if there is none to answer for."""
        if self._taken is None:
            raise ValueError(f"no weight update is waiting for a receipt (version {receipt.version})")
        self._link.say(Answer.of(self._taken.number, receipt))
        self._taken = None

    def close(self) -> None:
        self._link.close()

    def _note(self, message: FromSender | None) -> None:
        if isinstance(message, Arrived):
            self._arrived = message
