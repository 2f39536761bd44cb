"""The run directory for a machine that does not have it: what its processes write there goes to the launcher's machine.

    process ──lines, requests──▶ Redis: {RUN}outbox ──▶ launcher (`hosts.head`) ──▶ the run directory
       ▲ │                       Redis: {RUN}answers ◀──┘      ▲
       │ └─▶ a folder of this machine instead of the run directory ──bytes of folders, by calls of the agent
       └──── answers

The outbox is one list, in order: what was pushed first is in the run directory first. A record is in Redis when `write`
returns, so what follows from it (its group in the stream, a checkpoint) never arrives without it, also if this machine is
lost.

    {RUN}outbox     a list of `Entry`s
    {RUN}pushed     a hash: the number of each sender's last entry. One whose answer was lost is not pushed twice. And
                    under `WAITING` the bytes in the outbox
    {RUN}answers    a hash: the `Answer` to each request, and under `TO_ALL` one to all, if the launcher takes no more
    {RUN}sizes      a hash: the size of each file without the entries in the outbox (see `hosts.head`)
    {RUN}ready      a hash: the ready files of engine servers, which all machines copy
"""

from __future__ import annotations

import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import msgspec

from pipelinerl.checkpoint_folders import FileRecord, Folders, files_in, record_of
from pipelinerl.errors import CheckpointError, StreamError
from pipelinerl.files import write_atomically
from pipelinerl.launch.stages.streams import redis_of
from pipelinerl.redis_connection import RedisConnection

if TYPE_CHECKING:
    from pipelinerl.launch.session import Session

MOST_WAITING_BYTES = 64 << 20
"""In the outbox, and one entry more for each sender. Then senders wait."""
WAITING = ""
LOOK_EVERY_S = 0.02
TO_ALL = "*"
"""Instead of the id of a request."""
LONGEST_PIECE = 1 << 20
"""Bytes of a log that are sent at once."""

_PUSH = """
if redis.call('HGET', KEYS[2], ARGV[1]) ~= ARGV[2] then
  redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
  redis.call('RPUSH', KEYS[1], ARGV[3])
  redis.call('HINCRBY', KEYS[2], '', #ARGV[3])
end
return redis.call('HGET', KEYS[2], '')
"""


class Append(msgspec.Struct, frozen=True, tag="append"):
    """Append `data` to the file. All paths of entries are relative to the run directory. `empty`: what it has is removed."""

    path: str
    data: bytes
    empty: bool = False


class Install(msgspec.Struct, frozen=True, tag="install", kw_only=True):
    """Take these files of a hidden folder from `machine`, and rename the folder to `target`.

    Without a `target`, it is not renamed yet: other machines have the rest. `durable`: it must survive a crash.
    """

    id: str
    machine: str
    folder: str
    files: dict[str, FileRecord]
    target: str | None = None
    durable: bool = True


class KeepLatest(msgspec.Struct, frozen=True, tag="keep", kw_only=True):
    """Delete old folders: see `checkpoint_folders.keep_latest`."""

    id: str
    directory: str
    version: int | None
    count: int
    spared_every: int


class State(msgspec.Struct, frozen=True):
    files: dict[str, FileRecord]


class Envelope(msgspec.Struct, frozen=True):
    """The part of a checkpoint's `state.json` that is read here: its other files."""

    state: State


Request = Install | KeepLatest
Entry = Append | Install | KeepLatest


class Answer(msgspec.Struct, frozen=True):
    """`done`: the request is carried out, or failed with `error`. Before, `sent_bytes` grows."""

    done: bool = False
    error: str = ""
    sent_bytes: int = 0


class Keys(NamedTuple):
    outbox: str
    pushed: str
    answers: str
    sizes: str
    ready: str

    @classmethod
    def of(cls, prefix: str) -> Keys:
        return cls(*(f"{{{prefix}}}{name}" for name in cls._fields))


class Outbox:
    """A sender. One thread may use it at a time."""

    def __init__(self, connection: RedisConnection, prefix: str) -> None:
        self._connection, self._keys = connection, Keys.of(prefix)
        self._push = connection.client.register_script(_PUSH)
        self._number = 0
        self.waits = True

    def push(self, entry: Entry) -> None:
        """It is in Redis when this returns. Waits while too much is there, if `waits` is True. Raises StreamError."""
        self._number += 1
        arguments = [self._connection.token, self._number, msgspec.msgpack.encode(entry)]
        waiting = self._connection.patiently(lambda: self._push(self._keys[:2], arguments))
        while self.waits and int(waiting or 0) > MOST_WAITING_BYTES:
            time.sleep(LOOK_EVERY_S)
            if answer := self._answer(TO_ALL):
                raise StreamError(answer.error)
            waiting = self._connection.patiently(lambda: self._connection.client.hget(self._keys.pushed, WAITING))

    def ask(self, request: Request, on_sent: Callable[[int], None]) -> None:
        """Push the request, and wait until it is carried out; `on_sent` is called with the bytes that were sent.

        Raises CheckpointError if it can't be carried out, StreamError.
        """
        self.push(request)
        while not (answer := self._answer(request.id) or self._answer(TO_ALL) or Answer()).done:
            on_sent(answer.sent_bytes)
            time.sleep(LOOK_EVERY_S)
        self._connection.patiently(lambda: self._connection.client.hdel(self._keys.answers, request.id))
        if answer.error:
            raise CheckpointError(answer.error)

    def _answer(self, request: str) -> Answer | None:
        found = self._connection.patiently(lambda: self._connection.client.hget(self._keys.answers, request))
        return None if found is None else msgspec.msgpack.decode(found, type=Answer)


@lru_cache(maxsize=1)
def _outbox(url: str, prefix: str, patience_s: float) -> Outbox:
    """One a process and session."""
    return Outbox(RedisConnection(url, "outbox", patience_s), prefix)


def outbox_of(session: Session) -> Outbox:
    return _outbox(*redis_of(session.config, session.run, session.plan.redis_url))


class AwayLines:
    """Writes records as JSON lines, like `JsonLines`, to a file in the run directory."""

    def __init__(self, session: Session, path: Path, *, empty: bool = False) -> None:
        """`path` is in this machine's folder; it is not created here. `empty`: remove what is in the file."""
        self._outbox = outbox_of(session)
        self._name = str(path.relative_to(session.run.root))
        self._encoder = msgspec.json.Encoder()
        self._outbox.push(Append(self._name, b"", empty=empty))

    def write(self, record: Any) -> None:
        """Raises StreamError if Redis does not take it."""
        self._outbox.push(Append(self._name, self._encoder.encode(record) + b"\n"))

    def alone(self) -> bool:
        return True

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass


class AwayFolders(Folders):
    """Folders of checkpoints that are made on this machine and kept in the run directory only."""

    any_thread = False

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._root, self._machine = session.run.root, session.here.machine
        self._outbox = outbox_of(session)

    def install(self, hidden: Path, target: Path, *, durable: bool) -> None:
        """Nothing is left here. Raises CheckpointError."""
        known = msgspec.json.decode((hidden / "state.json").read_bytes(), type=Envelope).state.files
        names = [str(path.relative_to(hidden)) for path in files_in(hidden)]
        files = {name: known[name] if name in known else record_of(hidden / name) for name in names}
        self._send(hidden, files, str(target.relative_to(self._root)), durable=durable)
        shutil.rmtree(hidden, ignore_errors=True)

    def keep_latest(self, directory: Path, version: int | None, count: int, *, spared_every: int = 0) -> None:
        name = str(directory.relative_to(self._root))
        request = KeepLatest(id=_new_id(), directory=name, version=version, count=count, spared_every=spared_every)
        self._outbox.ask(request, self.on_sent)

    def _send(self, folder: Path, files: Mapping[str, FileRecord], target: str | None, *, durable: bool) -> None:
        request = Install(
            id=_new_id(),
            machine=self._machine,
            folder=str(folder.relative_to(self._root)),
            files=dict(files),
            target=target,
            durable=durable,
        )
        self._outbox.ask(request, self.on_sent)


def _new_id() -> str:
    return secrets.token_hex(8)


class ReadyFiles:
    """Copies the ready files of engine servers between a `control` folder and Redis, so that all machines have all."""

    def __init__(self, control: Path, connection: RedisConnection, prefix: str) -> None:
        self._control, self._connection = control, connection
        self._key = Keys.of(prefix).ready
        self._known: dict[str, bytes] = {}

    def exchange(self) -> None:
        """Also what has changed: a server that was started again. Raises OSError and StreamError."""
        client = self._connection.client
        for path in self._control.glob("*.ready.json"):
            name, data = path.name, path.read_bytes()
            if self._known.get(name) != data:
                self._connection.patiently(lambda: client.hset(self._key, name, data))  # noqa: B023 - called at once
                self._known[name] = data
        found = self._connection.patiently(lambda: client.hgetall(self._key))
        for key, data in found.items():
            name = key.decode()
            if self._known.get(name) != data and Path(name).name == name:
                write_atomically(self._control / name, data)
                self._known[name] = data


class Sending:
    """What an agent sends of its machine's folder: what is new in logs, and ready files.

    Any thread may use it.
    """

    def __init__(self, session: Session, connection: RedisConnection, prefix: str, sent: dict[Path, int]) -> None:
        """`sent`: the bytes of each log that were sent in earlier sessions. It is kept up to date."""
        self._root, self._connection = session.run.root, connection
        self._outbox = Outbox(connection, prefix)
        self._ready = ReadyFiles(session.run.control, connection, prefix)
        self._sent = sent
        self._one = threading.Lock()

    def send(self) -> None:
        """Waits while the launcher is behind. Raises OSError and StreamError."""
        with self._one:
            self._ready.exchange()
            for path in (self._root / "logs").glob("*"):
                while path not in self._sent or path.stat().st_size > self._sent[path]:
                    sent = self._sent.get(path, 0)
                    with path.open("rb") as file:
                        file.seek(sent)
                        data = file.read(LONGEST_PIECE)
                    self._outbox.push(Append(str(path.relative_to(self._root)), data))
                    self._sent[path] = sent + len(data)

    def send_the_last(self) -> None:
        """The last `send`. It does not wait: the launcher may be gone. Raises OSError and StreamError."""
        self._outbox.waits = False
        with closing(self._connection):
            self.send()
