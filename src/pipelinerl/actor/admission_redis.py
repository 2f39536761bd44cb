"""Admission for generation processes on several machines: the shared record is in Redis. Exact, and without a lock.

    claim      snapshot (number, record, trainer's status: one script)  ─▶  decide here  ─▶  commit (one script):
               written if the number is still the same, else decide again on a new snapshot
    hand_over  the record is watched; it and the group are written in one transaction, or again if the record has changed

A lock would outlive its holder, or need a lease and a guard against holders whose lease is over. Here a process that dies
between two calls leaves nothing behind, and each record follows from the one before.

    {RUN}admission    a hash
        number        how many times the record was written
        json          the record
        process-N     what generation process number N has done (`Part`), written with the record
        claims-...    the number of this process's last commit

A commit whose answer was lost is sent again with its number, and is not executed twice. If it was not executed and others
have written since, it never will be: it names the number of the record that it was made from.

If process number N dies, the launcher opens its access to the record, hands over what it had recorded, and returns the other
groups (see `launch.taking_back`).

All processes read the trainer's status from Redis together with the record. It may be some milliseconds old, but nobody
decides by an older one than that of the claims before.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import msgspec

from pipelinerl.actor.admission import Admission, Admitted, Asked
from pipelinerl.actor.outstanding import Outstanding
from pipelinerl.errors import StreamError
from pipelinerl.interfaces import Schedule, Verdict
from pipelinerl.ledger import GroupLedger
from pipelinerl.redis_connection import PATIENCE_S, RedisConnection
from pipelinerl.types import TRAINER, StageStatus

REPEAT_S = 0.005
"""A denied claim is not asked for again in this time, which is shorter than a decode step of most models."""
_LONGEST_PAUSE_S = 0.002

_SNAPSHOT = """
local found = redis.call('HMGET', KEYS[1], 'number', 'json', ARGV[1], ARGV[2])
found[5] = redis.call('HGET', KEYS[2], ARGV[3])
return found
"""
_COMMIT = """
if redis.call('HGET', KEYS[1], ARGV[1]) == ARGV[2] then return 1 end
if redis.call('HGET', KEYS[1], 'number') ~= ARGV[3] then return 0 end
redis.call('HSET', KEYS[1], 'number', ARGV[3] + 1, 'json', ARGV[4], ARGV[5], ARGV[6], ARGV[1], ARGV[2])
return 1
"""


class Part(msgspec.Struct):
    """What the generation processes of one number have done in this session.

    begun                       the groups that are in progress, with their version and attempts
    groups, attempts, rollouts  of groups that were handed over: `rollouts` of the attempts are in them
    replaced                    rollouts that the stream dropped for newer ones
    """

    begun: dict[int, tuple[int, int]] = {}
    groups: int = 0
    attempts: int = 0
    rollouts: int = 0
    replaced: int = 0


class _Snapshot(NamedTuple):
    """Record, part of this process and trainer of one moment."""

    number: int
    state: Outstanding
    part: Part
    trainer: bytes | None


class _Denial(NamedTuple):
    """A denial with the inputs it was based on, valid without looking until `until_s`."""

    number: int
    trainer: bytes | None
    asked: Asked
    verdict: Verdict
    until_s: float


class RedisAdmission(Admission):
    """With the record in Redis, which `make_redis_record` creates once per session.

    The stream's writer must have `commit_with` as its `companion`: `hand_over` counts what that writer writes.
    """

    def __init__(
        self,
        url: str,
        prefix: str,
        schedule: Schedule,
        *,
        taken: GroupLedger | None = None,
        processes: int = 1,
        process: int = 0,
        patience_s: float = PATIENCE_S,
        repeat_s: float = REPEAT_S,
    ) -> None:
        """For generation process number `process`. `prefix`: of the run's keys. For `url` see `RedisConnection`.

        Raises StreamError if there is no record.
        """
        super().__init__(schedule, taken, processes)
        self._repeat_s = repeat_s
        self._connection = RedisConnection(url, "claims", patience_s)
        self._key, self._board_key = _keys(prefix)
        self._field = f"process-{process}"
        self._snapshot_script = self._connection.client.register_script(_SNAPSHOT)
        self._commit_script = self._connection.client.register_script(_COMMIT)
        self._decoder = msgspec.json.Decoder(Outstanding)
        self._parts = msgspec.json.Decoder(Part)
        self._statuses = msgspec.json.Decoder(StageStatus)
        self._attempted = self._confirmed = 0  # numbers of commits
        self._handing_over: Callable[[Outstanding, Part], None] | None = None
        self._denial: _Denial | None = None
        self._connection.opened(self._look)

    def open(self) -> None:
        def change(snapshot: _Snapshot) -> bool:
            snapshot.state.opened = True
            return True

        self._change(change)

    def claim(self, engine_version: int, own: int, rollouts: int) -> Admitted:
        asked = Asked(engine_version, own, rollouts)
        last, now = self._denial, time.monotonic()
        if last is not None and last.asked == asked and now < last.until_s:
            return Admitted(None, last.verdict)
        admitted = Admitted(None, Verdict(False))

        def decide(snapshot: _Snapshot) -> bool:
            nonlocal admitted
            inputs = (snapshot.number, snapshot.trainer, asked)
            if last is not None and last[:3] == inputs:
                admitted = Admitted(None, last.verdict)
            else:
                trainer = None if snapshot.trainer is None else self._statuses.decode(snapshot.trainer)
                admitted = self._decide(snapshot.state, trainer, asked)
            if admitted.group is None:
                self._denial = _Denial(*inputs, admitted.verdict, now + self._repeat_s)
                return False
            snapshot.part.begun[admitted.group] = (engine_version, rollouts)
            return True

        self._change(decide)
        return admitted

    def hand_over(
        self,
        index: int,
        version: int,
        *,
        started: int,
        rollouts: int,
        write: Callable[[], bool],
        skipped: bool = False,  # noqa: ARG002 - a filter needs one process
    ) -> bool:
        def change(state: Outstanding, part: Part) -> None:
            state.hand_over(version, started=started, rollouts=rollouts)
            part.begun.pop(index, None)
            part.groups, part.attempts, part.rollouts = part.groups + 1, part.attempts + started, part.rollouts + rollouts

        self._handing_over = change
        try:
            return write()
        finally:
            self._handing_over = None

    def commit_with(self, pipe: Any, dropped: int = 0) -> Callable[[], None] | None:
        """Called by the stream's writer before its transaction: the commands that the transaction shall have as well.

        None outside of `hand_over`. `dropped`: rollouts that the transaction drops from the stream. If the record changes
        before the transaction, Redis refuses it, and the writer repeats all of this.
        """
        change = self._handing_over
        if change is None:
            return None
        pipe.watch(self._key)
        json, part_json = pipe.hmget(self._key, "json", self._field)
        if json is None:
            raise self._lost()
        state, part = self._decoder.decode(json), self._part(part_json)
        change(state, part)
        state.drop(dropped)
        part.replaced += dropped

        def queue() -> None:
            pipe.hset(self._key, mapping={"json": msgspec.json.encode(state), self._field: msgspec.json.encode(part)})
            pipe.hincrby(self._key, "number", 1)

        return queue

    def stream_dropped(self, rollouts: int) -> None:
        """`commit_with` has counted them."""

    def may_take(self, version: int) -> Verdict:
        verdict = Verdict(False)

        def change(snapshot: _Snapshot) -> bool:
            nonlocal verdict
            newest = snapshot.state.newest_version
            verdict = self._take(snapshot.state, version)
            return snapshot.state.newest_version > newest

        self._change(change)
        return verdict

    def read(self) -> Outstanding:
        return self._connection.patiently(self._look).state

    def part(self) -> Part:
        """What the processes of this number have done."""
        return self._connection.patiently(self._look).part

    def return_groups(self) -> int:
        """Return the groups in progress of this process, which has died. Returns the number of their attempts."""
        attempts = 0

        def change(snapshot: _Snapshot) -> bool:
            nonlocal attempts
            begun, snapshot.part.begun = snapshot.part.begun, {}
            attempts = sum(started for _, started in begun.values())
            for version, started in begun.values():
                snapshot.state.hand_over(version, started=started, rollouts=0)
            snapshot.state.returned = sorted([*snapshot.state.returned, *begun])
            return True

        self._change(change)
        return attempts

    def close(self) -> None:
        self._connection.close()

    def _change(self, change: Callable[[_Snapshot], bool]) -> None:
        """Have `change` edit the record of a snapshot, and write it if it returns True; again until nobody was faster."""
        while change(snapshot := self._connection.patiently(self._look)):
            self._attempted += 1
            state, part = msgspec.json.encode(snapshot.state), msgspec.json.encode(snapshot.part)
            arguments = [self._connection.token, self._attempted, snapshot.number, state, self._field, part]
            if self._connection.patiently(partial(self._commit_script, [self._key], arguments)):
                self._confirmed = self._attempted
                return
            time.sleep(random.uniform(0, _LONGEST_PAUSE_S))

    def _look(self) -> _Snapshot:
        keys, arguments = [self._key, self._board_key], [self._connection.token, self._field, TRAINER]
        number, json, committed, part, trainer = self._snapshot_script(keys, arguments)
        if json is None or int(committed or 0) < self._confirmed:
            raise self._lost()
        return _Snapshot(int(number), self._decoder.decode(json), self._part(part), trainer)

    def _part(self, json: bytes | None) -> Part:
        return Part() if json is None else self._parts.decode(json)

    def _lost(self) -> StreamError:
        return StreamError(
            f"{self._connection.url}: the record of started rollouts is not in Redis as this process left it: a later "
            "session of the run has begun, Redis was restarted without its data or with older data, or a key was deleted. "
            "Resume the run from its checkpoint"
        )


def make_redis_record(connection: RedisConnection, prefix: str, handed_over: int = 0, settled: int = 0) -> None:
    """Create the record of a session that starts with `handed_over` rollouts in the stream, `settled` trained or dropped."""
    key, _ = _keys(prefix)

    def replace() -> None:
        with connection.client.pipeline() as pipe:
            pipe.delete(key)
            first = Outstanding(handed_over=handed_over, settled=settled)
            pipe.hset(key, mapping={"number": 0, "json": msgspec.json.encode(first)})
            pipe.execute()

    connection.patiently(replace)


def _keys(prefix: str) -> tuple[str, str]:
    """The keys of the record and of the status board (`status.mirror`)."""
    return f"{{{prefix}}}admission", f"{{{prefix}}}board"
