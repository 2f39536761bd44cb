"""Coordinator of a broadcast to engine servers: it decides when they apply the weights, and holds no weights itself.

It runs in the generation process.
"""

from __future__ import annotations

from pipelinerl.interfaces import WeightUpdate
from pipelinerl.types import UpdateReceipt
from pipelinerl.weights.broadcast.control import PROTOCOL, Answer, Arrived, FromSender, Hello
from pipelinerl.weights.broadcast.link import SenderLink


class CollectiveWeightCoordinator:
    """The `WeightReceiver` of a process whose engine consists of servers that receive the broadcast directly.

    An update becomes available once every server has received and verified all of it, so applying it costs a server only the
    copy. Its `tensors` are empty. One receipt acknowledges it for all servers.
    """

    def __init__(
        self, host: str, port: int, *, engine: str = "", receivers: int | None = None, join_timeout_s: float = 120.0
    ) -> None:
        """`engine`: a name for all servers together, for messages. `receivers`: their number, which the sender checks.

        `join_timeout_s`: how long to wait for the sender, and then for the servers.
        """
        self._arrived: Arrived | None = None
        self._taken: Arrived | None = None
        hello = Hello(protocol=PROTOCOL, index=None, engine=engine, receivers=receivers)
        self._link = SenderLink(host, port, hello, join_timeout_s=join_timeout_s, on_message=self._on_message)
        self._link.start()

    def offered(self) -> int | None:
        """The version of the update that every server has, if it was not taken yet, or None. Costs under a microsecond."""
        if (arrived := self._arrived) is not None:
            return arrived.version
        self._link.raise_problem()
        return None

    def poll(self) -> WeightUpdate | None:
        """The update that every server has, if it was not taken yet, or None. It has no tensors: the servers hold them.

        Raises WeightUpdateError if the transfer has failed.
        """
        if self.offered() is None:
            return None
        arrived, self._arrived = self._arrived, None
        self._taken = arrived
        return None if arrived is None else WeightUpdate(arrived.version, arrived.checksum, {})

    def acknowledge(self, receipt: UpdateReceipt) -> None:
        """Send the receipt for the update that was taken last. Raises ValueError if no update is waiting for one."""
        if self._taken is None:
            raise ValueError(f"no weight update is waiting for a receipt (version {receipt.version})")
        self._link.send(Answer.of(self._taken.number, receipt))
        self._taken = None

    def close(self) -> None:
        self._link.close()

    def _on_message(self, message: FromSender | None) -> None:
        if isinstance(message, Arrived):
            self._arrived = message
