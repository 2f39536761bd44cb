"""The status boards of several machines, kept equal through Redis, and the heartbeats of those who keep them.

    machine A                         Redis                       machine B
    stages ─▶ MmapBoard ──push──▶ {RUN}board, one field a stage ──pull──▶ MmapBoard ─▶ stages

Stages read and write the files of their machine, as in a run on one machine. A mirror on each machine copies what changed.
In Redis, times are those of the launcher's clock; a mirror converts them, so that each board has times of its own machine's
clock. Everything else is copied as it is, and with the machine's name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

import msgspec

from pipelinerl.interfaces import Board
from pipelinerl.redis_connection import RedisConnection
from pipelinerl.types import StageStatus


class RedisBoard:
    """A status board in Redis. `stages` looks, `read` returns what the last look found."""

    def __init__(self, connection: RedisConnection, prefix: str) -> None:
        self._connection = connection
        self._statuses_key, self._changes_key = f"{{{prefix}}}board", f"{{{prefix}}}board-changes"
        self._decoder = msgspec.json.Decoder(StageStatus)
        self._payloads: dict[str, bytes] = {}
        self._seen: dict[str, bytes] = {}

    def publish(self, status: StageStatus) -> None:
        self.publish_all([status])

    def publish_all(self, statuses: Sequence[StageStatus]) -> None:
        """Replace the statuses of these stages, all at once."""

        def replace() -> None:  # a pipeline forgets its commands when it fails
            with self._connection.client.pipeline() as pipe:
                for status in statuses:
                    pipe.hset(self._statuses_key, status.stage, msgspec.json.encode(status))
                    pipe.hincrby(self._changes_key, status.stage, 1)
                pipe.execute()

        self._connection.patiently(replace)

    def read(self, stage: str) -> StageStatus | None:
        payload = self._payloads.get(stage)
        return None if payload is None else self._decoder.decode(payload)

    def stages(self) -> Sequence[str]:
        found = self._connection.patiently(lambda: self._connection.client.hgetall(self._statuses_key))
        self._payloads = {stage.decode(): payload for stage, payload in found.items()}
        return sorted(self._payloads)

    def changed(self) -> list[StageStatus]:
        """The statuses that were published since the last call, of any stage."""
        numbers = self._connection.patiently(lambda: self._connection.client.hgetall(self._changes_key))
        stages = [stage for stage, number in numbers.items() if self._seen.get(stage.decode()) != number]
        if not stages:
            return []
        payloads = self._connection.patiently(lambda: self._connection.client.hmget(self._statuses_key, stages))
        self._seen |= {stage.decode(): numbers[stage] for stage in stages}
        return [self._decoder.decode(payload) for payload in payloads]

    def clear(self) -> None:
        """Remove the statuses of an earlier session."""
        client = self._connection.client
        self._connection.patiently(lambda: client.delete(self._statuses_key, self._changes_key))


class Mirror:
    """Keeps the board of one machine and the one in Redis equal. `own` are the stages that run on this machine."""

    def __init__(self, shared: RedisBoard, local: Board, own: Collection[str], *, machine: str, ahead_s: float) -> None:
        """`ahead_s`: this machine's clock (`time.monotonic`) minus the launcher's."""
        self._shared, self._local, self._own = shared, local, sorted(own)
        self._machine, self._ahead_s = machine, ahead_s
        self._pushed: dict[str, StageStatus] = {}

    def push(self) -> None:
        """Copy what stages of this machine have published since the last call."""
        found = {stage: status for stage in self._own if (status := self._local.read(stage)) is not None}
        changed = {stage: status for stage, status in found.items() if self._pushed.get(stage) is not status}
        if changed:
            moved = [self._moved(status, -self._ahead_s, self._machine) for status in changed.values()]
            self._shared.publish_all(moved)
            self._pushed |= changed

    def pull(self) -> None:
        """Copy what stages of other machines have published since the last call."""
        for status in self._shared.changed():
            if status.stage not in self._own:
                self._local.publish(self._moved(status, self._ahead_s, status.machine))

    @staticmethod
    def _moved(status: StageStatus, by_s: float, machine: str) -> StageStatus:
        times = {"since_s": status.since_s + by_s, "written_s": status.written_s + by_s}
        return msgspec.structs.replace(status, machine=machine, **times)


MOST_BETWEEN_S = 2.0
"""Most of the time between two beats of one's own that counts as silence of others: this process may have been stopped."""


class Heartbeats:
    """Who still beats, in Redis: everybody counts up its own field. Nobody compares clocks of different machines."""

    def __init__(
        self, connection: RedisConnection, prefix: str, name: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._connection, self._name, self._clock = connection, name, clock
        self._key = f"{{{prefix}}}alive"
        self._heard: dict[str, bytes] = {}
        self._silent_s: dict[str, float] = {}
        self._beaten_s = self._clock()

    def beat(self) -> None:
        """Count up one's own field, and look at those of the others."""
        client = self._connection.client

        def exchange() -> dict[bytes, bytes]:
            client.hincrby(self._key, self._name, 1)
            found: dict[bytes, bytes] = client.hgetall(self._key)
            return found

        found = self._connection.patiently(exchange)
        now = self._clock()
        passed_s, self._beaten_s = min(now - self._beaten_s, MOST_BETWEEN_S), now
        for name in {*self._silent_s, *(name.decode() for name in found)}:
            count = found.get(name.encode(), b"")
            if self._heard.get(name, b"") == count:
                self._silent_s[name] += passed_s
            else:
                self._heard[name], self._silent_s[name] = count, 0.0

    def silent_s(self, name: str) -> float:
        """For how long `name` has not counted, as `beat` has seen; at first since this was asked."""
        return self._silent_s.setdefault(name, 0.0)

    def clear(self) -> None:
        """Forget those of an earlier session."""
        self._connection.patiently(lambda: self._connection.client.delete(self._key))
