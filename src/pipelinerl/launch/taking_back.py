"""Takes back the groups that generation processes had in progress when they died: `healing` calls it once they are dead.

Each group that a process had begun is either recorded, since its record is written first, or it is not. What is recorded is
handed over, unless that has happened; the other groups are returned to admission, and start again under their index.

in a database   Stream and record are two files, so a process may have died between them. The number of groups in the stream,
                compared with that in the record, says whether it has. All this happens under the lock of admission.
in Redis        A group and the record that counts it are written in one transaction, so no group that counts as begun is in
                the stream. What a dead process has sent is executed before this, or never (`Host.bury`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from sqlite3 import Connection
from typing import NamedTuple

import msgspec

from pipelinerl.actor.outstanding import SCHEMA, Outstanding
from pipelinerl.database import Database
from pipelinerl.errors import StageDiedError
from pipelinerl.launch.session import Session
from pipelinerl.launch.stages.streams import ROLLOUTS
from pipelinerl.types import Group


class Beginning(NamedTuple):
    """Where the session began: bytes of `rollouts.jsonl`, groups ever written to the rollout stream, and how many more were
    ever written to the prepared stream than taken from the first.
    """

    recorded: int
    written: int
    passed_on: int


class Part(NamedTuple):
    """What all processes of one number have done in this session, according to the record of admission.

    lost                        attempts of the groups that were taken back now
    groups, attempts, rollouts  of groups that were handed over: `rollouts` of the attempts are in them
    replaced                    rollouts that the stream dropped for newer ones
    """

    lost: int
    groups: int
    attempts: int
    rollouts: int
    replaced: int


class Begun(NamedTuple):
    """A group that a process has started and not handed over: a row of the record."""

    group: int
    process: int
    version: int
    attempts: int


class Recorded(NamedTuple):
    """A group in `rollouts.jsonl`, with its line."""

    group: Group
    line: bytes


def take_back(session: Session, processes: Collection[int], beginning: Beginning) -> dict[int, Part]:
    """Take back what generation processes of these numbers had in progress.

    Raises StageDiedError if it can't be known what they had done, OSError, and the errors of streams and of the database.
    """
    if session.config.launch.kind == "ray":
        return {process: _from_redis(session, process, beginning) for process in processes}
    return _from_database(session, processes, beginning)


# ---- the record in a database, on one machine


def _from_database(session: Session, processes: Collection[int], beginning: Beginning) -> dict[int, Part]:
    run = session.run
    with closing(Database(run.admission, SCHEMA, temporary=True)) as database:
        rows = database.rows("SELECT number, process, version, started FROM groups WHERE kept IS NULL ORDER BY number")
        begun = [one for row in rows if (one := Begun(*row)).process in processes]
        path = run.rollouts_of(0, shared=False)
        recorded = _recorded(path, beginning.recorded, {one.group for one in begun})
        with database.transaction() as record:  # actors wait: the stream and the record belong together
            _settle(session, record, begun, recorded, beginning)
            return {process: _part(record, process, begun, recorded) for process in processes}


def _settle(
    session: Session, record: Connection, begun: Collection[Begun], recorded: Mapping[int, Recorded], beginning: Beginning
) -> None:
    """Of the groups that were `begun` and not handed over, hand over those that were recorded, and return the others.

    A process that dies between writing a group to the stream and counting it as handed over has left one group more in the
    stream than was counted. Raises StageDiedError if it can't be known which of several groups that is.
    """
    ((json,),) = record.execute("SELECT json FROM record").fetchall()
    state = msgspec.json.decode(json, type=Outstanding)
    ((counted,),) = record.execute("SELECT count(*) FROM groups WHERE kept IS NOT NULL").fetchall()
    store = session.streams()
    with closing(store.writer(ROLLOUTS, Group, capacity=None, when_full="block", on_drop=None)) as stream:
        written = stream.stats().written - beginning.written - counted
        if written not in (0, len(recorded)):
            raise StageDiedError(
                f"{len(recorded)} generation processes died while they wrote a group, and {written} of these groups are "
                "in the stream: continue with --resume"
            )
        for index, _, version, attempts in begun:
            if index in recorded:
                group, line = recorded[index]
                if not written:
                    stream.try_write(group, line)
                state.hand_over(version, started=attempts, rollouts=len(group.rollouts))
                row = (len(group.rollouts), group.started, index)
                record.execute("UPDATE groups SET kept = ?, started = ? WHERE number = ?", row)
            else:
                state.hand_over(version, started=attempts, rollouts=0)
                state.returned.append(index)
                record.execute("DELETE FROM groups WHERE number = ?", (index,))
    state.returned.sort()
    record.execute("UPDATE record SET json = ?", (msgspec.json.encode(state),))


def _part(record: Connection, process: int, begun: Collection[Begun], recorded: Mapping[int, Recorded]) -> Part:
    (counts,) = record.execute(
        "SELECT total(started > 0), total(started), total(kept), (SELECT total(rollouts) FROM drops WHERE process = ?1) "
        "FROM groups WHERE process = ?1 AND kept IS NOT NULL",
        (process,),
    ).fetchall()
    lost = sum(one.attempts for one in begun if one.process == process and one.group not in recorded)
    return Part(lost, *map(int, counts))


# ---- the record in Redis, on several machines


def _from_redis(session: Session, process: int, beginning: Beginning) -> Part:
    from pipelinerl.launch.stages.admission import redis_admission  # noqa: PLC0415 - needs the extra `redis`

    path = session.run.rollouts_of(process, shared=True)
    with (
        closing(session.streams().writer(ROLLOUTS, Group, capacity=None, when_full="block", on_drop=None)) as stream,
        closing(redis_admission(session, stream, process)) as admission,
    ):
        begun = admission.part().begun
        for index, (group, line) in _recorded(path, 0 if process else beginning.recorded, begun).items():
            version, attempts = begun[index]
            write, rollouts = partial(stream.try_write, group, line), len(group.rollouts)
            admission.hand_over(index, version, started=attempts, rollouts=rollouts, write=write)
        lost, part = admission.return_groups(), admission.part()
    return Part(lost, part.groups, part.attempts, part.rollouts, part.replaced)


def _recorded(path: Path, begin: int, indices: Collection[int]) -> dict[int, Recorded]:
    """The groups of these indices in the file at `path`, from the byte `begin` on."""
    found: dict[int, Recorded] = {}
    starts = tuple(b'{"index":%d,' % index for index in indices)
    if not starts or not path.exists():
        return found
    with path.open("rb") as file:
        file.seek(begin)
        for line in file:
            if line.startswith(starts) and line.endswith(b"\n"):
                group = msgspec.json.decode(line, type=Group)
                found[group.index] = Recorded(group, line[:-1])
    return found
