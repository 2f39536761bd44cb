"""Fencing: no process of an earlier session writes to a run whose next session has begun, however late it goes on.

On one machine the lock of the run directory is enough. Every process of a session holds it until it has ended, also while
it is stopped. On several machines, a process may be cut off or frozen, be replaced, and go on later:

    a new session   writes its id to `.session`. Then it removes unfinished folders of checkpoints, replaces files of records
                    by copies of them, and renames the run's keys in Redis
    a write         prepares everything, reads `.session`, and makes its one change to the run directory

A process that was frozen between reading and its change does no harm: a folder that was removed can't be renamed, and a
line goes to a file that has no name any more, or to a key that nobody reads.
"""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelinerl.checkpoint_folders import WEIGHTS_FOLDER, Folders, delete, install, remove_unfinished, superfluous, sync_tree
from pipelinerl.config.schema import RunConfig
from pipelinerl.errors import ReplacedError, RunDirectoryError
from pipelinerl.files import JsonLines, write_atomically
from pipelinerl.launch.run_directory import RunDirectory
from pipelinerl.launch.stages.streams import PREPARED, ROLLOUTS, name_in_redis, redis_of

if TYPE_CHECKING:
    from pipelinerl.launch.session import Session

_RENAME = """
for i = 1, #KEYS, 2 do
  if redis.call('EXISTS', KEYS[i]) == 1 then
    redis.call('RENAME', KEYS[i], KEYS[i + 1])
    if string.sub(KEYS[i], -7) == ':counts' then redis.call('HSET', KEYS[i + 1], 'reader', '') end
  end
end
"""
"""A stream has no reader then: the earlier one may be frozen, and still be connected."""


class Fence:
    """What a process checks directly before each change of the run directory."""

    def __init__(self, run: RunDirectory, session: str) -> None:
        """`session`: the id of this process's session."""
        self.root, self._file, self._session = run.root, run.current, session

    @classmethod
    def of(cls, session: Session) -> Fence:
        return cls(session.run, session.plan.id)

    def check(self) -> None:
        """Raises ReplacedError if a later session has begun, RunDirectoryError if this can't be known."""
        try:
            found = self._file.read_text()
        except OSError as error:
            raise RunDirectoryError(f"can't read {self._file}: {error.strerror}") from error
        if found != self._session:
            raise ReplacedError(
                f"a later session of {self.root} has begun, while this process was stopped or cut off: it writes no more"
            )


class FencedLines(JsonLines):
    """See `Session.lines`."""

    def __init__(self, path: Path, fence: Fence, *, empty: bool = False) -> None:
        self._fence = fence
        fence.check()
        if empty:
            path.unlink(missing_ok=True)
        super().__init__(path)

    def write(self, record: Any) -> None:
        """Also raises what `Fence.check` raises."""
        self._fence.check()
        super().write(record)


class FencedFolders(Folders):
    """Its methods also raise what `Fence.check` raises."""

    def __init__(self, fence: Fence) -> None:
        super().__init__()
        self._fence = fence

    def check(self) -> None:
        self._fence.check()

    def make(self, hidden: Path) -> None:
        self.check()
        super().make(hidden)

    def install(self, hidden: Path, target: Path, *, durable: bool) -> None:
        if durable:
            sync_tree(hidden)
        self.check()
        install(hidden, target)

    def keep_latest(self, directory: Path, version: int | None, count: int, *, spared_every: int = 0) -> None:
        found = superfluous(directory, version, count, spared_every=spared_every)  # before the check: those of this session
        self.check()
        delete(found)


def take_over(run: RunDirectory, session: str) -> None:
    """From now on, only processes of this session change the run directory. Raises OSError.

    `rollouts.jsonl` may be large, and is not replaced. A late line there is a group that was never handed over.
    """
    write_atomically(run.current, session.encode())
    for folder in (run.checkpoints, run.root / WEIGHTS_FOLDER):
        remove_unfinished(folder)
    records = (run.metrics, run.evaluations, run.sessions, run.published, *run.rollouts.glob("trained.jsonl"))
    for path in (*records, *run.root.glob("timeline-*.jsonl"), *run.streams.glob("redis/appendonlydir/*")):
        if path.exists():
            _replace_by_copy(path)


def _replace_by_copy(path: Path) -> None:
    copy = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        shutil.copy(path, copy)
        os.replace(copy, path)
    except BaseException:
        copy.unlink(missing_ok=True)
        raise


def take_over_keys(config: RunConfig, run: RunDirectory, redis_url: str | None, new: str) -> None:
    """Give the run's keys in Redis the name `new`, which no process of an earlier session knows. Raises StreamError.

    All earlier names are in a file until this is done, in case that this process is killed.
    """
    from pipelinerl.launch.away import Keys  # noqa: PLC0415 - needs the extra `redis`
    from pipelinerl.redis_connection import RedisConnection  # noqa: PLC0415 - as above

    url, _, patience_s = redis_of(config, run, redis_url)
    earlier = name_in_redis(run).read_text().split()
    write_atomically(name_in_redis(run), "\n".join([new, *earlier]).encode())

    def kept(prefix: str) -> list[str]:
        streams = (f"{{{prefix}{stream}}}:{part}" for stream in (ROLLOUTS, PREPARED) for part in ("items", "counts"))
        return [*streams, *Keys.of(prefix)]

    with closing(RedisConnection(url, "launcher", patience_s)) as connection:
        rename = connection.client.register_script(_RENAME)
        for name in earlier:
            pairs = [key for pair in zip(kept(name), kept(new), strict=True) for key in pair]
            others = [f"{{{name}}}{key}" for key in ("admission", "board", "board-changes", "alive")]
            connection.patiently(partial(rename, pairs))
            connection.patiently(partial(connection.client.delete, *others))
    write_atomically(name_in_redis(run), new.encode())


def stopped_holders(lock_fd: int) -> list[int]:
    """The stopped processes that have the file of a lock open (Linux only; elsewhere none are known)."""
    file, found = os.fstat(lock_fd), set()
    for opened in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # it has just ended
            stat = (opened.parents[1] / "stat").read_text()
            if stat.rpartition(")")[2].split()[0] == "T" and os.path.samestat(opened.stat(), file):
                found.add(int(opened.parents[1].name))
    return sorted(found)
