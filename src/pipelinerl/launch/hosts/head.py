"""The launcher's part of `launch.away`: takes what machines without the run directory send, and writes it there.

Each line arrives exactly once, wherever the launcher is killed. Redis has the size of each file without the entries that
are still in the outbox. To take some, the launcher cuts the file to that size, appends them and syncs it; then one script
removes them from the outbox and sets the new size. Killed in between, the next launcher does the same again.

Folders are pulled, piece by piece, so what is in memory is bounded. A folder gets its name when all of its files are there
with their sizes and checksums.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import xxhash

from pipelinerl.actor.admission_redis import make_redis_record
from pipelinerl.checkpoint_folders import FileRecord, files_in
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import INVALID_DATA, CheckpointError, PipelineRLError, ReplacedError, RunDirectoryError, StreamError
from pipelinerl.files import JsonLines, remedy
from pipelinerl.launch.away import TO_ALL, Answer, Append, Entry, Envelope, Install, KeepLatest, Keys, ReadyFiles, Request
from pipelinerl.launch.fence import Fence, FencedFolders, take_over_keys
from pipelinerl.launch.run_directory import RunDirectory
from pipelinerl.launch.run_lock import new_name
from pipelinerl.launch.session import Session
from pipelinerl.launch.stages.streams import redis_of
from pipelinerl.redis_connection import RedisConnection
from pipelinerl.status.mirror import RedisBoard

Fetch = Callable[[str, str, int], Iterator[bytes]]
"""The pieces of a file of this size on a machine: `fetch(machine, path, size)`. Raises PipelineRLError."""

TAKE_EVERY_S = 0.05
AT_ONCE = 256
"""Entries that are taken at once."""
TRANSFERS = 4
"""Folders that are pulled at the same time: of several ranks of the trainer."""
SAY_EVERY_S = 0.5

_REMOVE = """
if redis.call('HGET', KEYS[2], '') == ARGV[1] then return 0 end
redis.call('LTRIM', KEYS[1], ARGV[2], -1)
redis.call('HINCRBY', KEYS[3], '', -ARGV[3])
redis.call('HSET', KEYS[2], '', ARGV[1])
for i = 4, #ARGV, 2 do redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1]) end
return 1
"""


class Head:
    """`fetch` is None between sessions: requests whose senders have ended are forgotten."""

    def __init__(self, connection: RedisConnection, prefix: str, fence: Fence, fetch: Fetch | None = None) -> None:
        self._connection, self._fence, self._fetch = connection, fence, fetch
        self._root, self._folders = fence.root, FencedFolders(fence)
        self._keys = Keys.of(prefix)
        self._decoder = msgspec.msgpack.Decoder(Entry)
        self._remove = connection.client.register_script(_REMOVE)
        self._removals = 0
        self._pool = ThreadPoolExecutor(TRANSFERS, "transfers")
        self._making = threading.Lock()

    def begin(self) -> None:
        """Forget what an earlier session has left, of which everything was taken."""
        self._connection.patiently(lambda: self._connection.client.delete(*self._keys))

    def take_all(self) -> None:
        """Take what is in the outbox. Raises StreamError, or RunDirectoryError if it can't be written: it stays in Redis."""
        while self._take():
            pass

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._connection.close()

    def _take(self) -> bool:
        """Take the first entries. Returns whether there were any."""
        client, keys = self._connection.client, self._keys
        found = self._connection.patiently(lambda: client.lrange(keys.outbox, 0, AT_ONCE - 1))
        if not found:
            return False
        try:
            entries: list[Entry] = [self._decoder.decode(entry) for entry in found]
        except INVALID_DATA as error:
            raise StreamError(f"the version that ran before sent what this one can't read: {error}") from error
        appended: list[Append] = []
        for entry in entries:
            if not isinstance(entry, Append):
                break
            appended.append(entry)
        if appended:
            self._taken(found[: len(appended)], self._append(appended))
            return True
        (request, *_) = entries
        assert not isinstance(request, Append)  # noqa: S101 - see above
        if self._fetch is not None:
            self._pool.submit(self._carry_out, request, self._fetch)
        self._taken(found[:1], {})
        return True

    def _taken(self, first: Sequence[bytes], sizes: Mapping[str, int]) -> None:
        """Remove these entries. Sent again if the answer is lost, it is not executed twice."""
        self._removals += 1
        arguments: list[str | int] = [f"{self._connection.token}:{self._removals}", len(first), sum(map(len, first))]
        for name, size in sizes.items():
            arguments += [name, size]
        keys = [self._keys.outbox, self._keys.sizes, self._keys.pushed]
        self._connection.patiently(lambda: self._remove(keys, arguments))

    def _append(self, entries: Sequence[Append]) -> dict[str, int]:
        """Write the entries to their files. Returns the new sizes of these."""
        pieces: dict[str, list[bytes]] = {}
        emptied = set()
        for entry in entries:
            if entry.empty:
                emptied.add(entry.path)
                pieces[entry.path] = []
            pieces.setdefault(entry.path, []).append(entry.data)
        sizes = {}
        for name, parts in pieces.items():
            path = self._inside(name)
            try:
                start = 0 if name in emptied else self._known_size(name, path)
                data = b"".join(parts)
                self._fence.check()
                _write_at(path, start, data)
            except OSError as error:
                raise RunDirectoryError(
                    f"can't write to {path}: {error.strerror}; {remedy(error)}, and resume: nothing is lost"
                ) from error
            sizes[name] = start + len(data)
        return sizes

    def _known_size(self, name: str, path: Path) -> int:
        """The size of the file without the entries in the outbox. Redis has it from now on."""
        client, key = self._connection.client, self._keys.sizes
        if (known := self._connection.patiently(lambda: client.hget(key, name))) is not None:
            return int(known)
        size = _size_of(path)
        self._connection.patiently(lambda: client.hset(key, name, size))
        return size

    def _inside(self, name: str) -> Path:
        """A path in the run directory. Raises RunDirectoryError for one that is not."""
        path = self._root / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise RunDirectoryError(f"a machine of the run sent a file for {path}, which is not in the run directory")
        return path

    # ---- requests, in threads of their own

    def _carry_out(self, request: Request, fetch: Fetch) -> None:
        error = ""
        try:
            if isinstance(request, KeepLatest):
                directory = self._inside(request.directory)
                self._folders.keep_latest(directory, request.version, request.count, spared_every=request.spared_every)
            else:
                self._install(request, fetch)
        except Exception as failure:  # noqa: BLE001 - the sender waits for an answer
            why = failure.strerror if isinstance(failure, OSError) else str(failure)
            error = why or f"{type(failure).__name__}: {failure}"
            if isinstance(request, Install):
                shutil.rmtree(self._root / request.folder, ignore_errors=True)
                error = f"can't write checkpoint {self._root / (request.target or request.folder)}: {error}"
        self._answer(request.id, Answer(done=True, error=error))

    def _install(self, request: Install, fetch: Fetch) -> None:
        folder = self._inside(request.folder)
        with self._making:
            if not folder.exists():
                self._folders.make(folder)
        sent = said_s = 0.0
        for name, record in request.files.items():
            path = self._inside(f"{request.folder}/{name}")
            path.parent.mkdir(parents=True, exist_ok=True)
            digest = xxhash.xxh3_128()
            with path.open("wb") as file:
                for piece in fetch(request.machine, f"{request.folder}/{name}", record.size):
                    file.write(piece)
                    digest.update(piece)
                    sent += len(piece)
                    if time.monotonic() - said_s > SAY_EVERY_S:
                        said_s = time.monotonic()
                        self._answer(request.id, Answer(sent_bytes=int(sent)))
            if FileRecord(path.stat().st_size, digest.hexdigest()) != record:
                raise CheckpointError(f"{name} has changed on its way from {request.machine}")
        if request.target is not None:
            _check_whole(folder)
            self._folders.install(folder, self._inside(request.target), durable=request.durable)

    def refuse(self, why: str) -> None:
        """Answer all who wait, now or later."""
        self._answer(TO_ALL, Answer(done=True, error=why))

    def _answer(self, request: str, answer: Answer) -> None:
        client, encoded = self._connection.client, msgspec.msgpack.encode(answer)
        self._connection.patiently(lambda: client.hset(self._keys.answers, request, encoded))


class RunningHead:
    """Takes what arrives, in a thread, until `close`. `problem`: why it does not go on."""

    def __init__(self, head: Head, ready: ReadyFiles) -> None:
        self._head, self._ready = head, ready
        self.problem: PipelineRLError | None = None
        self._rounds = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="head", daemon=True)
        self._thread.start()

    def catch_up(self) -> None:
        """Wait until what is in the outbox now has been taken. Raises the `problem`."""
        enough = self._rounds + 2  # the present round may have found the outbox empty before
        while self._rounds < enough:
            if self.problem is not None:
                raise self.problem
            time.sleep(TAKE_EVERY_S)

    def close(self) -> None:
        """What is still in the outbox is taken at the end of the session."""
        self._stop.set()
        self._thread.join()
        self._head.close()

    def _run(self) -> None:
        while not self._stop.wait(TAKE_EVERY_S):
            try:
                self._head.take_all()
                self._ready.exchange()
                self._rounds += 1
            except PipelineRLError as error:
                self.problem = error
            except OSError as error:
                self.problem = RunDirectoryError(f"can't write to {error.filename}: {error.strerror}")
            if self.problem is not None:
                with suppress(StreamError):
                    self._head.refuse(str(self.problem))
                return


def write_start(session: Session, handed_over: int) -> None:
    """Before a session: what processes on one machine share in files, those on several share in Redis."""
    url, prefix, _ = redis_of(session.config, session.run, session.plan.redis_url)
    with closing(RedisConnection(url, "launcher")) as connection:
        make_redis_record(connection, prefix, handed_over, session.plan.settled)
        RedisBoard(connection, prefix).clear()


def take_what_is_left(config: RunConfig, run: RunDirectory, redis_url: str | None, session: str) -> None:
    """Before a session, whose id is `session`: take over what the processes of the last one have sent, and forget them.

    Raises RunDirectoryError and StreamError.
    """
    take_over_keys(config, run, redis_url, new_name())
    _take_what_is_left(config, run, redis_url, Fence(run, session))


def gather(session: Session, *, redis: bool) -> PipelineRLError | None:
    """At the end of a session: take what its processes have sent, if `redis` is there, and join their files.

    Returns what went wrong. Raises ReplacedError if a later session has begun.
    """
    from pipelinerl.launch.resume import join_rollouts  # noqa: PLC0415 - with torch

    fence = Fence.of(session)
    problem: PipelineRLError | None = None
    fence.check()
    try:
        if redis:
            _take_what_is_left(session.config, session.run, session.plan.redis_url, fence)
    except ReplacedError:
        raise
    except PipelineRLError as error:
        problem = error
    join_rollouts(session.run.rollouts)
    return problem


def _take_what_is_left(config: RunConfig, run: RunDirectory, redis_url: str | None, fence: Fence) -> None:
    url, prefix, _ = redis_of(config, run, redis_url)
    with closing(Head(RedisConnection(url, "head"), prefix, fence)) as head:
        head.take_all()
        head.begin()


def _size_of(path: Path) -> int:
    """The size of a file, without a partial last line of records."""
    if not path.exists():
        return 0
    if path.suffix == ".jsonl":
        JsonLines(path).close()
    return path.stat().st_size


def _write_at(path: Path, start: int, data: bytes) -> None:
    """Replace what follows on the first `start` bytes. On OSError, only these are left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        start = min(start, os.fstat(fd).st_size)
        os.ftruncate(fd, start)
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(fd, data[done:], start + done)
            os.fsync(fd)
        except BaseException:
            os.ftruncate(fd, start)
            raise
    finally:
        os.close(fd)


def _check_whole(folder: Path) -> None:
    """Raises CheckpointError if a file that the checkpoint's state names is missing."""
    there = {str(path.relative_to(folder)): path.stat().st_size for path in files_in(folder)}
    try:
        named = msgspec.json.decode((folder / "state.json").read_bytes(), type=Envelope).state.files
    except (OSError, *INVALID_DATA) as error:
        raise CheckpointError(f"its state.json did not arrive: {error}") from error
    for name, record in named.items():
        if there.get(name) != record.size:
            raise CheckpointError(f"{name} did not arrive")
