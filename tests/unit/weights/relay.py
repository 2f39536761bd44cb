"""The messages about weights as the hub passes them on, in one process: nothing arrives before it is taken."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from pipelinerl.hub import wire


class End:
    """One end of a connection. `number`: of the generation process; None: the trainer's."""

    def __init__(self, relay: Relay, number: int | None) -> None:
        self.number, self.asked = number, False
        self.inbox: deque[Any] = deque()
        self._relay, self._handlers = relay, dict[type[Any], Any]()

    def handle(self, kind: type[Any], handler: Any) -> None:
        self._handlers[kind] = handler

    def take(self) -> None:
        while self.inbox:
            message = self.inbox.popleft()
            if (handler := self._handlers.get(type(message))) is not None:
                handler(message)

    def send(self, message: Any) -> None:
        if isinstance(message, wire.EngineAnswer):
            self.asked = True
            self._relay.trainer.inbox.append(msgspec.structs.replace(message, engine=self.number))
        else:
            for end in self._relay.engines.values():
                if end.asked and message.engine in (None, end.number):
                    end.inbox.append(message)


class Relay:
    """The hub and its connections."""

    def __init__(self) -> None:
        self.trainer, self.engines = End(self, None), dict[int, End]()

    def engine(self, number: int = 0) -> End:
        """A new connection of generation process `number`."""
        self.engines[number] = End(self, number)
        return self.engines[number]

    def lose(self, number: int) -> None:
        """The process has died."""
        del self.engines[number]
        self.trainer.inbox.append(wire.EngineAnswer(wire.DEAD, engine=number))
